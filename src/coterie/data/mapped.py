"""Tensors that lie in a file and are read when they are used: what was read is let go again.

The pages of a file that a process has looked at count as its memory until the system wants them back. So whoever goes
through a mapped tensor lets go of it now and then, and has no more of it in memory than it uses.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from coterie.errors import DataError, RunFolderError
from coterie.units import format_bytes

_BLOCK_ROWS = 4096  # samples that are written at once

_tensors: weakref.WeakValueDictionary[tuple[str, int, int], Tensor] = weakref.WeakValueDictionary()
_maps: weakref.WeakValueDictionary[int, mmap.mmap] = weakref.WeakValueDictionary()


def map_file(path: Path) -> Tensor:
    """Map an ``.npy`` file, once for all who want it; nobody writes to it."""
    try:
        facts = path.stat()
        key = (str(path.resolve()), facts.st_ino, facts.st_mtime_ns)
        known = _tensors.get(key)
        if known is not None:
            return known
        array = np.load(path, mmap_mode="c")  # what PyTorch may write to in principle: it would warn of anything else
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read ({error}): remove it, and it is made again") from None
    tensor = torch.from_numpy(array)
    _maps[tensor.data_ptr()] = array._mmap
    _tensors[key] = tensor
    return tensor


def mapped_copy(tensor: Tensor, folder: Path) -> Tensor:
    """Write a tensor to a file without a name, which is gone when the process is, and map it."""
    copy = mapped_empty(tuple(tensor.shape), tensor.dtype, folder)
    for begin in range(0, len(tensor), _BLOCK_ROWS):
        copy[begin : begin + _BLOCK_ROWS] = tensor[begin : begin + _BLOCK_ROWS].cpu()
    let_go(copy)
    return copy


def mapped_empty(shape: tuple[int, ...], dtype: torch.dtype, folder: Path) -> Tensor:
    """Map a file without a name that has room for a tensor."""
    size = torch.Size(shape).numel() * dtype.itemsize
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.truncate(file.fileno(), max(size, 1))
            if hasattr(os, "posix_fallocate"):  # room for all of it: a full disk would end the process by a signal
                os.posix_fallocate(file.fileno(), 0, max(size, 1))
            pages = mmap.mmap(file.fileno(), max(size, 1))
    except OSError as error:
        raise RunFolderError(
            f"scratch {str(folder)!r} cannot hold {format_bytes(size)} of samples ({error.strerror}): choose another "
            "--scratch, or --keep-samples host"
        ) from error
    tensor = torch.frombuffer(pages, dtype=dtype, count=torch.Size(shape).numel()).view(shape)
    _maps[tensor.data_ptr()] = pages
    return tensor


def is_mapped(tensor: Tensor) -> bool:
    """Say whether a tensor lies in a file that :func:`map_file` mapped."""
    return tensor.data_ptr() in _maps


class PagesInUse:
    """Counts what is read of a mapped tensor here and there, and lets go of it before that is much."""

    MOST = 2**27  # bytes: enough that what is read again and again is mostly there

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._bytes = tensor, 0

    def add(self, count: int) -> None:
        """Count bytes that were read."""
        self._bytes += count
        if self._bytes > self.MOST:
            let_go(self._tensor)
            self._bytes = 0


def let_go(tensor: Tensor) -> None:
    """Give back the memory of what was read of a mapped tensor; nothing else happens to any other."""
    found = _maps.get(tensor.data_ptr())
    if found is not None and hasattr(mmap, "MADV_DONTNEED"):
        found.madvise(mmap.MADV_DONTNEED)
