"""Objects that a program hands over in place of text: a configuration names them by label and digest.

``object:Net@0123…`` stands for an object that only the program has. It is found here while the program holds it: what
:func:`hold` gives must be kept for as long.
"""

from __future__ import annotations

import re
import weakref
from dataclasses import dataclass
from typing import Any

from coterie.errors import ConfigError

OBJECT = "object:"
"""What the text of an object begins with."""

_TEXT = re.compile(r"object:([^@:,]+)@([0-9a-f]{32})")


@dataclass(frozen=True, eq=False)
class HeldObject:
    """An object with what it is called and what stands for it."""

    label: str
    digest: str
    value: Any

    @property
    def text(self) -> str:
        """How a configuration names it."""
        return f"{OBJECT}{self.label}@{self.digest}"


# Of equal objects the one that was handed over last; whoever holds none of them lets them go.
_held: weakref.WeakValueDictionary[str, HeldObject] = weakref.WeakValueDictionary()
_kept: dict[str, HeldObject] = {}


def hold(label: str, digest: str, value: object, keep: bool = False) -> HeldObject:
    """Make an object known for as long as what is returned is kept, or with ``keep`` for as long as the program runs.

    A model or a loss is small, and whoever looks at a finished run wants it again; data are neither.
    """
    held = HeldObject(re.sub(r"[^\w.-]+", "_", label).strip("_.-") or "unnamed", digest, value)
    _held[digest] = held
    if keep:
        _kept[digest] = held
    return held


def digest_in(text: str) -> str | None:
    """Give the digest in the text of an object; ``None`` if the text is not of that form."""
    found = _TEXT.match(text)
    return None if found is None else found[2]


def find(field: str, text: str) -> Any:
    """Give the object that a setting's text stands for; one that is not here is a ``ConfigError``."""
    found = _held.get(digest_in(text) or "")
    if found is None:
        raise ConfigError(missing(field, text))
    return found.value


def missing(field: str, text: str) -> str:
    """Write the sentence for an object that is not here."""
    return (
        f"{field} is {text.partition('@')[0]!r}, an object of the Python program that began the run, which is not "
        f"here: hand it over again with coterie.resume(PATH, {field}=...)"
    )
