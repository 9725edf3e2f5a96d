"""A dictionary that does not grow: of what can be made again, the newest is kept."""

from __future__ import annotations

from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


class BoundedCache(dict[Key, Value]):
    """Keeps no more than some entries; those that were put in longest ago go first.

    Parameters
    ----------
    most
        How many are kept.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def __setitem__(self, key: Key, value: Value) -> None:
        self.pop(key, None)  # what is put in again is the newest again
        super().__setitem__(key, value)
        while len(self) > self._most:
            del self[next(iter(self))]
