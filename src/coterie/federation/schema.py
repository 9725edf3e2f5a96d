"""What a method sends, found by playing it on blank samples and looking at its messages.

No table is kept by hand: nodes check messages against what was observed here, and the table of what crosses the wire is
made of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.algorithms import registry
from coterie.algorithms.base import Ask, Cohort, Replies
from coterie.compute.engine import Call
from coterie.config import ExperimentConfig
from coterie.federation.agreement import Agreement
from coterie.federation.party_data import blank_population, engine_of, fresh_row
from coterie.federation.wire import Rejected, TensorSpec
from coterie.rows import Rows
from coterie.simulation.simulation import Simulation, play

EVALUATE = "evaluate"
"""The purpose under which models travel for evaluation alone."""
GLOBAL = "global"
LAST = "message"
_SHORT = 64


@dataclass(frozen=True)
class Seen:
    """One tensor that crossed the wire.

    Parameters
    ----------
    purpose
        What for: ``"round"``, ``"personalise"`` or ``"evaluate"``.
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


class _Watched(Simulation):
    """A simulation that writes down what crosses the wire."""

    seen: dict[Seen, None]

    def _deliver(self, ask: Ask, cohort: Cohort, call: Call) -> Replies:
        for rows, same in ((ask.message.shared, True), (ask.message.each, False)):
            for name, value in rows.items():
                self.note(call.purpose, ask.task, name, value if same else value[0], same=same)
        replies = super()._deliver(ask, cohort, call)
        for name, value in replies.rows.items():
            self.note(call.purpose, ask.task, name, value[0], up=True)
        return replies

    def note(self, purpose: str, task: str, name: str, value: Tensor, *, up: bool = False, same: bool = False) -> None:
        self.seen.setdefault(Seen(purpose, task, up, name, TensorSpec.of(value), same))


def observe(config: ExperimentConfig, agreement: Agreement, rounds: int = 2) -> list[Seen]:
    """Play a method on blank samples and note what it sends.

    Parameters
    ----------
    config
        The run's configuration.
    agreement
        What a sample is, and how many members there are.
    rounds
        Rounds to play: the second may send what the first cannot.

    Returns
    -------
    list of Seen
        What crossed the wire, in order, each once.
    """
    count = len(agreement.members)
    population = blank_population(agreement, {split: [2] * count for split in ("train", "validation", "test")})
    watched = _Watched(
        registry.make(config.algorithm, config.settings),
        engine_of(config, population),
        fresh=lambda client: fresh_row(config, agreement, client),
        members=population.roles.trainers,
    )
    watched.seen = {}
    everyone = population.roles.trainers
    for number in range(1, rounds + 1):
        watched.play_round(everyone, number)
        cohort = watched.cohort(everyone, number)
        last = play(watched.algorithm.personalise(watched.server, cohort), watched.exchange(cohort, "personalise"))
        watched.rollback()
        for rows, same in ((last.shared, True), (last.each, False)):
            for name, value in rows.items():
                watched.note(EVALUATE, LAST, name, value if same else value[0], same=same)
        for name, value in (watched.algorithm.global_model(watched.server) or {}).items():
            watched.note(EVALUATE, GLOBAL, name, value, same=True)
        for model, own in watched.algorithm.other_models(watched.server).items():
            for name, value in own.items():
                watched.note(EVALUATE, model, name, value[0])
    return list(watched.seen)


def check_message(tensors: Rows, seen: list[Seen], purpose: str, task: str, clients: int) -> None:
    """See that a message to a node is one that its method sends.

    Parameters
    ----------
    tensors
        What came, without a client axis.
    seen
        What the method sends.
    purpose
        What the message is for.
    task
        The task that is asked for.
    clients
        Members of the federation: short sides count clients or trial steps, and vary from round to round.

    Raises
    ------
    Rejected
        If names, types or shapes differ.
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
