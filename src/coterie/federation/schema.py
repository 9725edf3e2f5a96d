"""What a method sends, found by playing it on blank samples and looking at its messages.

No table is kept by hand: nodes check messages against what was observed here, and the table of what crosses the wire is
made of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from coterie.algorithms import registry
from coterie.algorithms.base import Message, Replies
from coterie.compute.engine import Call, Engine
from coterie.config import ExperimentConfig
from coterie.errors import CoterieError
from coterie.federation.agreement import Agreement
from coterie.federation.party_data import blank_population, engine_of, fresh_row
from coterie.federation.wire import Rejected, TensorSpec
from coterie.rows import Rows
from coterie.simulation.exchange import Exchange, Request
from coterie.simulation.simulation import Simulation

ANSWERS = "answers"
"""What the names of tensors begin with that say how a node's samples were answered; then the split, and the model."""
EVALUATE = "evaluate"
"""The purpose under which models travel for evaluation alone."""
WELCOME = "adapt"
"""The purpose of the first round of a node that joins late."""
GLOBAL = "global"
LAST = "message"
_SHORT = 64


@dataclass(frozen=True)
class Seen:
    """One tensor that crossed the wire.

    Parameters
    ----------
    purpose
        What for: ``"round"``, ``"personalise"`` or ``"evaluate"``, or ``"adapt"`` with the number of the exchange.
    task
        The task that was asked for; for evaluation, ``"message"``, ``"global"`` or the model's name.
    up
        Whether it went from a node to the server.
    name
        The tensor's name.
    what
        Its shape and type, without a client axis.
    same
        Whether all nodes got the same.
    """

    purpose: str
    task: str
    up: bool
    name: str
    what: TensorSpec
    same: bool


class _Watched:
    """Notes what crosses an exchange."""

    def __init__(self, inner: Exchange) -> None:
        self.inner = inner
        self.seen: dict[Seen, None] = {}  # in the order in which they were first seen

    def deliver(self, request: Request) -> Replies:
        purpose, task = kind_of(request.call), request.task
        self.note_message(purpose, task, request.message)
        replies = self.inner.deliver(request)
        for name, value in replies.rows.items():
            self.note(purpose, task, name, value[0], up=True)
        return replies

    def note_message(self, purpose: str, task: str, message: Message) -> None:
        for rows, same in ((message.shared, True), (message.each, False)):
            for name, value in rows.items():
                self.note(purpose, task, name, value if same else value[0], same=same)

    def note(self, purpose: str, task: str, name: str, value: Tensor, *, up: bool = False, same: bool = False) -> None:
        self.seen.setdefault(Seen(purpose, task, up, name, TensorSpec.of(value), same))


def kind_of(call: Call) -> str:
    """Say what an exchange is for; those of a newcomer's first round differ from one another in what they send."""
    return f"{WELCOME} {call.exchange}" if call.purpose == WELCOME else call.purpose


Limit = Callable[[Engine], contextlib.AbstractContextManager[None]]
"""Gives a context in which an engine computes no longer than it may."""


def _unlimited(engine: Engine) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def observe(
    config: ExperimentConfig,
    agreement: Agreement,
    rounds: int = 2,
    members: int | None = None,
    limit: Limit = _unlimited,
) -> list[Seen]:
    """Play a method on blank samples and give what crossed the wire, in order, each once.

    Two rounds, because the second may send what the first cannot. With ``members``, only so many take part, where the
    method's settings allow it: memory for a model of each is needed, and sides that count members are not told apart
    by :func:`check_message`. Within ``limit`` the method is played: settings may ask for a great deal.
    """
    if members is not None and members < len(agreement.members):
        fewer = agreement.model_copy(update={"members": agreement.members[:members]})
        try:
            return _observed(config.model_copy(update={"clients": members}), fewer, rounds, limit)
        except CoterieError:  # such as a robust mean that needs more
            pass
    return _observed(config, agreement, rounds, limit)


def _observed(
    config: ExperimentConfig,
    agreement: Agreement,
    rounds: int,
    limit: Limit,
) -> list[Seen]:
    count = len(agreement.members)
    population = blank_population(agreement, {split: [2] * count for split in ("train", "validation", "test")})
    everyone, engine = population.roles.trainers, engine_of(config, population)
    engine.most_passes = 1  # what is sent does not hang on how long they train
    simulation = Simulation(
        registry.make(config.algorithm, config.settings),
        engine,
        fresh=lambda client: fresh_row(config, agreement, client),
        members=everyone,
        keep="disk",  # a large model of each member's: nobody's memory has to hold them for the sake of their shapes
        local=config.local_patterns,
    )
    simulation.exchange = watched = _Watched(simulation.exchange)
    algorithm = simulation.algorithm
    with limit(engine):
        for number in range(1, rounds + 1):
            simulation.play_round(everyone, number)
            watched.note_message(EVALUATE, LAST, simulation.last_message(everyone, number))
            for name, value in (algorithm.global_model(simulation.server) or {}).items():
                watched.note(EVALUATE, GLOBAL, name, value, same=True)
            for model, own in algorithm.other_models(simulation.server).items():
                for name, value in own.items():
                    watched.note(EVALUATE, model, name, value[0])
        if algorithm.settles:
            simulation.adapt(everyone[-1:], rounds, 1)
    return list(watched.seen)


def check_message(tensors: Rows, seen: list[Seen], purpose: str, task: str, clients: int) -> None:
    """See that the names, types and shapes of a message to a node are what its method sends; else it is ``Rejected``.

    Sides shorter than the number of ``clients`` count clients or trial steps, and vary from round to round.
    """
    expected = {each.name: each.what for each in seen if (each.purpose, each.task, each.up) == (purpose, task, False)}
    if tensors.keys() != expected.keys():
        raise Rejected(f"it holds {sorted(tensors)}, but {purpose} {task!r} must hold {sorted(expected)}")
    short = max(_SHORT, clients)
    for name, what in expected.items():
        found = TensorSpec.of(tensors[name])
        fits = found.dtype == what.dtype and len(found.shape) == len(what.shape)
        sides = zip(found.shape, what.shape, strict=False)
        if not fits or not all(side == wanted or max(side, wanted) <= short for side, wanted in sides):
            raise Rejected(f"{name!r} is {found}, but must be {what}")
