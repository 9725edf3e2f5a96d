"""Seals: a file's checksum within the file itself, so that both are replaced in the same step.

A sealed file holds, in a place that its format leaves to its writer (a note in a Parquet or safetensors header, an
entry of a JSON object), :data:`BLANK` with the digits of a SHA-256 in the place of the zeros: that of the whole file
while they were zeros. Whatever reads the format reads the file as before. A file without a seal was written before
there were any, and is taken as it is.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from coterie.errors import RunFolderError

_MARK = b"coterie-sha256:"
_DIGITS = 64
BLANK = (_MARK + b"0" * _DIGITS).decode()
"""What a file holds where its seal is to stand."""
_BLOCK = 2**22


def sealed(content: bytes) -> bytes:
    """Give what a file is to hold with its checksum in its blank."""
    begin = content.rfind(BLANK.encode()) + len(_MARK)
    if begin < len(_MARK):
        raise ValueError("there is no blank for a seal")
    return b"".join((content[:begin], _digest(content, begin).encode(), content[begin + _DIGITS :]))


def seal(path: Path) -> None:
    """Put the checksum of a file into its blank; whoever forces the file to the disk does so afterwards."""
    with path.open("r+b") as file, _content(file) as content:
        begin = _last(content, BLANK.encode()) + len(_MARK)
        if begin < len(_MARK):
            raise ValueError(f"{path} has no blank for a seal")
        digits = _digest(content, begin).encode()
        file.seek(begin)
        file.write(digits)


def check_seal(path: Path) -> None:
    """Refuse a file that is not what was sealed with a ``RunFolderError``; one without a seal is taken as it is."""
    with path.open("rb") as file:
        if not file.seek(0, 2):
            raise RunFolderError(f"{path} is damaged (it is empty): put a copy of it back")
        with _content(file) as content:
            begin = _last(content, _MARK) + len(_MARK)
            if begin >= len(_MARK) and content[begin : begin + _DIGITS] != _digest(content, begin).encode():
                raise RunFolderError(
                    f"{path} is damaged (it does not match its checksum): put a copy of it back, or run it again"
                )


@contextlib.contextmanager
def _content(file: IO[bytes]) -> Iterator[bytes | mmap.mmap]:
    """Give what is in a file: read as a whole if it is small, as most are, for to map it would take longer."""
    if file.seek(0, 2) <= _BLOCK:
        file.seek(0)
        yield file.read()
        return
    with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        yield content


def _digest(content: bytes | mmap.mmap, begin: int) -> str:
    """Give the SHA-256 of a file whose digits, which begin there, are zeros."""
    found = hashlib.sha256()
    for part, end in ((0, begin), (begin + _DIGITS, len(content))):
        if part:
            found.update(b"0" * _DIGITS)
        for at in range(part, end, _BLOCK):
            found.update(content[at : min(at + _BLOCK, end)])
            _let_go(content, at)
    return found.hexdigest()


def _last(content: bytes | mmap.mmap, text: bytes) -> int:
    """Find the last place of a text in a file, -1 if there is none."""
    for end in range(len(content), 0, -_BLOCK):
        found = content.rfind(text, max(0, end - _BLOCK - len(text)), end)
        _let_go(content, max(0, end - _BLOCK - len(text)))
        if found >= 0:
            return found
    return -1


def _let_go(content: bytes | mmap.mmap, begin: int) -> None:
    """Let go of the pages of a block that was read: they stay in the system's memory, but do not count as ours."""
    if isinstance(content, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
        content.madvise(mmap.MADV_DONTNEED, begin - begin % mmap.PAGESIZE)
