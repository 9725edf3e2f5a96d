"""What every backend can do, and how rows of it are named."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from coterie.rows._collectives import Collectives
from coterie.rows.host_copies import on_device, on_host


class RowIndex:
    """Which rows: their numbers on the device and, once they are needed there, on the host.

    Parameters
    ----------
    on_device
        Row numbers ``[rows]``, on the device that computes.
    on_host
        The same on the host, where they are known: reading them from a GPU waits for all that it has to do.
    """

    __slots__ = ("_on_host", "on_device")

    def __init__(self, on_device: Tensor, on_host: Tensor | None = None) -> None:
        self.on_device, self._on_host = on_device, on_host

    @classmethod
    def from_host(cls, numbers: Tensor, device: torch.device) -> RowIndex:
        return cls(on_device(numbers, device), numbers)

    @classmethod
    def of(cls, index: Tensor, device: torch.device) -> RowIndex:
        """Flatten row numbers of any shape and integer type."""
        if index.dim() != 1:
            index = index.reshape(-1)
        return cls(index.to(device, torch.int64), on_host(index).long() if index.device != device else None)

    def __len__(self) -> int:
        return int(self.on_device.shape[0])

    @property
    def on_host(self) -> Tensor:
        if self._on_host is None:
            self._on_host = on_host(self.on_device)
        return self._on_host

    def find_in(self, other: RowIndex) -> tuple[Tensor, Tensor]:
        """Look rows up in another, increasing index: on the host, a position for each and whether it is there."""
        if not len(other):
            return torch.zeros_like(self.on_host), torch.zeros_like(self.on_host, dtype=torch.bool)
        position = torch.searchsorted(other.on_host, self.on_host).clamp_max_(len(other) - 1)
        return position, other.on_host[position] == self.on_host


class Backend(abc.ABC):
    """Holds the rows of one matrix.

    Parameters
    ----------
    count
        How many rows.
    initial_row
        What all of them are at the start ``[...]``, on the device that computes. A row that was never written is this
        one, and takes no room where the backend can avoid it.
    """

    collectives: Collectives | None = None
    """How sums over the rows are computed where other processes have some of them; else ``None``."""

    def __init__(self, count: int, initial_row: Tensor) -> None:
        self.initial_row = initial_row.detach().clone(memory_format=torch.contiguous_format)
        self.shape = (count, *initial_row.shape)
        self.dtype, self.device = initial_row.dtype, initial_row.device
        # The overlays that read from here, so that a commit can save the old rows for them. Not kept alive by this.
        self.overlays: WeakSet[Any] = WeakSet()

    @property
    def row_bytes(self) -> int:
        return self.initial_row.nbytes

    @abc.abstractmethod
    def gather(self, index: RowIndex) -> Tensor:
        """Copy some rows to the device that computes."""

    @abc.abstractmethod
    def write(self, index: RowIndex, values: Tensor) -> None:
        """Replace some rows, each once; ``values``, on the device that computes, must not change any more."""

    @abc.abstractmethod
    def changed(self) -> Tensor:
        """List the rows that have ever been written, on the host and increasing; all others are the initial row."""

    @abc.abstractmethod
    def reset(self, initial_row: Tensor) -> None:
        """Set all rows to this one, as if none had ever been written."""

    def blocks(self, rows: int, first: int = 0) -> Iterator[Tensor]:
        """Give all rows from ``first`` on, so many at a time, on the device that computes; they must not be changed."""
        for begin in range(first, self.shape[0], rows):
            yield self.gather(self.index_range(begin, begin + rows))

    def index_range(self, begin: int, end: int) -> RowIndex:
        """Index consecutive rows up to ``end`` or the last one."""
        return RowIndex.from_host(torch.arange(begin, min(end, self.shape[0])), self.device)

    def device_tensor(self) -> Tensor | None:
        """Give the matrix itself, not to be changed, where it lies on the device that computes; else ``None``."""
        return None

    def gather_to_host(self, index: Tensor) -> Tensor:
        """Give some rows, named by a tensor on the host, on the host, not to be changed: what a checkpoint reads."""
        return self.gather(RowIndex.from_host(index, self.device)).cpu()

    def write_from_host(self, index: Tensor, values: Tensor) -> None:
        """Replace some rows by rows on the host: how a checkpoint is restored."""
        self.write(RowIndex.from_host(index, self.device), values.to(self.device))

    # The rows that lie with this process: all of them, unless other processes have some.

    def local_blocks(self, rows: int) -> Iterator[tuple[RowIndex, Tensor]]:
        """Give the rows that lie with this process and which they are, as :meth:`blocks` does."""
        begin = 0
        for block in self.blocks(rows):
            yield self.index_range(begin, begin + len(block)), block
            begin += len(block)

    def gather_local(self, index: RowIndex) -> Tensor:
        """Copy some of the rows that lie with this process, without waiting for any other."""
        return self.gather(index)

    def any_process(self, flag: bool) -> bool:
        """Say whether a flag is set in any of the processes that have some of the rows."""
        return flag
