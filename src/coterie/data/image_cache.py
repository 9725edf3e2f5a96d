"""Images that are decoded once, into a file that is mapped from then on: more of them than fit in memory.

The file lies beside the images, in ``.coterie/``, or where that cannot be written in the folder of the data sets. It is
named by a digest of the images' names, sizes and times, and of what was asked for: when an image changes, all are
decoded anew into another file. It is whole or not there. Of several processes that want the same file one decodes, and
the others wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from coterie.data._images import read_image, read_images, refuse_other_size
from coterie.data.mapped import map_file
from coterie.errors import DataError
from coterie.units import format_bytes

FOLDER = ".coterie"
"""The folder beside the images; its name begins with a dot, so that it is no class."""
IN_MEMORY = 2**26  # bytes: images that are no more than this decoded are read as they are, every time
_FORMAT = 1
_AT_ONCE = 512  # images that are decoded side by side before they are written
_ENDING = ".npy"


def load_images(
    paths: Sequence[Path], size: tuple[int, int] | None, channels: int, root: Path, elsewhere: Path
) -> Tensor:
    """Give images as bytes ``[N, channels, height, width]``: in memory where they are few, else mapped from a file.

    ``root`` is the images' folder, ``elsewhere`` the one for files that cannot lie there.
    """
    if not paths:
        raise DataError("there are no images to read")
    first = read_image(paths[0], size, channels)
    if len(paths) * first.size <= IN_MEMORY:
        return torch.from_numpy(read_images(paths, size, channels))
    name = f"images-{_digest(paths, size, channels, root)}{_ENDING}"
    places = [root / FOLDER, elsewhere / "images"]
    for place in places:
        if (place / name).exists():
            return map_file(place / name)
    folder = next((place for place in places if _writable(place)), None)
    if folder is None:
        raise DataError(
            f"neither {places[0]} nor {places[1]} can be written, but decoded images must lie in one of them"
        )
    with _locked(folder):
        if not (folder / name).exists():  # another process may have made it meanwhile
            _decode(paths, size, channels, first.shape, folder / name)
    return map_file(folder / name)


def cached_files(root: Path, elsewhere: Path) -> list[Path]:
    """List the files of decoded images that lie beside some images, and in the folder for those that cannot."""
    return [
        path for place in (root / FOLDER, elsewhere / "images") for path in sorted(place.glob(f"images-*{_ENDING}"))
    ]


def _digest(paths: Sequence[Path], size: tuple[int, int] | None, channels: int, root: Path) -> str:
    found = hashlib.blake2b(f"{_FORMAT} {size} {channels} {root.resolve()}".encode(), digest_size=12)
    for path in paths:
        facts = path.stat()
        found.update(f"\0{path.relative_to(root).as_posix()}\0{facts.st_size}\0{facts.st_mtime_ns}".encode())
    return found.hexdigest()


def _writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _decode(
    paths: Sequence[Path], size: tuple[int, int] | None, channels: int, shape: tuple[int, ...], out: Path
) -> None:
    needed, free = len(paths) * int(np.prod(shape)), shutil.disk_usage(out.parent).free
    if needed > free:
        raise DataError(
            f"{len(paths):,} images are {format_bytes(needed)} decoded, but {out.parent} has {format_bytes(free)} "
            "left: make room, or give a smaller size="
        )
    for left in out.parent.glob(f".images-*{_ENDING}.draft"):  # of a process that was killed
        left.unlink(missing_ok=True)
    draft = out.with_name(f".{out.name}.draft")
    columns = (TextColumn("decoding images"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    try:
        # Written and not mapped: pages that were written to cannot be let go of before they are on the disk.
        with (
            draft.open("wb") as file,
            ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads,
            Progress(*columns, console=Console(stderr=True), transient=True) as bar,
        ):
            header = {"descr": "|u1", "fortran_order": False, "shape": (len(paths), *shape)}
            np.lib.format.write_array_header_1_0(file, header)
            task = bar.add_task("", total=len(paths))
            for begin in range(0, len(paths), _AT_ONCE):
                some = paths[begin : begin + _AT_ONCE]
                images = threads.map(functools.partial(read_image, size=size, channels=channels), some)
                for path, image in zip(some, images, strict=True):
                    refuse_other_size(path, image, shape)
                    file.write(np.ascontiguousarray(image).data)
                bar.advance(task, len(some))
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, out)
    finally:
        draft.unlink(missing_ok=True)
