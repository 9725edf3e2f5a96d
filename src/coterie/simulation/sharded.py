"""A simulation over several processes, each with some of the clients, on a device of its own.

The server's half runs on every rank, with the same numbers. An exchange is the seam: each rank computes the asked
clients that it owns, and all ranks get all replies. The rows of all clients, the server's and the clients' own, lie
with the rank that owns the client.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, Ask, Cohort, Replies, State
from coterie.compute.engine import Call, Engine, pick
from coterie.rows import ClientMatrix, Rows, take_local_rows
from coterie.rows.distributed import Ranks, ShardedPlacement, checksum, number_of, sharded_placement
from coterie.rows.placement import Keep
from coterie.simulation.exchange import NoReplies
from coterie.simulation.simulation import Simulation

Result = TypeVar("Result")

_DIFFER = (
    "the ranks of the sharded run no longer have the same state: a method must draw random numbers by "
    "coterie.randomness alone, and all machines must be alike"
)


class ShardedSimulation(Simulation):
    """An algorithm whose clients are spread over ranks.

    Parameters
    ----------
    algorithm
        The method.
    engine
        Runs the client's half for this rank's clients.
    ranks
        The ranks.
    **options
        What else a :class:`Simulation` takes, the same on all ranks.
    """

    placement: ShardedPlacement

    def __init__(self, algorithm: Algorithm, engine: Engine, ranks: Ranks, **options: Any) -> None:
        self.ranks = ranks
        ranks.device = engine.device
        super().__init__(algorithm, engine, **options)

    def _placement(self, keep: Keep, device: torch.device, scratch: str | os.PathLike[str] | None) -> ShardedPlacement:
        return sharded_placement(keep, device, scratch, self.ranks)

    @contextlib.contextmanager
    def _trial(self) -> Iterator[None]:
        with super()._trial(), self.ranks.sharing():
            try:
                yield
            except NoReplies:
                raise
            except BaseException as error:
                if not self.ranks.agreed(error):
                    self.ranks.leave()
                raise

    def rollback(self) -> None:
        """Undo what did not end; see :meth:`Simulation.rollback`."""
        if not self.ranks.gone:
            super().rollback()
        elif self._before is not None:  # with nobody left to ask, what was written stays where it is
            self.round, self.server, self.clients.rows, self.traffic = self._before
            self._before = None

    def _settle(self) -> None:
        for value in self.server.values():
            if isinstance(value, ClientMatrix):
                value.commit()
        self.ranks.together(self._settle_clients)

    def _settle_clients(self) -> None:
        for value in self.clients.rows.values():
            if isinstance(value, ClientMatrix):
                value.commit()

    def _check(self, server: State, round_number: int) -> None:
        super()._check(server, round_number)
        # Of a matrix that is kept, what is not in the patch was compared when it was.
        told = [value.patch if isinstance(value, ClientMatrix) else value for value in server.values()]
        self.ranks.agree(_DIFFER, [checksum(value) for value in told if value is not None])

    def mine(self, clients: Tensor) -> Tensor:
        """Give those that this rank owns; see :meth:`Simulation.mine`."""
        return clients[self.ranks.owns(clients)]

    def my_rows(self, rows: Tensor, clients: Tensor) -> Tensor:
        """Give rows of this rank's clients; see :meth:`Simulation.my_rows`."""
        return take_local_rows(rows, self.mine(clients))

    def apart(self, work: Callable[[], Result]) -> Result:
        """Do this rank's part, and fail if one fails; see :meth:`Simulation.apart`."""
        return self.ranks.together(work)

    def everyones(self, values: Tensor, clients: Tensor) -> Tensor:
        """Put together what all ranks found; see :meth:`Simulation.everyones`."""
        return self.ranks.collect(values.T.contiguous(), self.ranks.owner(clients.cpu())).T.contiguous()

    def _made(self, clients: Tensor, message: Rows, round_number: int, briefly: bool = False) -> Rows:
        places = self.ranks.owns(clients).nonzero().squeeze(1)

        def work() -> Rows:
            if not len(places):
                return {}
            made = super(ShardedSimulation, self)._made(clients[places], pick(message, places), round_number, briefly)
            return dict(made.items())

        return self.ranks.together(work)

    def _deliver(self, ask: Ask, cohort: Cohort, call: Call) -> Replies:
        clients, message = self._addressed(ask, cohort, call)
        self.ranks.agree(_DIFFER, [number_of(ask.task), checksum(clients)])
        places = self.ranks.owns(clients).nonzero().squeeze(1)

        def work() -> Rows:
            return self._answered(ask.task, clients[places], pick(message, places), call) if len(places) else {}

        own = self.ranks.together(work, stoppable=call.purpose == "round")
        reply = self.ranks.collect_rows(own, self.ranks.owner(clients.cpu()))
        if self.protection is not None and reply:
            self.protection.replies[clients[~self.ranks.owns(clients)].cpu()] += 1  # those of others were not counted
        return self._received(clients, reply, call)
