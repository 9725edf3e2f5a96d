"""A federation in one process: plays an algorithm's two halves against each other.

The seam to a transport is one function, ``exchange(ask) -> replies``: :func:`~coterie.simulation.exchange.play` drives
the server's half with it and knows nothing else. Here the exchange runs the client's half on an engine; between
machines it sends messages.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor

from coterie.algorithms.base import Algorithm, Ask, Cohort, Info, Replies, Start, State
from coterie.compute.engine import Call, Engine, take
from coterie.errors import AlgorithmError
from coterie.rows import ClientMatrix, Rows, nbytes
from coterie.rows.placement import Keep, Placement
from coterie.simulation.client_states import ClientStates
from coterie.simulation.exchange import (
    Exchange,
    NoReplies,
    Traffic,
    Transform,
    play,
    refuse_infinite,
    refuse_infinite_server,
)
from coterie.simulation.ownership import Ownership
from coterie.simulation.privacy import Protection

_BLOCK_ELEMENTS = 2**26  # of the personal models that are evaluated at once

__all__ = ["Exchange", "NoReplies", "Simulation", "Traffic", "Transform", "play"]

Result = TypeVar("Result")


class Simulation(Ownership):
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
        self.placement = self._placement(keep, row.device, scratch)
        self.server, rows = self.placement.place(*algorithm.init(start), len(sizes))
        self.clients = ClientStates(rows)
        self.round = 0  # the last round whose effects are in the state
        self._before: tuple[int, State, Rows, Traffic] | None = None

    def _placement(self, keep: Keep, device: torch.device, scratch: str | os.PathLike[str] | None) -> Placement:
        return Placement(keep, device, scratch)

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
        self.placement.begin(clients)
        with self._trial():
            before = self.clients.rows
            try:
                server, info = play(self.algorithm.round(self.server, cohort), self.exchange(cohort, "round"))
            except NoReplies:
                self.clients.rows = before
                server, info = self.server, {}
            self._check(server, round_number)
            self.server, self.round = server, round_number
            del before, server
            self._before = None  # from here on the round counts
        self.placement.end()
        return info

    def _check(self, server: State, round_number: int) -> None:
        """Look at the server's state before the round counts."""
        refuse_infinite_server(server, round_number)

    def expect(self, clients: Tensor | None) -> None:
        """Say who takes part in the round after the next, so that their rows can be brought while that one is played.

        Parameters
        ----------
        clients
            They, in increasing order; ``None`` if there is none or they are not known.
        """
        self.placement.expect(clients)

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
        backends: set[int] = set()
        for state in (self.server, self.clients.rows):
            for name, value in state.items():
                if isinstance(value, ClientMatrix) and id(value.backend) in backends:
                    state[name] = value.clone()  # a state may hold a matrix as it was and as it is; a backend holds one
                elif isinstance(value, ClientMatrix):
                    backends.add(id(value.backend))
        self._settle()

    def _settle(self) -> None:
        for value in (*self.server.values(), *self.clients.rows.values()):
            if isinstance(value, ClientMatrix):
                value.settle()

    def personal(self, clients: Tensor, round_number: int, briefly: bool = False) -> Rows:
        """Make personal models for evaluation, leaving everything as it was.

        Parameters
        ----------
        clients
            Whose, in increasing order.
        round_number
            The round that was played last.
        briefly
            Whether they are read before the next round, so that they need not be copies of the state.

        Returns
        -------
        Rows
            What the algorithm's ``predict`` needs, a row for each of :meth:`mine`; not to be changed if ``briefly``.
        """
        with self._trial():
            return self._personal(clients, round_number, "personalise", briefly)

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
            Some of the clients, and the models of those that are :meth:`mine`, which are to be read before the next
            round and not to be changed.
        """
        for number, block in enumerate(blocks):
            self.placement.begin()
            self.placement.expect(blocks[number + 1] if number + 1 < len(blocks) else None)
            rows = self.personal(block, round_number, briefly=True)
            self.placement.prefetch()
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
            The personal models of those that are :meth:`mine`.
        """
        with self._trial():
            for extra in range(rounds):
                cohort = self.cohort(clients, round_number + 1 + extra)
                self.server, _ = play(self.algorithm.round(self.server, cohort), self.exchange(cohort, "adapt"))
            return self._personal(clients, round_number, "adapt personalise")

    def _personal(self, clients: Tensor, round_number: int, purpose: str, briefly: bool = False) -> Rows:
        cohort = self.cohort(clients, round_number)
        message = play(self.algorithm.personalise(self.server, cohort), self.exchange(cohort, purpose))
        return self._made(clients, message.rows(len(clients)), round_number, briefly)

    def _made(self, clients: Tensor, message: Rows, round_number: int, briefly: bool = False) -> Rows:
        context = self.engine.client_context(clients, Call(round_number, "personal"))
        return self.algorithm.personal(context, self.clients.on_demand(clients, briefly), message)

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
        clients, message = self._addressed(ask, cohort, call)
        return self._received(clients, self._answered(ask.task, clients, message, call), call)

    def _addressed(self, ask: Ask, cohort: Cohort, call: Call) -> tuple[Tensor, Rows]:
        """Give the clients that an ask reaches, and what each is sent."""
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
        return clients, message

    def _answered(self, name: str, clients: Tensor, message: Rows, call: Call) -> Rows:
        """Run a task, keep what it changes, and give what the clients send."""
        task = self.tasks[name]
        state = self.clients.gather(clients)
        if call.purpose == "round":
            self.placement.prefetch(in_round=True)
        with torch.no_grad():
            changes, reply = self.engine.run(task, clients, state, message, call)
        refuse_infinite(clients, changes | {f"reply {name}": value for name, value in reply.items()}, call)
        if self.protection is not None:
            when = (f"{call.purpose} {call.exchange}", call.round)
            reply = self.protection(reply, message, task.references, clients, when)
        self.clients.scatter(clients, changes)
        return reply

    def _received(self, clients: Tensor, reply: Rows, call: Call) -> Replies:
        """Give the replies as they come out of the wire."""
        if self._transform is not None:
            reply = self._transform(reply, clients, call)
        self.traffic.up += nbytes(reply)
        return Replies(clients, reply)
