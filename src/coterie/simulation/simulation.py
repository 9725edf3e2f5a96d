"""A simulation: a method with its clients, played round by round.

:func:`~coterie.simulation.exchange.play` drives the server's half. What it asks for goes through the simulation's
exchange, which is all that differs between clients in this process, in several, and on other machines.

A round changes nothing until :meth:`Simulation.commit`. What it makes stands over the old state, and
:meth:`Simulation.rollback` drops it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from torch import Tensor, int64, ones_like

from coterie.algorithms.base import Algorithm, Ask, Cohort, Info, Message, Replies, Start, State
from coterie.algorithms.contract import calling, check_rows
from coterie.algorithms.local_part import LOCAL_PART, LocalPart, partly_local
from coterie.algorithms.running_statistics import STATISTICS, WithStatistics, with_statistics
from coterie.compute.engine import Call, Engine
from coterie.models.own_buffers import probe_inputs
from coterie.rows import Rows, look_at_rows, nbytes
from coterie.rows.placement import Keep
from coterie.simulation.client_states import ClientStates, commit_rows, part_rows
from coterie.simulation.exchange import (
    Alteration,
    AttackedExchange,
    Exchange,
    LocalExchange,
    LossyExchange,
    NoReplies,
    ProtectedExchange,
    Request,
    Traffic,
    new_numbers,
    refuse_infinite_server,
)
from coterie.simulation.privacy import Protection
from coterie.simulation.processes import ONE_PROCESS, OneProcess
from coterie.simulation.server_half import begin, initial, play_half, play_last_message

_BLOCK_ELEMENTS = 2**26  # of the personal models that are evaluated at once


class Simulation:
    """A method with all its clients.

    Parameters
    ----------
    algorithm
        The method.
    engine
        Runs the client's half.
    fresh
        Gives a client an initial model of its own.
    members
        Clients that take part in training, in increasing order; all of them if not given.
    keep
        Where the rows of all clients are kept.
    scratch
        Folder for those that are kept on disk.
    processes
        The processes that compute it.
    lost
        Says which of the asked clients do not answer; for tests of partial replies.
    protection
        Clips replies and adds noise to them; then nobody tells its number of samples, and all count the same.
    alter
        What attackers do to replies.
    local
        Patterns of the parameters that stay with their client; see
        :meth:`~coterie.models.problem.Problem.matching`.

    Attributes
    ----------
    exchange
        Brings requests to clients, and back their replies.
    server, clients
        The state after the last round that counts.
    round
        That round's number.
    traffic
        Bytes that crossed the wire so far.
    part
        What stays with the clients; ``None`` where everything is shared.
    norms
        The method with the running statistics of a model that has some, else ``None``.
    """

    def __init__(
        self,
        algorithm: Algorithm,
        engine: Engine,
        *,
        fresh: Callable[[int], Tensor] | None = None,
        members: Tensor | None = None,
        keep: Keep = "device",
        scratch: str | os.PathLike[str] | None = None,
        processes: OneProcess = ONE_PROCESS,
        lost: Callable[[Tensor, Call], Tensor] | None = None,
        protection: Protection | None = None,
        alter: Alteration | None = None,
        local: Sequence[str] = (),
    ) -> None:
        self.part: LocalPart | None = None
        if local:
            algorithm = partly_local(algorithm, engine.problem.layout, engine.problem.matching(local))
            self.part = algorithm.part
        self.norms: WithStatistics | None = None
        problem = engine.problem
        if problem.statistics.size:
            stays = problem.local_statistics(local)
            algorithm = self.norms = with_statistics(algorithm, problem.statistics, problem.running, stays)
        self.algorithm, self.engine, self.processes = algorithm, engine, processes
        self.protection = protection
        with calling(f"{algorithm.title}, tasks"):
            self.tasks = algorithm.tasks()
        row, sizes = engine.problem.start, self._told_sizes()
        algorithm.check_clients(len(sizes) if members is None else len(members))
        x = engine.samples.x
        probe = probe_inputs(problem.module, x.shape[1:], x.dtype == int64, row.dtype, row.device)
        own = fresh or (lambda client: row.clone())
        start = Start(row, len(sizes), engine.net, sizes, engine.seed, own, probe, members)
        self.placement = processes.placement(keep, row.device, scratch)
        self.server, rows = self.placement.place(*initial(algorithm, start), len(sizes))
        self.clients = ClientStates(rows)
        self.exchange: Exchange = processes.connect(
            LocalExchange(algorithm.title, engine, self.tasks, self.clients, self.placement)
        )
        if lost is not None:
            self.exchange = LossyExchange(self.exchange, lost)
        if protection is not None:
            self.exchange = ProtectedExchange(self.exchange, self.tasks, protection)
        if alter is not None:
            self.exchange = AttackedExchange(self.exchange, alter)
        self.traffic, self.round = Traffic(), 0
        self._before: tuple[int, State, Rows, Traffic] | None = None

    def _told_sizes(self) -> Tensor:
        sizes = self.engine.sizes["train"]
        return sizes if self.protection is None else ones_like(sizes)

    # --------------------------------------------------------------------------------------------------------- rounds

    def cohort(self, clients: Tensor, round_number: int) -> Cohort:
        """Make the cohort of a round, of clients in increasing order."""
        return Cohort(clients, round_number, self._told_sizes(), self.engine.seed, self.engine.net.layout)

    def expect(self, clients: Tensor | None) -> None:
        """Say who takes part in the round after the next: their rows are brought while that one is played."""
        self.placement.expect(clients)

    def play_round(self, clients: Tensor, round_number: int, newcomers: Tensor | None = None) -> Info:
        """Play one round and commit it; if it does not end, nothing has changed.

        Parameters
        ----------
        clients
            Who takes part, in increasing order.
        round_number
            The round, counted from 1.
        newcomers
            Clients that no round has asked before while others trained, in increasing order: they play their first
            round as the method welcomes them, beside that of the others, and then stay.

        Returns
        -------
        Info
            What the round reports; nothing if nobody replied and the round is void.
        """
        cohort = self.cohort(clients, round_number)
        self.placement.begin(clients)
        with self._attempt():
            before = self.clients.rows
            welcomed = None if newcomers is None else self._welcomed(newcomers, round_number)
            try:
                server, info = self._played(cohort, "round")
                if welcomed is not None:
                    server = self.algorithm.admit(server, *welcomed)
            except NoReplies:
                self.clients.rows = before
                server, info = self.server, {}
            finite = self.processes.are_finite(new_numbers(server), clients)
            self.engine.settle()  # whose clients it was, if any, is said first
            if not finite:
                refuse_infinite_server(server, round_number)
            self.processes.agree_on_server(server)
            self.server, self.round = server, round_number
            del before, server  # with the last reader of the old rows gone, they are overwritten where they lie
        self.commit()
        self.placement.end()
        return info

    def _welcomed(self, newcomers: Tensor, round_number: int) -> tuple[State, Tensor] | None:
        """Play the first round of newcomers; give the server's state after it and who replied, if anybody did."""
        cohort, replied = self.cohort(newcomers, round_number), set[int]()
        deliver = self._asks(cohort, "adapt")

        def noted(ask: Ask) -> Replies:
            replies = deliver(ask)
            replied.update(replies.clients.tolist())
            return replies

        before = self.clients.rows
        try:
            server, _ = play_half(self.algorithm, "welcome", self.server, cohort, noted)
        except NoReplies:
            self.clients.rows = before
            return None
        return server, newcomers.new_tensor(sorted(replied))

    def commit(self) -> None:
        """Let what was played count: write changed rows to their places. One that was interrupted is called again."""
        self._before = None  # from here on the round counts
        part_rows(self.server, self.clients.rows)
        commit_rows(self.server)
        self.processes.together(lambda: commit_rows(self.clients.rows))

    def rollback(self) -> None:
        """Undo everything since the last commit."""
        if self._before is not None:
            self.round, self.server, self.clients.rows, self.traffic = self._before
            self._before = None

    def recover(self) -> None:
        """After an interrupt anywhere: undo what did not count yet, or finish the commit that was interrupted."""
        if self._before is not None:
            self.rollback()
        elif self.processes.reachable:
            self.commit()

    @contextlib.contextmanager
    def _attempt(self) -> Iterator[None]:
        """Play something that is undone if it fails."""
        self._before = (self.round, self.server, self.clients.rows, replace(self.traffic))
        try:
            with self.engine.rounding(), self.processes.session():  # the server's products are rounded alike
                yield
                self.engine.settle()
        except BaseException as error:
            self.rollback()
            if isinstance(error, Exception):  # which may come of numbers that are not finite
                self.engine.settle()
            raise

    @contextlib.contextmanager
    def _trial(self) -> Iterator[None]:
        """Play something that is undone in any case."""
        with self._attempt():
            yield
        self.rollback()

    def _asks(self, cohort: Cohort, purpose: str) -> Callable[[Ask], Replies]:
        """Give what delivers the asks of one round; the purpose decides which random numbers are drawn."""
        number = 0

        def deliver(ask: Ask) -> Replies:
            nonlocal number
            with calling(f"{self.algorithm.title}, task {ask.task!r}"):
                request = Request.of(ask, cohort, Call(cohort.round, purpose, number), self.tasks)
            number += 1
            self.traffic.down += request.message.bytes_each * len(request.clients)
            replies = self.exchange.deliver(request)
            self.traffic.up += nbytes(replies.rows)
            return replies

        return deliver

    # ------------------------------------------------------------------------------------- personal models, evaluated

    def last_message(self, clients: Tensor, round_number: int) -> Message:
        """Give what clients are sent to make their personal models of, leaving everything as it was."""
        with self._trial():
            return self._last_message(self.cohort(clients, round_number), "personalise")

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
            What the algorithm's ``predict`` needs, a row for each client of this process; not to be changed if
            ``briefly``.
        """
        with self._trial():
            return self._personal(clients, round_number, "personalise", briefly)

    def asks_to_personalise(self, clients: Tensor) -> bool:
        """Say whether clients compute something on their samples before they have personal models."""
        try:
            next(begin(self.algorithm, "personalise", self.server, self.cohort(clients, self.round)))
        except StopIteration:
            return False
        return True

    def personal_blocks(self, blocks: Sequence[Tensor], round_number: int) -> Iterator[tuple[Tensor, Rows]]:
        """Make personal models for one block of clients after another, to be read before the next block."""
        for number, block in enumerate(blocks):
            self.placement.begin()
            self.placement.expect(blocks[number + 1] if number + 1 < len(blocks) else None)
            rows = self.personal(block, round_number, briefly=True)
            self.placement.prefetch()
            yield block, rows

    @property
    def shares_all(self) -> bool:
        """Whether nothing of a model stays with the clients, neither parameters nor running statistics."""
        return self.part is None and (self.norms is None or self.norms.sends_all)

    def on_clients(self, models: Rows, clients: Tensor) -> tuple[Rows, bool]:
        """Give a global model as it is applied on clients, and whether that is one model for all of them.

        Where parameters stay with the clients, each has the global model with its own: a row for each client of this
        process.
        """
        if self.shares_all:
            return models, True
        mine = self.processes.mine(clients)
        rows = {name: value.expand(len(mine), *value.shape) for name, value in models.items()}
        return self.with_local(rows, mine), False

    def with_local(self, models: Rows, mine: Tensor) -> Rows:
        """Put to a row for each client of this process what stays with it."""
        return self.completed(models, lambda name: look_at_rows(self.clients.rows[name], mine))

    def completed(self, models: Rows, state: Callable[[str], Tensor]) -> Rows:
        """Put to models of the server's what lies with each client, whose state is given by name."""
        sent = {name: value for name, value in models.items() if name == STATISTICS}
        if self.part is not None:
            models = {name: value for name, value in models.items() if name not in sent}
            models = self.part.complete(models, state(LOCAL_PART)) | sent
        if self.norms is None or self.norms.sends_all:
            return models
        return self.norms.complete(models, state(STATISTICS))

    def blocks(self, clients: Tensor) -> tuple[Tensor, ...]:
        """Cut clients into blocks whose models fit on the device; one where the method needs all of them together."""
        most = max(128, _BLOCK_ELEMENTS // self.engine.net.layout.size)
        if self.algorithm.evaluated_together or len(clients) <= most:
            return (clients,)
        blocks: tuple[Tensor, ...] = clients.split(most)
        return blocks

    def adapt(self, clients: Tensor, round_number: int, rounds: int) -> Rows:
        """Let newcomers join for some rounds of their own, make their personal models, and drop all other effects.

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
            The personal models of those that are computed in this process.
        """
        with self._trial():
            for extra in range(rounds):
                cohort = self.cohort(clients, round_number + 1 + extra)
                self.server, _ = self._played(cohort, "adapt", "round" if extra else "welcome")
            return self._personal(clients, round_number, "adapt personalise")

    def _played(self, cohort: Cohort, purpose: str, half: str = "round") -> tuple[State, Info]:
        return play_half(self.algorithm, half, self.server, cohort, self._asks(cohort, purpose))

    def _last_message(self, cohort: Cohort, purpose: str) -> Message:
        return play_last_message(self.algorithm, self.server, cohort, self._asks(cohort, purpose))

    def _personal(self, clients: Tensor, round_number: int, purpose: str, briefly: bool = False) -> Rows:
        message = self._last_message(self.cohort(clients, round_number), purpose)
        mine, rows = self.processes.own_part(clients, message.rows(len(clients)))

        def make() -> Rows:
            if not len(mine):
                return {}
            context = self.engine.client_context(mine, Call(round_number, "personal"))
            with calling(f"{self.algorithm.title}, personal"):
                made = self.algorithm.personal(context, self.clients.on_demand(mine, briefly), rows)
                check_rows("what it gives", made, len(mine))
            return dict(made.items())  # what it takes from the state is read here, where a failure is everybody's

        return self.processes.together(make)
