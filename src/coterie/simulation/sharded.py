"""A run over several processes (ranks), each with some of the clients, on a device of its own.

The server's half runs on every rank, with the same numbers. An exchange is the seam: each rank computes the asked
clients that it owns, and all ranks get all replies. The rows of all clients, the server's and the clients' own, lie
with the rank that owns the client.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar, cast

import torch
from torch import Tensor

from coterie.algorithms.base import Replies, State
from coterie.compute.batched import BatchedEngine
from coterie.compute.engine import Engine, pick
from coterie.errors import ConfigError
from coterie.rows import ClientMatrix, Rows, take_local_rows
from coterie.rows.distributed import Ranks, ShardedPlacement, checksum, number_of, sharded_placement
from coterie.rows.placement import Keep, Placement
from coterie.simulation.exchange import Exchange, NoReplies, Request
from coterie.simulation.processes import OneProcess

Result = TypeVar("Result")

_DIFFER = (
    "the ranks of the sharded run no longer have the same state: a method must draw random numbers by "
    "coterie.randomness alone, and all machines must be alike"
)


class ShardedExchange:
    """Lets each rank answer for its own clients, and gives all ranks all replies."""

    def __init__(self, inner: Exchange, ranks: Ranks) -> None:
        self.inner, self.ranks = inner, ranks

    def deliver(self, request: Request) -> Replies:
        ranks, clients = self.ranks, request.clients
        ranks.agree(_DIFFER, [number_of(request.task), checksum(clients)])
        places = ranks.owns(clients).nonzero().squeeze(1)

        def work() -> Rows:
            return self.inner.deliver(request.only(places)).rows if len(places) else {}

        own = ranks.together(work, stoppable=request.call.purpose == "round")
        return Replies(clients, ranks.collect_rows(own, ranks.owner(clients.cpu())))


class ShardedProcesses(OneProcess):
    """The processes of a sharded run, seen from one of them."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks, self.count, self.leads = ranks, ranks.count, ranks.leads

    def mine(self, clients: Tensor) -> Tensor:
        return clients[self.ranks.owns(clients)]

    def own_part(self, clients: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        places = self.ranks.owns(clients).nonzero().squeeze(1)
        return clients[places], pick(rows, places)

    def rows_of_mine(self, rows: Tensor, clients: Tensor) -> Tensor:
        return take_local_rows(rows, self.mine(clients))

    def gathered(self, values: Tensor, clients: Tensor) -> Tensor:
        return self.ranks.collect(values.T.contiguous(), self.ranks.owner(clients.cpu())).T.contiguous()

    def placement(self, keep: Keep, device: torch.device, scratch: str | os.PathLike[str] | None) -> ShardedPlacement:
        self.ranks.device = device
        return sharded_placement(keep, device, scratch, self.ranks)

    def connect(self, local: Exchange) -> Exchange:
        return ShardedExchange(local, self.ranks)

    def align(self, engine: Engine) -> None:
        # What is kept of an engine's choices is one rank's.
        if isinstance(engine, BatchedEngine):
            engine.chunk = self.ranks.least(engine.chunk or 0) or None
            convolution = self.ranks.told(lambda: engine.convolution)
            if convolution != engine.convolution:
                engine.convolve(convolution)

    def device(self, name: str, resolve: Callable[[], torch.device]) -> torch.device:
        ranks, device = self.ranks, resolve()
        if device.type == "cpu":
            return device
        self._refuse_one_device(name)
        there = torch.cuda.device_count()
        if ranks.local_rank >= there:
            raise ConfigError(
                f"device is {name!r}, but this machine has {there} CUDA device(s) for {ranks.local_count} ranks: "
                "start as many as there are devices"
            )
        device = torch.device("cuda", ranks.local_rank)
        torch.cuda.set_device(device)  # what is sent between ranks goes through the current device
        return device

    def common_device(self, name: str, resolve: Callable[[], torch.device]) -> str:
        self._refuse_one_device(name)
        return resolve().type

    def _refuse_one_device(self, name: str) -> None:
        if ":" in name:
            raise ConfigError(f"device is {name!r}, but each of {self.count} ranks needs one: use --device cuda")

    def together(self, work: Callable[[], Result], stoppable: bool = False) -> Result:
        return self.ranks.together(work, stoppable)

    def write(self, work: Callable[[], None]) -> None:
        self.ranks.together(lambda: work() if self.leads else None)

    def told(self, work: Callable[[], Result]) -> Result:
        return self.ranks.told(work)

    def any(self, flag: bool) -> bool:
        return self.ranks.any(flag)

    def agree(self, complaint: str, numbers: Sequence[int]) -> None:
        self.ranks.agree(complaint, numbers)

    def agree_on_server(self, server: State) -> None:
        # Of a client matrix, what is not in the patch was compared when it was.
        told = [value.patch if isinstance(value, ClientMatrix) else value for value in server.values()]
        self.ranks.agree(_DIFFER, [checksum(value) for value in told if value is not None])

    @contextlib.contextmanager
    def session(self) -> Iterator[None]:
        with self.ranks.sharing():
            try:
                yield
            except NoReplies:
                raise
            except BaseException as error:
                self.part_with(error)
                raise

    def checkpoint(self, work: Callable[[], None], placement: Placement) -> None:
        sharded, failure = cast(ShardedPlacement, placement), list[BaseException]()
        if not self.leads:
            sharded.follow()
        else:
            try:
                with sharded.leading():
                    work()
            except BaseException as error:
                if self.ranks.gone:
                    raise
                failure.append(error)

        def fail() -> None:
            for error in failure:
                raise error

        self.ranks.together(fail)

    @property
    def reachable(self) -> bool:
        return not self.ranks.gone

    def part_with(self, error: BaseException) -> None:
        if not self.ranks.agreed(error):
            self.ranks.leave()

    def stops_by(self, asked: Callable[[], bool]) -> None:
        self.ranks.asked_to_stop = asked

    def may_stop_now(self, in_round: bool, again: bool) -> bool:
        if not self.ranks.apart:  # the others wait for this rank: it stops when it next computes something of its own
            return False
        self.ranks.apart = False
        return True
