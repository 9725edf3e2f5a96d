"""A dictionary of bounded size, and keys that compare objects by identity."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedCache(dict[Key, Value]):
    """A dictionary of at most ``limit`` entries: an insertion beyond that drops the entry that was set longest ago.

    Parameters
    ----------
    limit
        The number of entries that are kept.
    """

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: Key, value: Value) -> None:
        self.pop(key, None)  # an entry that is set again becomes the latest one
        super().__setitem__(key, value)
        while len(self) > self._limit:
            del self[next(iter(self))]


class Identity:
    """A dictionary key that equals another one if both stand for the very same object.

    To compare tensors by value would wait for the device, and a task need not be hashable. The key holds the object, so
    that its address cannot be given to another one while the key is in use.

    Parameters
    ----------
    held
        The object.
    """

    __slots__ = ("_held",)

    def __init__(self, held: object) -> None:
        self._held = held

    def __hash__(self) -> int:
        return id(self._held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self._held is other._held
