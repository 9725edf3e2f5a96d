"""Seals: a file's checksum within the file itself, so that both are replaced in the same step.

A sealed file holds, in a place that its format leaves to its writer (a note in a Parquet or safetensors header, an
entry of a JSON object), :data:`BLANK` with the digits of a SHA-256 in the place of the zeros: that of the whole file
while they were zeros. Whatever reads the format reads the file as before. A file without a seal was written before
there were any, and is taken as it is.
"""

from __future__ import annotations

import hashlib
import mmap
from pathlib import Path

from coterie.errors import RunFolderError

_MARK = b"coterie-sha256:"
_DIGITS = 64
BLANK = (_MARK + b"0" * _DIGITS).decode()
"""What a file holds where its seal is to stand."""
_BLOCK = 2**22


def seal(path: Path) -> None:
    """Put the checksum of a file into its blank."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        begin = content.rfind(BLANK.encode()) + len(_MARK)
        if begin < len(_MARK):
            raise ValueError(f"{path} has no blank for a seal")
        content[begin : begin + _DIGITS] = _digest(content, begin).encode()
        content.flush()


def check_seal(path: Path) -> None:
    """Refuse a file that is not what was sealed with a ``RunFolderError``; one without a seal is taken as it is."""
    with path.open("rb") as file:
        if not file.seek(0, 2):
            raise RunFolderError(f"{path} is damaged (it is empty): put a copy of it back")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            begin = content.rfind(_MARK) + len(_MARK)
            if begin >= len(_MARK) and content[begin : begin + _DIGITS] != _digest(content, begin).encode():
                raise RunFolderError(
                    f"{path} is damaged (it does not match its checksum): put a copy of it back, or run it again"
                )


def _digest(content: mmap.mmap, begin: int) -> str:
    """Give the SHA-256 of a file whose digits, which begin there, are zeros."""
    found = hashlib.sha256()
    for part, end in ((0, begin), (begin + _DIGITS, len(content))):
        if part:
            found.update(b"0" * _DIGITS)
        for at in range(part, end, _BLOCK):
            found.update(content[at : min(at + _BLOCK, end)])
    return found.hexdigest()
