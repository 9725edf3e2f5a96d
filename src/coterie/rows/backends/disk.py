"""Rows in a file without a name: it is gone when the process is, however that ends."""

from __future__ import annotations

import errno
import os
import tempfile
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.errors import RunFolderError
from coterie.rows._transfers import Transfers
from coterie.rows.backends.off_device import OffDeviceBackend

_READERS = 4  # threads that read a file side by side
_PARALLEL_BYTES = 2**22  # from which on they do


class DiskBackend(OffDeviceBackend):
    """Rows in a file that is as long as the matrix and holds only what was written.

    It is read and written by calls rather than through a mapping: a full disk is then an error and not a signal that
    ends the process, and what was read does not count as this process's memory.

    Parameters
    ----------
    count
        How many rows.
    initial_row
        What all of them are at the start.
    transfers
        Moves them to and from the device.
    folder
        Where the file lies.
    """

    def __init__(self, count: int, initial_row: Tensor, transfers: Transfers, folder: Path) -> None:
        super().__init__(count, initial_row, transfers)
        self._file = _open_unnamed(folder, count * self.row_bytes)
        weakref.finalize(self, os.close, self._file)
        self._readers = ThreadPoolExecutor(_READERS, "coterie-disk")

    def read_storage(self, index: Tensor, positions: Tensor, out: Tensor) -> None:
        runs = list(_runs(index, positions))
        memory = _bytes(out)
        if len(index) * self.row_bytes < _PARALLEL_BYTES or len(runs) < 2:
            self._read_runs(runs, memory)
            return
        shares = [runs[number::_READERS] for number in range(_READERS)]
        for done in [self._readers.submit(self._read_runs, share, memory) for share in shares]:
            done.result()

    def _read_runs(self, runs: list[tuple[int, int, int]], memory: memoryview) -> None:
        size, file = self.row_bytes, self._file
        for row, position, count in runs:
            window, offset = memory[position * size : (position + count) * size], row * size
            while window:
                got = os.preadv(file, [window], offset)
                if not got:
                    raise OSError(errno.EIO, "the file is shorter than its matrix")
                window, offset = window[got:], offset + got

    def write_storage(self, index: Tensor, values: Tensor) -> None:
        size, file = self.row_bytes, self._file
        memory = _bytes(values.contiguous())
        for row, position, count in _runs(index, torch.arange(len(index))):
            window, offset = memory[position * size : (position + count) * size], row * size
            while window:
                written = os.pwrite(file, window, offset)
                window, offset = window[written:], offset + written


def _open_unnamed(folder: Path, size: int) -> int:
    """Open a file of zeros that takes no room and has no name in its folder."""
    try:
        with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
            os.truncate(file.fileno(), size)
            return os.dup(file.fileno())
    except OSError as error:
        raise RunFolderError(f"scratch {str(folder)!r} cannot hold a file: {error.strerror}") from error


def _bytes(values: Tensor) -> memoryview:
    flat: Any = values.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(flat)


def _runs(index: Tensor, positions: Tensor) -> Iterator[tuple[int, int, int]]:
    """Join rows that follow each other both in the file and in memory: the first row, its position, how many."""
    if not len(index):
        return
    follows = (index[1:] == index[:-1] + 1) & (positions[1:] == positions[:-1] + 1)
    ends = [*((~follows).nonzero().squeeze(1) + 1).tolist(), len(index)]
    begin = 0
    for end in ends:
        yield int(index[begin]), int(positions[begin]), end - begin
        begin = end
