"""Shelves away from the device that computes: in the host's memory, or in a file without a name.

Rows that were never written take no room: they are all the opening row. A file is as long as its matrix and holds only
what was written. It has no name in its folder, so that it is gone when the process is, however that ends.
"""

from __future__ import annotations

import abc
import errno
import os
import tempfile
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.errors import RunFolderError
from coterie.rows import Backend, RowIndex
from coterie.rows.transfers import Brought, Transfers

_READERS = 4  # threads that read a file side by side
_SIDE_BY_SIDE = 2**22  # bytes from which on they do


@dataclass
class _Ahead:
    """Rows that were brought before they were asked for, and what has been written over them since."""

    chosen: RowIndex
    rows: Brought
    written: list[tuple[RowIndex, Tensor]] = field(default_factory=list)


class OffDeviceBackend(Backend):
    """Rows that do not lie on the device that computes.

    Parameters
    ----------
    count
        How many rows.
    opening
        What all of them are at the start.
    transfers
        Carries them.
    """

    def __init__(self, count: int, opening: Tensor, transfers: Transfers) -> None:
        super().__init__(count, opening)
        self.transfers = transfers
        transfers.make_room(self.row_bytes)
        self.asked = self.useful = (
            False  # whether rows were taken since the placement last looked, and in the last round
        )
        self._opening = self.opening.cpu()
        self._written = torch.zeros(count, dtype=torch.bool)
        self._ahead: list[_Ahead] = []

    @abc.abstractmethod
    def raw_read(self, index: Tensor, places: Tensor, out: Tensor) -> None:
        """Read rows that were written before.

        Parameters
        ----------
        index
            Which, on the host.
        places
            Which rows of ``out`` they belong to.
        out
            Memory on the host ``[rows, ...]``.
        """

    @abc.abstractmethod
    def raw_write(self, index: Tensor, values: Tensor) -> None:
        """Write rows.

        Parameters
        ----------
        index
            Which, on the host.
        values
            What they are from now on, on the host.
        """

    def read(self, index: Tensor, out: Tensor) -> None:
        """Read rows; part of an errand.

        Parameters
        ----------
        index
            Which, on the host.
        out
            Memory on the host ``[rows, ...]``.
        """
        there = self._written[index]
        places = there.nonzero().squeeze(1)
        if len(places) < len(index):
            out[~there] = self._opening
        if len(places):
            self.raw_read(index[places], places, out)

    def put(self, index: Tensor, values: Tensor) -> None:
        """Write rows; part of an errand.

        Parameters
        ----------
        index
            Which, on the host.
        values
            What they are from now on, on the host.
        """
        self.raw_write(index, values)
        self._written[index] = True

    def gather(self, chosen: RowIndex) -> Tensor:
        """Have rows brought, or take them if they were; see :meth:`Backend.gather`."""
        self.asked = True
        for ahead in self._ahead:
            place, there = chosen.within(ahead.chosen)
            if not bool(there.all()):
                continue
            rows = self._arrived(ahead.rows)
            if torch.equal(chosen.host, ahead.chosen.host):
                self._ahead.remove(ahead)  # nobody else will want them: they need not be copied
            else:
                rows = rows.index_select(0, place.to(rows.device))
            for written, values in ahead.written:
                source, over = chosen.within(written)
                if bool(over.any()):
                    mine, source = over.nonzero().squeeze(1).to(rows.device), source[over].to(rows.device)
                    rows.index_copy_(0, mine, values.index_select(0, source))
            return rows
        return self._arrived(self._bring(chosen))

    def _bring(self, chosen: RowIndex) -> Brought:
        return self.transfers.ask(partial(self.transfers.fetch, self, chosen.host))

    def _arrived(self, rows: Brought) -> Tensor:
        out, done = rows.result()
        if done is not None:
            here = torch.cuda.current_stream(self.device)
            here.wait_event(done)
            out.record_stream(here)
        return out

    def write(self, chosen: RowIndex, values: Tensor) -> None:
        """Have rows taken away; see :meth:`Backend.write`."""
        for ahead in self._ahead:
            ahead.written.append((chosen, values))
        self.transfers.take_away(self, chosen.host, values)

    def prefetch(self, chosen: RowIndex) -> None:
        """Have rows brought that will be asked for.

        Parameters
        ----------
        chosen
            Which, in increasing order.
        """
        self._ahead.append(_Ahead(chosen, self._bring(chosen)))

    def forget(self, but: RowIndex | None = None) -> None:
        """Drop rows that were brought and not asked for.

        Parameters
        ----------
        but
            Those to keep.
        """
        self._ahead = [ahead for ahead in self._ahead if but is not None and torch.equal(ahead.chosen.host, but.host)]

    def blocks(self, rows: int, first: int = 0) -> Iterator[Tensor]:
        """Bring the next block while this one is used; see :meth:`Backend.blocks`."""
        coming: Brought | None = None
        for begin in range(first, self.shape[0], rows):
            following = self._bring(self.span(begin, begin + rows))
            if coming is not None:
                yield self._arrived(coming)
            coming = following
        if coming is not None:
            yield self._arrived(coming)

    def changed(self) -> Tensor:
        """See :meth:`Backend.changed`."""
        return self.transfers.ask(lambda: self._written.nonzero().squeeze(1)).result()

    def reset(self, opening: Tensor) -> None:
        """Forget what was written; see :meth:`Backend.reset`."""
        self.forget()

        def again() -> None:
            self.opening, self._opening = opening.clone(), opening.cpu()
            self._written.zero_()

        self.transfers.ask(again).result()

    def fill(self, index: Tensor, values: Tensor) -> None:
        """Write without going to the device; see :meth:`Backend.fill`."""
        self.transfers.ask(partial(self.put, index, values)).result()

    def on_host(self, index: Tensor) -> Tensor:
        """Read without going to the device; see :meth:`Backend.on_host`."""

        def read() -> Tensor:
            out = torch.empty((len(index), *self.shape[1:]), dtype=self.dtype)
            self.read(index, out)
            return out

        return self.transfers.ask(read).result()


class HostBackend(OffDeviceBackend):
    """Rows in the host's memory, of which the operating system gives what is written."""

    def __init__(self, count: int, opening: Tensor, transfers: Transfers) -> None:
        super().__init__(count, opening, transfers)
        empty = np.zeros((count, max(1, self.row_bytes)), np.uint8)  # not torch.zeros, which writes all of it
        self._base = torch.from_numpy(empty)[:, : self.row_bytes].view(self.dtype).view(self.shape)

    def raw_read(self, index: Tensor, places: Tensor, out: Tensor) -> None:
        """Copy; see :meth:`OffDeviceBackend.raw_read`."""
        if len(places) == len(out):
            torch.index_select(self._base, 0, index, out=out)
        else:
            out.index_copy_(0, places, self._base.index_select(0, index))

    def raw_write(self, index: Tensor, values: Tensor) -> None:
        """Copy; see :meth:`OffDeviceBackend.raw_write`."""
        self._base.index_copy_(0, index, values)


class DiskBackend(OffDeviceBackend):
    """Rows in a file without a name.

    It is read and written by calls rather than through a mapping: a full disk is then an error and not a signal that
    ends the process, and what was read does not count as this process's memory.

    Parameters
    ----------
    count
        How many rows.
    opening
        What all of them are at the start.
    transfers
        Carries them.
    folder
        Where the file lies.
    """

    def __init__(self, count: int, opening: Tensor, transfers: Transfers, folder: Path) -> None:
        super().__init__(count, opening, transfers)
        self._file = _nameless(folder, count * self.row_bytes)
        weakref.finalize(self, os.close, self._file)
        self._readers = ThreadPoolExecutor(_READERS, "coterie-disk")

    def raw_read(self, index: Tensor, places: Tensor, out: Tensor) -> None:
        """Read row by row, several at once; see :meth:`OffDeviceBackend.raw_read`."""
        spans = list(_spans(index, places))
        memory = _bytes(out)
        if len(index) * self.row_bytes < _SIDE_BY_SIDE or len(spans) < 2:
            self._read_spans(spans, memory)
            return
        shares = [spans[number::_READERS] for number in range(_READERS)]
        for done in [self._readers.submit(self._read_spans, share, memory) for share in shares]:
            done.result()

    def _read_spans(self, spans: list[tuple[int, int, int]], memory: memoryview) -> None:
        size, handle = self.row_bytes, self._file
        for row, place, count in spans:
            window, at = memory[place * size : (place + count) * size], row * size
            while window:
                got = os.preadv(handle, [window], at)
                if not got:
                    raise OSError(errno.EIO, "the file is shorter than its matrix")
                window, at = window[got:], at + got

    def raw_write(self, index: Tensor, values: Tensor) -> None:
        """Write row by row; see :meth:`OffDeviceBackend.raw_write`."""
        size, handle = self.row_bytes, self._file
        memory = _bytes(values.contiguous())
        for row, place, count in _spans(index, torch.arange(len(index))):
            window, at = memory[place * size : (place + count) * size], row * size
            while window:
                put = os.pwrite(handle, window, at)
                window, at = window[put:], at + put


def _nameless(folder: Path, size: int) -> int:
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


def _spans(index: Tensor, places: Tensor) -> Iterator[tuple[int, int, int]]:
    """Give runs of rows that lie one after another, here and there: the first row, its place, how many."""
    if not len(index):
        return
    follows = (index[1:] == index[:-1] + 1) & (places[1:] == places[:-1] + 1)
    ends = [*((~follows).nonzero().squeeze(1) + 1).tolist(), len(index)]
    begin = 0
    for end in ends:
        yield int(index[begin]), int(places[begin]), end - begin
        begin = end
