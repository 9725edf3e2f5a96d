"""Shelves whose rows are spread over ranks: each rank has those of its own clients, wherever it keeps them."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from coterie.errors import AlgorithmError
from coterie.rows import Backend, RowIndex
from coterie.rows.distributed import Ranks
from coterie.rows.off_device import OffDeviceBackend
from coterie.rows.placement import Keep, Place, Placement

Result = TypeVar("Result")


class ShardedBackend(Backend):
    """Rows of the server's, spread over ranks; all ranks ask for the same rows together.

    Parameters
    ----------
    count
        How many rows, of all ranks.
    opening
        What all of them are at the start.
    ranks
        The ranks.
    below
        Where the rows of this rank's clients lie.
    """

    def __init__(self, count: int, opening: Tensor, ranks: Ranks, below: Backend) -> None:
        super().__init__(count, opening)
        self.ranks: Ranks = ranks
        self.below = below
        self.announce: Callable[[Tensor | None], None] = lambda index: None

    def _safely(self, work: Callable[[], Result]) -> Result:
        """Let all ranks fail if one of them cannot reach its rows."""
        return self.ranks.together(work) if isinstance(self.below, OffDeviceBackend) else work()

    def _here(self, chosen: RowIndex) -> tuple[Tensor, RowIndex]:
        """Say which of some rows are this rank's, and where they lie."""
        mine = self.ranks.owns(chosen.host)
        places = chosen.host[mine] // self.ranks.count
        return mine, RowIndex(places.to(self.device), places)

    def _own(self, chosen: RowIndex) -> Tensor:
        _, here = self._here(chosen)
        if not len(here):
            return self.opening.new_empty((0, *self.shape[1:]))
        return self.below.gather(here)

    def gather(self, chosen: RowIndex) -> Tensor:
        """Have every rank tell its rows; see :meth:`Backend.gather`."""
        own = self._safely(lambda: self._own(chosen))
        return self.ranks.collect(own, self.ranks.owner(chosen.host))

    def own(self, chosen: RowIndex) -> Tensor:
        """Give rows of this rank's clients; see :meth:`Backend.own`."""
        if not bool(self.ranks.owns(chosen.host).all()):
            raise AlgorithmError("rows of a client were asked for in a rank to which it does not belong")
        return self._own(chosen)

    def own_blocks(self, rows: int) -> Iterator[tuple[RowIndex, Tensor]]:
        """Give the rows of this rank's clients; see :meth:`Backend.own_blocks`."""
        at = 0
        for block in self.below.blocks(rows):
            host = torch.arange(at, at + len(block)) * self.ranks.count + self.ranks.rank
            yield RowIndex(host.to(self.device), host), block
            at += len(block)

    def write(self, chosen: RowIndex, values: Tensor) -> None:
        """Keep what is this rank's; see :meth:`Backend.write`."""
        self._safely(lambda: self._write(chosen, values))

    def _write(self, chosen: RowIndex, values: Tensor) -> None:
        mine, here = self._here(chosen)
        if len(here):
            self.below.write(here, values if len(here) == len(values) else values[mine.to(values.device)])

    def fill(self, index: Tensor, values: Tensor) -> None:
        """Keep what is this rank's; see :meth:`Backend.fill`."""
        mine = self.ranks.owns(index)
        if bool(mine.any()):
            self.below.fill(index[mine] // self.ranks.count, values[mine])

    def reset(self, opening: Tensor) -> None:
        """Set this rank's rows; see :meth:`Backend.reset`."""
        self.opening = opening.clone()
        self.below.reset(opening)

    def anybody(self, flag: bool) -> bool:
        """Ask all ranks; see :meth:`Backend.anybody`."""
        return self.ranks.any(flag)

    def changed(self) -> Tensor:
        """Ask all ranks; see :meth:`Backend.changed`."""
        self.announce(None)
        was = torch.zeros(self.shape[0], dtype=torch.int32)
        was[self.ranks.together(self.below.changed) * self.ranks.count + self.ranks.rank] = 1
        return self.ranks.sum(was).nonzero().squeeze(1)

    def on_host(self, index: Tensor) -> Tensor:
        """Give some rows on the host of the first rank; see :meth:`Backend.on_host`."""
        self.announce(index)
        mine = index[self.ranks.owns(index)] // self.ranks.count
        empty = torch.empty((0, *self.shape[1:]), dtype=self.dtype)
        own = self.ranks.together(lambda: self.below.on_host(mine) if len(mine) else empty)
        return self.ranks.collect_first(own, self.ranks.owner(index))


class OwnRowsBackend(ShardedBackend):
    """Rows of the clients' state, spread over ranks: a rank asks for those of its own clients, and nobody waits."""

    def _safely(self, work: Callable[[], Result]) -> Result:
        return work()

    def gather(self, chosen: RowIndex) -> Tensor:
        """Give rows of this rank's clients; see :meth:`Backend.gather`."""
        return self.own(chosen)

    def anybody(self, flag: bool) -> bool:
        """Ask nobody; see :meth:`Backend.anybody`."""
        return flag


class ShardedPlacement(Placement):
    """Finds a place for the rows of a rank's clients.

    Parameters
    ----------
    keep
        Where they are to lie.
    device
        The device that computes.
    scratch
        Folder for files.
    ranks
        The ranks.
    """

    def __init__(
        self, keep: Keep, device: torch.device, scratch: str | os.PathLike[str] | None, *, ranks: Ranks
    ) -> None:
        super().__init__(keep, device, scratch)
        self._ranks, self._beside = ranks, ranks.beside
        self._spread: list[ShardedBackend] = []

    def choose(self, size: int) -> Place:
        """Choose where to keep so many bytes; see :meth:`Placement.choose`. All ranks choose alike."""
        places: tuple[Place, ...] = ("device", "host", "disk")
        last = -self._ranks.least(-places.index(super().choose(size)))
        return places[last]

    def _rows(self, count: int) -> int:
        return self._ranks.part(count, 0)

    def _chosen(self, clients: Tensor) -> RowIndex:
        return RowIndex(clients[self._ranks.owns(clients)] // self._ranks.count)

    def _backend(self, old: Backend, place: Place, is_server: bool) -> Backend:
        count = old.shape[0]
        below = self._ranks.together(lambda: self._plain_backend(self._ranks.part(count), old.opening, place))
        kind = ShardedBackend if is_server else OwnRowsBackend
        self._spread.append(kind(count, old.opening, self._ranks, below))
        return self._spread[-1]

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Read rows of all ranks from the first rank, while the others :meth:`follow`.

        Yields
        ------
        None
            While the context is open, backends say what they need before they wait for it.
        """
        for number, backend in enumerate(self._spread):
            backend.announce = functools.partial(self._announce, number)
        try:
            yield
        finally:
            for backend in self._spread:
                backend.announce = lambda index: None
            if not self._ranks.gone:
                self._ranks.announce(None)

    def _announce(self, number: int, index: Tensor | None) -> None:
        self._ranks.announce((number, index))

    def follow(self) -> None:
        """Do for the first rank what it announces, until it has done."""
        while True:
            heard: Any = self._ranks.announce(None)
            if heard is None:
                return
            number, index = heard
            backend = self._spread[number]
            try:
                backend.changed() if index is None else backend.on_host(index)
            except BaseException as error:  # the first rank raises the same, and says when it has done
                if not self._ranks.agreed(error):
                    raise
