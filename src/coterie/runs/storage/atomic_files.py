"""Files that are either whole or not there, whenever the process or the machine stops.

A file is written under a draft name, forced to the disk, and then renamed over its place in one step; the folder is
forced to the disk after that, since the rename lives there. Nothing here cleans up after a failure: a kill would not
either, so what is left by a failure is exactly what is left by a kill, a draft that the next writer replaces. There is
one writer at a time.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from coterie.errors import RunFolderError
from coterie.runs.storage import seals
from coterie.runs.storage.seals import BLANK, check_seal

_SEAL = "checksum"


def sync(path: Path) -> None:
    """Force a file's contents, or a folder's entries, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def is_draft(path: Path) -> bool:
    """Say whether a name is that of a draft, which counts as not there."""
    return path.name.startswith(".") and path.name.endswith(".draft")


def remove_drafts(*folders: Path) -> None:
    """Remove what writers that were killed left behind; only whoever may write may call this."""
    for folder in folders:
        for path in folder.iterdir() if folder.is_dir() else ():
            if is_draft(path):
                path.unlink(missing_ok=True)


def append_lines(path: Path, lines: Iterable[str]) -> None:
    """Add whole lines to a file of lines and force them to the disk; all of them, or none if that fails.

    A last line that a kill cut short is dropped first: what is added would else be part of it.
    """
    with path.open("a+b") as file:
        size = _end_of_last_line(file)
        file.truncate(size)
        try:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(path, size)
            raise


def _end_of_last_line(file: IO[bytes]) -> int:
    at = file.seek(0, os.SEEK_END)
    while at > 0:
        begin = max(0, at - 4096)
        file.seek(begin)
        found = file.read(at - begin).rfind(b"\n")
        if found >= 0:
            return begin + found + 1
        at = begin
    return 0


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a draft to write to, then put it in its place; if the block raises, what was in the place stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft(path)
    yield draft
    sync(draft)
    os.replace(draft, path)
    sync(path.parent)


def replace_all(folder: Path, files: Iterable[tuple[str, bytes | Callable[[Path], None]]]) -> None:
    """Write several files of a folder, each in one step; the folder is forced to the disk once, after the last.

    ``files`` are each one's name, and what it is to hold, or what writes its draft.
    """
    path: Path | None = None
    for name, content in files:
        if path is None:
            folder.mkdir(parents=True, exist_ok=True)
        path = folder / name
        draft = _draft(path)
        if isinstance(content, bytes):
            _write_synced(draft, content)
        else:
            content(draft)
            sync(draft)
        os.replace(draft, path)
    if path is not None:
        sync(folder)


def _write_synced(path: Path, content: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        left = memoryview(content)
        while left:
            left = left[file.write(left) :]
        os.fsync(file.fileno())


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.draft")


def write_bytes(path: Path, content: bytes) -> None:
    replace_all(path.parent, [(path.name, content)])


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Mapping[str, Any], sealed: bool = False) -> None:
    """Write a JSON file for people and other programs; numbers that are not finite become ``null``."""
    write_bytes(path, json_bytes(value, sealed))


def json_bytes(value: Mapping[str, Any], sealed: bool = True) -> bytes:
    """Give what :func:`write_json` writes."""
    plain = {**_finite(value), **({_SEAL: BLANK} if sealed else {})}
    content = (json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
    return seals.sealed(content) if sealed else content


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file, without its seal; anything else in it is a ``RunFolderError``."""
    check_seal(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged ({error}): it must be a JSON object") from error
    if not isinstance(value, dict):
        raise RunFolderError(f"{path} is damaged (it holds a {type(value).__name__}): it must be a JSON object")
    value.pop(_SEAL, None)
    return value


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
