"""The exchange: how what the server's half asks for reaches clients and becomes replies.

An exchange is an object with one method, ``deliver(request) -> replies``. At its bottom stands where the clients are:

- :class:`LocalExchange` runs the client's half in this process;
- :class:`~coterie.simulation.sharded.ShardedExchange` shares the clients out over several processes;
- :class:`~coterie.federation.remote_exchange.RemoteExchange` sends messages to nodes on other machines.

Whatever acts on messages stands around another exchange, for every method and wherever the clients are:
:class:`LossyExchange` loses replies, :class:`ProtectedExchange` clips them and adds noise, and
:class:`AttackedExchange` lets attackers alter theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from coterie.algorithms.base import Ask, Cohort, Message, Replies, State, Task
from coterie.algorithms.contract import calling, check_rows, check_tensors
from coterie.compute.engine import Call, Engine
from coterie.compute.finiteness import Finiteness
from coterie.errors import AlgorithmError, Diverged
from coterie.rows import ClientMatrix, Rows
from coterie.rows.placement import Placement
from coterie.simulation.attacks import Attack, MessageAttack
from coterie.simulation.client_states import ClientStates
from coterie.simulation.privacy import Protection

Result = TypeVar("Result")
_PURPOSES = ("round", "personalise", "adapt", "adapt personalise")
Alteration = Callable[[Rows, Tensor, Call], Rows]
"""From replies, the clients they come from, and when and why they were sent, to what the server gets."""


class NoReplies(Exception):
    """Nobody answered a request: the round is void."""


@dataclass(frozen=True)
class Request:
    """An ask on its way to its clients.

    Parameters
    ----------
    task
        The name of the task to run.
    clients
        Who is asked, in increasing order.
    message
        What they are sent.
    call
        When and why.
    """

    task: str
    clients: Tensor
    message: Message
    call: Call

    @classmethod
    def of(cls, ask: Ask, cohort: Cohort, call: Call, tasks: Mapping[str, Task]) -> Request:
        """Address an ask; one that a method may not make is an ``AlgorithmError``."""
        clients = cohort.clients if ask.clients is None else ask.clients
        if ask.task not in tasks:
            raise AlgorithmError(f"the method asked for the task {ask.task!r}, but has {', '.join(tasks)}")
        if not isinstance(ask.message, Message):
            raise AlgorithmError(f"it must be sent a Message, but is sent a {type(ask.message).__name__}")
        check_tensors("what the message shares", ask.message.shared)
        check_rows("the message", ask.message.each, len(clients))
        return cls(ask.task, clients, ask.message, call)

    @property
    def rows(self) -> Rows:
        """The message with a row for each client; what is shared is repeated without a copy."""
        return self.message.rows(len(self.clients))

    def only(self, places: Tensor) -> Request:
        """Give the same request to some of its clients, by their places or a mask."""
        each = {name: value[places] for name, value in self.message.each.items()}
        return Request(self.task, self.clients[places], Message(self.message.shared, each), self.call)


class Exchange(Protocol):
    """Delivers requests."""

    def deliver(self, request: Request) -> Replies:
        """Bring a request to its clients, and back what they reply.

        Raises :class:`NoReplies` where nobody does. Fewer than were asked may reply, in increasing order.
        """
        ...


class LocalExchange:
    """Runs the client's half in this process, and keeps what it changes in the clients' states."""

    def __init__(
        self,
        title: str,
        engine: Engine,
        tasks: Mapping[str, Task],
        clients: ClientStates,
        placement: Placement,
    ) -> None:
        self.title, self.engine, self.tasks = title, engine, tasks
        self.clients, self.placement = clients, placement

    def deliver(self, request: Request) -> Replies:
        clients, call = request.clients, request.call
        # Many tasks look at none of it. Rows that lie elsewhere are taken now, before those of the next cohort.
        here = self.placement.keep == "device"
        state = self.clients.on_demand(clients) if here else self.clients.gather(clients)
        if call.purpose == "round":
            self.placement.prefetch(in_round=True)  # the next cohort's rows come while this one computes
        rows = request.rows
        with calling(f"{self.title}, task {request.task!r}", message=rows, state=self.clients.rows):
            with torch.no_grad():
                changes, reply = self.engine.run(self.tasks[request.task], clients, state, rows, call)
            given = changes | {f"reply {name}": value for name, value in reply.items()}
            self.engine.examine(partial(refuse_infinite, clients, given, call))
            self.clients.scatter(clients, changes)
        return Replies(clients, reply)


class LossyExchange:
    """Loses some of the clients on the way: ``lost`` says which."""

    def __init__(self, inner: Exchange, lost: Callable[[Tensor, Call], Tensor]) -> None:
        self.inner, self.lost = inner, lost

    def deliver(self, request: Request) -> Replies:
        lost = self.lost(request.clients, request.call)
        if bool(lost.all()):
            raise NoReplies
        return self.inner.deliver(request.only(~lost) if bool(lost.any()) else request)


class ProtectedExchange:
    """Clips replies and adds noise to them before the server sees them."""

    def __init__(self, inner: Exchange, tasks: Mapping[str, Task], protection: Protection) -> None:
        self.inner, self.tasks, self.protection = inner, tasks, protection

    def deliver(self, request: Request) -> Replies:
        replies = self.inner.deliver(request)
        if len(replies.clients) < len(request.clients):
            request = request.only(torch.isin(request.clients, replies.clients))
        call = request.call
        when = (f"{call.purpose} {call.exchange}", call.round)
        references = self.tasks[request.task].references
        return Replies(replies.clients, self.protection(replies.rows, request.rows, references, replies.clients, when))


class AttackedExchange:
    """Lets attackers alter what they reply."""

    def __init__(self, inner: Exchange, alter: Alteration) -> None:
        self.inner, self.alter = inner, alter

    def deliver(self, request: Request) -> Replies:
        replies = self.inner.deliver(request)
        return Replies(replies.clients, self.alter(replies.rows, replies.clients, request.call))


def alteration(attack: Attack, attackers: Tensor, seed: int) -> Alteration | None:
    """Give what attackers do to their replies; ``None`` where they do nothing to them."""
    if not isinstance(attack, MessageAttack) or not len(attackers):
        return None

    def alter(rows: Rows, clients: Tensor, call: Call) -> Rows:
        # An attacker draws anew for every exchange, those of an evaluation included.
        exchange = len(_PURPOSES) * call.exchange + _PURPOSES.index(call.purpose)
        hostile = torch.isin(clients, attackers)
        return attack.apply(rows, clients, hostile, seed=seed, round_number=call.round, exchange=exchange)

    return alter


def play(script: Generator[Ask, Replies, Result], deliver: Callable[[Ask], Replies], whose: str) -> Result:
    """Drive a generator of asks to its end, and give what it returns; ``whose`` names it where it fails."""
    replies: Replies | None = None
    while True:
        with calling(whose):
            if not isinstance(script, Generator):
                raise AlgorithmError(f"it must yield an Ask, but is no generator: it gives a {type(script).__name__}")
            try:
                ask = next(script) if replies is None else script.send(replies)
            except StopIteration as end:
                result: Result = end.value
                return result
            if not isinstance(ask, Ask):
                raise AlgorithmError(f"it must yield an Ask, but yields a {type(ask).__name__}")
        replies = deliver(ask)


@dataclass
class Traffic:
    """Bytes that crossed the wire: ``down`` to the clients, ``up`` to the server."""

    down: int = 0
    up: int = 0


def new_numbers(server: State) -> list[Tensor]:
    """Give the numbers of the server's state that a round may have made."""
    # Of a client matrix, what is not in the patch was looked at when it was.
    values = [value.patch if isinstance(value, ClientMatrix) else value for value in server.values()]
    return [value for value in values if value is not None and value.is_floating_point() and value.numel()]


def refuse_infinite_server(server: State, round_number: int) -> None:
    """Raise :class:`~coterie.errors.Diverged` if a round made a number in the server's state that is not finite."""
    if not all(bool(value.isfinite().all()) for value in new_numbers(server)):
        raise Diverged(round_number, [])


def refuse_infinite(clients: Tensor, rows: Rows, call: Call) -> None:
    """Raise :class:`~coterie.errors.Diverged` with the clients that computed a number that is not finite."""
    # A model that a client keeps and sends is one tensor under two names: it is summed once.
    distinct = {id(value): value for value in rows.values() if value.is_floating_point() and value.numel()}
    flat = [value.reshape(len(value), -1) for value in distinct.values()]
    if not flat:
        return
    if Finiteness(flat).known:
        return
    bad = ~torch.stack([value.isfinite().all(1) for value in flat]).all(0)
    if bool(bad.any()):
        raise Diverged(call.round, clients[bad].tolist())
