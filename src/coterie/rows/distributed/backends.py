"""Backends whose rows are spread over ranks: each rank has those of its own clients, on a backend of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from coterie.errors import AlgorithmError
from coterie.rows.backends import Backend, OffDeviceBackend, RowIndex
from coterie.rows.distributed._collectives import RankCollectives
from coterie.rows.distributed.ranks import Ranks

Result = TypeVar("Result")


class SpreadBackend(Backend):
    """Rows that are spread over ranks; row ``i`` is row ``i // ranks.count`` on the backend of the rank that owns it.

    Parameters
    ----------
    count
        How many rows, of all ranks.
    initial_row
        What all of them are at the start.
    ranks
        The ranks.
    local
        Where the rows of this rank's clients lie.

    Attributes
    ----------
    announce
        Called before rows are read for a checkpoint with which they are, or ``None`` for those that changed, so that
        the first rank can tell the others what it waits for.
    """

    def __init__(self, count: int, initial_row: Tensor, ranks: Ranks, local: Backend) -> None:
        super().__init__(count, initial_row)
        self.ranks, self.local = ranks, local
        self.collectives = RankCollectives(ranks)
        self.announce: Callable[[Tensor | None], None] = lambda index: None

    def _local_index(self, index: RowIndex) -> tuple[Tensor, RowIndex]:
        """Say which of some rows are this rank's, and where they lie."""
        owned = self.ranks.owns(index.on_host)
        return owned, RowIndex.from_host(index.on_host[owned] // self.ranks.count, self.device)

    def gather_owned(self, index: RowIndex) -> Tensor:
        """Give those of some rows that are this rank's."""
        _, local = self._local_index(index)
        if not len(local):
            return self.initial_row.new_empty((0, *self.shape[1:]))
        return self.local.gather(local)

    def gather_local(self, index: RowIndex) -> Tensor:
        if not bool(self.ranks.owns(index.on_host).all()):
            raise AlgorithmError("rows of a client were asked for in a rank to which it does not belong")
        return self.gather_owned(index)

    def local_blocks(self, rows: int) -> Iterator[tuple[RowIndex, Tensor]]:
        begin = 0
        for block in self.local.blocks(rows):
            numbers = torch.arange(begin, begin + len(block)) * self.ranks.count + self.ranks.rank
            yield RowIndex.from_host(numbers, self.device), block
            begin += len(block)

    def write_owned(self, index: RowIndex, values: Tensor) -> None:
        """Replace those of some rows that are this rank's."""
        owned, local = self._local_index(index)
        if len(local):
            self.local.write(local, values if len(local) == len(values) else values[owned.to(values.device)])

    def write_from_host(self, index: Tensor, values: Tensor) -> None:
        owned = self.ranks.owns(index)
        if bool(owned.any()):
            self.local.write_from_host(index[owned] // self.ranks.count, values[owned])

    def reset(self, initial_row: Tensor) -> None:
        self.initial_row = initial_row.clone()
        self.local.reset(initial_row)

    def changed(self) -> Tensor:
        self.announce(None)
        was = torch.zeros(self.shape[0], dtype=torch.int32)
        was[self.ranks.together(self.local.changed) * self.ranks.count + self.ranks.rank] = 1
        return self.ranks.sum(was).nonzero().squeeze(1)

    def gather_to_host(self, index: Tensor) -> Tensor:
        """Copy some rows to the host of the first rank."""
        self.announce(index)
        owned = index[self.ranks.owns(index)] // self.ranks.count
        empty = torch.empty((0, *self.shape[1:]), dtype=self.dtype)
        own = self.ranks.together(lambda: self.local.gather_to_host(owned) if len(owned) else empty)
        return self.ranks.collect_on_first(own, self.ranks.owner(index))


class ShardedBackend(SpreadBackend):
    """Rows of the server's state: all ranks ask for the same rows together, and all get them."""

    def _together(self, work: Callable[[], Result]) -> Result:
        """Let all ranks fail if one cannot reach its rows: only those off the device can be out of reach."""
        return self.ranks.together(work) if isinstance(self.local, OffDeviceBackend) else work()

    def gather(self, index: RowIndex) -> Tensor:
        own = self._together(lambda: self.gather_owned(index))
        return self.ranks.collect(own, self.ranks.owner(index.on_host))

    def write(self, index: RowIndex, values: Tensor) -> None:
        self._together(lambda: self.write_owned(index, values))

    def any_process(self, flag: bool) -> bool:
        return self.ranks.any(flag)


class OwnRowsBackend(SpreadBackend):
    """Rows of the clients' state: a rank asks for those of its own clients alone, and waits for no other."""

    def gather(self, index: RowIndex) -> Tensor:
        return self.gather_local(index)

    def write(self, index: RowIndex, values: Tensor) -> None:
        self.write_owned(index, values)
