"""The version of the files that a node keeps on its own disk."""

from __future__ import annotations

from pathlib import Path

from coterie.errors import CheckpointError
from coterie.version import __version__

FORMAT = 1
"""Raised by one whenever such a file changes so that an earlier Coterie would misread it."""


def check_format(found: object, path: Path, advice: str) -> None:
    """Refuse a file of another format; ``found`` is None where the file names none."""
    if found != FORMAT:
        which = "no format: an earlier Coterie wrote it" if found is None else f"format {found!r}"
        raise CheckpointError(f"{path} has {which}, but Coterie {__version__} reads format {FORMAT}: {advice}")
