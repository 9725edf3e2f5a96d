"""A federation in one process: plays an algorithm's two halves against each other.

The seam to a transport is one function, ``exchange(ask) -> replies``: :func:`play` drives the server's half with it and
knows nothing else. Here the exchange runs the client's half on an engine; between machines it sends messages.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, Ask, Cohort, Info, Replies, Start, State
from coterie.engines.base import Call, Engine, take
from coterie.engines.keeping import Keep, Keeper
from coterie.engines.states import ClientStates
from coterie.errors import AlgorithmError, Diverged
from coterie.privacy import Protection
from coterie.rows import Kept, Rows, nbytes

_BLOCK_ELEMENTS = 2**26  # of the personal models that are evaluated at once

Result = TypeVar("Result")
Exchange = Callable[[Ask], Replies]
Transform = Callable[[Rows, Tensor, Call], Rows]
"""From replies, the clients they come from, and when and why they were sent, to what the server gets: attacks."""


class NoReplies(Exception):
    """Nobody answered an ask: the round is void."""


def play(script: Generator[Ask, Replies, Result], exchange: Exchange) -> Result:
    """Drive the server's half of a round to its end.

    Parameters
    ----------
    script
        A generator of asks.
    exchange
        Delivers an ask and gives the replies.

    Returns
    -------
    Result
        What the generator returns.
    """
    try:
        ask = next(script)
        while True:
            ask = script.send(exchange(ask))
    except StopIteration as end:
        result: Result = end.value
        return result


@dataclass
class Traffic:
    """Bytes that crossed the wire.

    Parameters
    ----------
    down
        From the server to clients.
    up
        From clients to the server.
    """

    down: int = 0
    up: int = 0


class Simulation:
    """An algorithm with all its clients on one engine.

    Parameters
    ----------
    algorithm
        The method.
    engine
        Runs the client's half.
    fresh
        Gives a client an initial model of its own.
    transform
        What happens to replies on the wire.
    lost
        Says which of the asked clients do not answer; for tests of partial replies.
    members
        Clients that take part in training, in increasing order; all of them if not given.
    keep
        Where the rows of all clients are kept.
    scratch
        Folder for those that are kept on disk.
    protection
        Clips replies and adds noise to them; then nobody tells its number of samples, and all count the same.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        engine: Engine,
        *,
        fresh: Callable[[int], Tensor] | None = None,
        transform: Transform | None = None,
        lost: Callable[[Tensor, Call], Tensor] | None = None,
        members: Tensor | None = None,
        keep: Keep = "device",
        scratch: str | os.PathLike[str] | None = None,
        protection: Protection | None = None,
    ) -> None:
        self.algorithm, self.engine = algorithm, engine
        self.tasks = algorithm.tasks()
        self.traffic = Traffic()
        self._transform, self._lost, self.protection = transform, lost, protection
        row = engine.problem.start
        sizes = self._told_sizes()
        fresh = fresh or (lambda client: row.clone())
        shape = tuple(engine.samples.x.shape[1:])
        start = Start(row, len(sizes), engine.net, sizes, engine.seed, fresh, shape, members)
        self.keeper = Keeper(keep, row.device, scratch)
        self.server, rows = self.keeper.place(*algorithm.init(start), len(sizes))
        self.clients = ClientStates(rows)
        self.round = 0  # the last round whose effects are in the state
        self._before: tuple[int, State, Rows, Traffic] | None = None

    def cohort(self, clients: Tensor, round_number: int) -> Cohort:
        """Make the cohort of a round.

        Parameters
        ----------
        clients
            Who takes part, in increasing order.
        round_number
            The round, counted from 1.

        Returns
        -------
        Cohort
            The cohort.
        """
        engine = self.engine
        return Cohort(clients, round_number, self._told_sizes(), engine.seed, engine.net.layout)

    def _told_sizes(self) -> Tensor:
        sizes = self.engine.sizes["train"]
        return sizes if self.protection is None else torch.ones_like(sizes)

    def play_round(self, clients: Tensor, round_number: int) -> Info:
        """Play one round and keep its effects; if it does not end, nothing has changed.

        Parameters
        ----------
        clients
            Who takes part, in increasing order.
        round_number
            The round, counted from 1.

        Returns
        -------
        Info
            What the round reports.
        """
        cohort = self.cohort(clients, round_number)
        self.keeper.begin(clients)
        with self._trial():
            before = self.clients.rows
            try:
                server, info = play(self.algorithm.round(self.server, cohort), self.exchange(cohort, "round"))
            except NoReplies:
                self.clients.rows = before
                server, info = self.server, {}
            _refuse_infinite_server(server, round_number)
            self.server, self.round = server, round_number
            del before, server
            self._before = None  # from here on the round counts
        self.keeper.end()
        return info

    def expect(self, clients: Tensor | None) -> None:
        """Say who takes part in the round after the next, so that their rows can be brought while that one is played.

        Parameters
        ----------
        clients
            They, in increasing order; ``None`` if there is none or they are not known.
        """
        self.keeper.expect(clients)

    @contextlib.contextmanager
    def _trial(self) -> Iterator[None]:
        self._before = (self.round, self.server, self.clients.rows, replace(self.traffic))
        try:
            with self.engine.rounding():  # the server's products too
                yield
        finally:
            self.rollback()

    def rollback(self) -> None:
        """Undo what a round or an evaluation that did not end has done; may itself be stopped and called again."""
        if self._before is not None:
            self.round, self.server, self.clients.rows, self.traffic = self._before
            self._before = None
        # What counts is written to its place: of a round that was undone, nothing.
        shelves: set[int] = set()
        for state in (self.server, self.clients.rows):
            for name, value in state.items():
                if isinstance(value, Kept) and id(value.shelf) in shelves:
                    state[name] = value.clone()  # a state may hold a matrix as it was and as it is; a shelf holds one
                elif isinstance(value, Kept):
                    shelves.add(id(value.shelf))
        for value in (*self.server.values(), *self.clients.rows.values()):
            if isinstance(value, Kept):
                value.settle()

    def personal(self, clients: Tensor, round_number: int) -> Rows:
        """Make personal models for evaluation, leaving everything as it was.

        Parameters
        ----------
        clients
            Whose, in increasing order.
        round_number
            The round that was played last.

        Returns
        -------
        Rows
            What the algorithm's ``predict`` needs, a row per client.
        """
        with self._trial():
            return self._personal(clients, round_number, "personalise")

    def personal_blocks(self, blocks: Sequence[Tensor], round_number: int) -> Iterator[tuple[Tensor, Rows]]:
        """Make personal models as :meth:`personal` does, for not too many clients at a time.

        Parameters
        ----------
        blocks
            Whose, as :meth:`blocks` gives them.
        round_number
            The round that was played last.

        Yields
        ------
        tuple
            Some of the clients, and their models.
        """
        for number, block in enumerate(blocks):
            self.keeper.begin()
            self.keeper.expect(blocks[number + 1] if number + 1 < len(blocks) else None)
            rows = self.personal(block, round_number)
            self.keeper.prefetch()
            yield block, rows

    def blocks(self, clients: Tensor) -> tuple[Tensor, ...]:
        """Cut clients into blocks whose models can lie on the device at once.

        Parameters
        ----------
        clients
            The clients.

        Returns
        -------
        tuple of Tensor
            The blocks, one if the method must have all clients together.
        """
        most = max(128, _BLOCK_ELEMENTS // self.engine.net.layout.size)
        if self.algorithm.evaluated_together or len(clients) <= most:
            return (clients,)
        blocks: tuple[Tensor, ...] = clients.split(most)
        return blocks

    def adapt(self, clients: Tensor, round_number: int, rounds: int) -> Rows:
        """Let clients that never took part join for some rounds of their own, then make their models; drop all effects.

        Parameters
        ----------
        clients
            The newcomers, in increasing order.
        round_number
            The round that was played last.
        rounds
            How many rounds they join for.

        Returns
        -------
        Rows
            Their personal models.
        """
        with self._trial():
            for extra in range(rounds):
                cohort = self.cohort(clients, round_number + 1 + extra)
                self.server, _ = play(self.algorithm.round(self.server, cohort), self.exchange(cohort, "adapt"))
            return self._personal(clients, round_number, "adapt personalise")

    def _personal(self, clients: Tensor, round_number: int, purpose: str) -> Rows:
        cohort = self.cohort(clients, round_number)
        message = play(self.algorithm.personalise(self.server, cohort), self.exchange(cohort, purpose))
        here = self.engine.here(clients, Call(round_number, "personal"))
        return self.algorithm.personal(here, self.clients.on_demand(clients), message.rows(len(clients)))

    def exchange(self, cohort: Cohort, purpose: str) -> Exchange:
        """Give the function that delivers the asks of one round.

        Parameters
        ----------
        cohort
            The clients of the round.
        purpose
            What the round is for; decides which random numbers are drawn.

        Returns
        -------
        Exchange
            From an ask to replies.
        """
        number = 0

        def deliver(ask: Ask) -> Replies:
            nonlocal number
            call = Call(cohort.round, purpose, number)
            number += 1
            return self._deliver(ask, cohort, call)

        return deliver

    def _deliver(self, ask: Ask, cohort: Cohort, call: Call) -> Replies:
        asked = cohort.clients if ask.clients is None else ask.clients
        if ask.task not in self.tasks:
            raise AlgorithmError(f"{self.algorithm.title} asked for the task {ask.task!r}; it has {list(self.tasks)}")
        for name, value in ask.message.each.items():
            if len(value) != len(asked):
                raise AlgorithmError(f"the message {name!r} has {len(value)} rows for {len(asked)} clients")
        self.traffic.down += ask.message.bytes_each * len(asked)
        message, clients = ask.message.rows(len(asked)), asked
        if self._lost is not None:
            keep = ~self._lost(asked, call)
            clients, message = asked[keep], take(message, keep)
        if not len(clients):
            raise NoReplies
        state = self.clients.gather(clients)
        if call.purpose == "round":
            self.keeper.prefetch(in_round=True)
        with torch.no_grad():
            changes, reply = self.engine.run(self.tasks[ask.task], clients, state, message, call)
        _refuse_infinite(clients, changes | {f"reply {name}": value for name, value in reply.items()}, call)
        if self.protection is not None:
            when = (f"{call.purpose} {call.exchange}", call.round)
            reply = self.protection(reply, message, self.tasks[ask.task].references, clients, when)
        if self._transform is not None:
            reply = self._transform(reply, clients, call)
        self.clients.scatter(clients, changes)
        self.traffic.up += nbytes(reply)
        return Replies(clients, reply)


def _refuse_infinite_server(server: State, round_number: int) -> None:
    for tensor in server.values():
        # Of a matrix that is kept, what is not in the patch was looked at when it was.
        value = tensor.patch if isinstance(tensor, Kept) else tensor
        if value is None:
            continue
        if value.is_floating_point() and not bool(value.sum().isfinite()) and not bool(value.isfinite().all()):
            raise Diverged(round_number, [])


def _refuse_infinite(clients: Tensor, rows: Rows, call: Call) -> None:
    different = {id(value): value for value in rows.values() if value.is_floating_point() and value.numel()}
    flat = [value.reshape(len(value), -1) for value in different.values()]
    if not flat:
        return
    # A sum is finite only if all its terms are, but for overflow, which the exact test then clears. In the rows' own
    # type: a CPU takes 25 times as long to sum float32 numbers in float64.
    sums = torch.stack([value.sum(1).double() for value in flat])
    if bool(sums.isfinite().all()):
        return
    bad = ~torch.stack([value.isfinite().all(1) for value in flat]).all(0)
    if bool(bad.any()):
        raise Diverged(call.round, clients[bad].tolist())
