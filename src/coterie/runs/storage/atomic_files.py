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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from coterie.errors import RunFolderError


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


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a draft to write to, then put it in its place; if the block raises, what was in the place stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft(path)
    yield draft
    sync(draft)
    os.replace(draft, path)
    sync(path.parent)


def replace_all(folder: Path, writers: Mapping[str, Callable[[Path], None]]) -> None:
    """Write several files of a folder, each in one step; the folder is forced to the disk once, after the last.

    ``writers`` has, by each file's name, what writes its draft.
    """
    if not writers:
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name, write in writers.items():
        draft = _draft(folder / name)
        write(draft)
        sync(draft)
        os.replace(draft, folder / name)
    sync(folder)


def _draft(path: Path) -> Path:
    return path.with_name(f".{path.name}.draft")


def write_bytes(path: Path, content: bytes) -> None:
    with replacing(path) as draft:
        draft.write_bytes(content)


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write a JSON file for people and other programs; numbers that are not finite become ``null``."""
    write_text(path, json.dumps(_finite(value), indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; anything else in it is a ``RunFolderError``."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunFolderError(f"{path} is damaged ({error}): it must be a JSON object") from error
    if not isinstance(value, dict):
        raise RunFolderError(f"{path} is damaged (it holds a {type(value).__name__}): it must be a JSON object")
    return value


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
