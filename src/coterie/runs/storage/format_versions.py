"""Versions of what is written: a reader that meets another one says so, and does not misread it.

Whatever is written with a version is a JSON object with ``format``, a whole number, and ``coterie``, the version of
Coterie that wrote it. A change that this version would misread takes the next number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coterie.errors import CoterieError
from coterie.version import __version__


def stamp(number: int) -> dict[str, Any]:
    """Give the entries that say in which format something is written, and by whom."""
    return {"format": number, "coterie": __version__}


def check_format(what: str, record: Mapping[str, Any], reads: int, error: type[CoterieError]) -> None:
    """Refuse a record whose format is not the one that is read here; ``what`` names it in the sentence."""
    found, writer = record.get("format"), record.get("coterie")
    ours = f"Coterie {__version__} reads format {reads}"
    if found is None:
        raise error(f"{what} has no format, as before there were any, and {ours}: use the version that wrote it")
    if not isinstance(found, int) or isinstance(found, bool):
        raise error(f"{what} is damaged: its format is {found!r}, but must be a whole number")
    if found != reads:
        writers = f"Coterie {writer}, which wrote it" if isinstance(writer, str) else "the version that wrote it"
        age = "a newer" if found > reads else "an older"
        raise error(f"{what} is of {age} format, {found}, and {ours}: use {writers}")
