"""The placement of a sharded run: where the rows of a rank's clients lie, and how the first rank reads all of them."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from coterie.rows.backends import Backend, RowIndex
from coterie.rows.distributed.backends import OwnRowsBackend, ShardedBackend, SpreadBackend
from coterie.rows.distributed.ranks import Ranks
from coterie.rows.placement import PLACES, Keep, Place, Placement, Sharding


class RankSharding(Sharding):
    """Every rank has the rows of its own clients; all ranks choose the same place."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.processes_on_machine = ranks, ranks.local_count
        self.backends: list[SpreadBackend] = []  # in the order in which all ranks made them

    def row_count(self, rows: int) -> int:
        return self.ranks.count_owned(rows, 0)  # of the first rank, which has the most

    def row_index(self, clients: Tensor) -> RowIndex:
        return RowIndex(clients[self.ranks.owns(clients)] // self.ranks.count)

    def agree(self, place: Place) -> Place:
        return PLACES[-self.ranks.least(-PLACES.index(place))]  # the last that any of them needs

    def backend(self, old: Backend, make: Callable[[int], Backend], of_server: bool) -> Backend:
        count = old.shape[0]
        local = self.ranks.together(lambda: make(self.ranks.count_owned(count)))
        kind = ShardedBackend if of_server else OwnRowsBackend
        self.backends.append(kind(count, old.initial_row, self.ranks, local))
        return self.backends[-1]


class ShardedPlacement(Placement):
    """A placement whose rows the first rank can read from all others, for a checkpoint.

    Parameters
    ----------
    keep
        Where rows are to lie.
    device
        The device that computes.
    scratch
        Folder for files.
    ranks
        The ranks.
    """

    def __init__(self, keep: Keep, device: torch.device, scratch: str | os.PathLike[str] | None, ranks: Ranks) -> None:
        sharding = RankSharding(ranks)
        super().__init__(keep, device, scratch, sharding)
        self._ranks, self._backends = ranks, sharding.backends

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Let the first rank read rows of all ranks while the others :meth:`follow`."""
        for number, backend in enumerate(self._backends):
            backend.announce = functools.partial(self._announce, number)
        try:
            yield
        finally:
            for backend in self._backends:
                backend.announce = lambda index: None
            if not self._ranks.gone:
                self._ranks.announce(None)

    def _announce(self, number: int, index: Tensor | None) -> None:
        self._ranks.announce((number, index))

    def follow(self) -> None:
        """Take part in each read that the first rank announces, until it says that it is done."""
        while True:
            announced: Any = self._ranks.announce(None)
            if announced is None:
                return
            number, index = announced
            backend = self._backends[number]
            try:
                backend.changed() if index is None else backend.gather_to_host(index)
            except BaseException as error:  # the first rank raises the same, and says when it is done
                if not self._ranks.agreed(error):
                    raise


def sharded_placement(
    keep: Keep, device: torch.device, scratch: str | os.PathLike[str] | None, ranks: Ranks
) -> ShardedPlacement:
    """Make the placement of one rank; all ranks must make theirs alike."""
    return ShardedPlacement(keep, device, scratch, ranks)
