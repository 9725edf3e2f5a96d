"""What a node keeps in memory of a run, so that a message finds its model, engine and samples ready."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from coterie.algorithms import registry
from coterie.algorithms.base import Minibatches, Task
from coterie.compute.engine import Engine, go_on
from coterie.config import ExperimentConfig
from coterie.errors import ConfigError
from coterie.federation.agreement import Agreement
from coterie.federation.party_data import make_simulation
from coterie.federation.reply_schema import ReplySchema, blank_engine
from coterie.federation.schema import Seen, observe
from coterie.federation.wire import Rejected
from coterie.rows import Rows
from coterie.rows.placement import Placement
from coterie.runs.builder import Population
from coterie.simulation.client_states import ClientStates
from coterie.simulation.exchange import LocalExchange
from coterie.simulation.simulation import Simulation

_OBSERVED_MEMBERS, _MOST_OBSERVED = 2, 16


@dataclass(frozen=True)
class Means:
    """What a silo computes with, and how much of it a message may ask for; its own choice, in ``node.yaml``.

    Parameters
    ----------
    engine, device, threads
        As of a simulation; ``None`` for the threads that were agreed on.
    max_epochs, max_steps
        The most of either that a pass over data may have.
    max_seconds
        After which a task is given up.
    allow
        What ``federation.yaml`` may name as ``import:...``, word for word.
    tell_answers
        Whether to tell how each validation and test sample was answered after the last round.
    """

    engine: Literal["loop", "batched"] = "loop"
    device: str = "cpu"
    threads: int | None = None
    max_epochs: int = 1000
    max_steps: int = 1_000_000
    max_seconds: float = 3600.0
    allow: tuple[str, ...] = ()
    tell_answers: bool = False

    def applied(self, config: ExperimentConfig) -> ExperimentConfig:
        """Give the same experiment, computed with these means."""
        threads = self.threads or config.threads
        changes = {"engine": self.engine, "device": self.device, "threads": threads}
        return ExperimentConfig.model_validate(config.model_dump() | changes)

    def check(self, task: Task) -> None:
        """Reject a task that asks for more than is allowed, all its folds together."""
        epochs = steps = 0
        for over in (fold.over for fold in task.folds()):
            if isinstance(over, Minibatches) and over.steps is None:
                epochs += over.repeats * (over.epochs if isinstance(over.epochs, int) else max(over.epochs))
            elif isinstance(over, Minibatches):
                steps += over.repeats * (over.steps or 0) * over.draws
        for asked, name, most in ((epochs, "epochs", self.max_epochs), (steps, "steps", self.max_steps)):
            if asked > most:
                raise Rejected(f"it asks for {asked} {name}, but the node's node.yaml allows max_{name}: {most}")


@contextlib.contextmanager
def limited(engine: Engine, seconds: float) -> Iterator[None]:
    """Give up what an engine computes after some seconds, between two steps."""
    until = time.monotonic() + seconds

    def look() -> None:
        if time.monotonic() > until:
            raise Rejected(f"its task took longer than the {seconds:g} s of max_seconds in node.yaml")

    engine.before_step = look
    try:
        yield
    finally:
        engine.before_step = go_on


@dataclass
class Resident:
    """One configuration of a run, put together.

    Parameters
    ----------
    config
        The experiment, as this node computes it.
    simulation
        The method with its engine on the node's own samples; no client's state is in it.
    begin
        The node's state before its first round: a row for each name.
    seen
        What the method sends.
    agreement
        What all parties agreed on.
    """

    config: ExperimentConfig
    simulation: Simulation
    begin: Rows
    seen: list[Seen]
    agreement: Agreement

    @functools.cached_property
    def replies(self) -> ReplySchema:
        """What the node's replies look like, whatever its samples are."""
        engine = blank_engine(self.simulation.engine, self.agreement)
        return ReplySchema(engine, self.simulation.tasks, self.begin)


class Residents:
    """The configurations that a node has in memory: those that were asked for last.

    Parameters
    ----------
    agreement
        What all parties agreed on.
    client
        The node's number in the roster.
    means
        What it computes with.
    scratch
        Folder for what does not have to be in memory while one is made.
    most
        How many are kept.
    """

    def __init__(self, agreement: Agreement, client: int, means: Means, scratch: Path, most: int = 2) -> None:
        self._agreement, self._client, self._means = agreement, client, means
        self._scratch, self._most = scratch, most
        self._seen: OrderedDict[str, list[Seen]] = OrderedDict()
        self._kept: OrderedDict[tuple[str, str, tuple[int, ...] | None], Resident] = OrderedDict()

    def get(self, run: str, config: ExperimentConfig, population: Population, sizes: list[int] | None) -> Resident:
        """Give what is kept of a run in this configuration; ``sizes`` are everybody's, where the server told them."""
        key = (run, config.model_dump_json(), None if sizes is None else tuple(sizes))
        if key not in self._kept:
            while len(self._kept) >= self._most:  # before the next is made: there may not be room for both
                self._kept.popitem(last=False)
            self._kept[key] = self._make(config, population, sizes)
        self._kept.move_to_end(key)
        return self._kept[key]

    def observed(self, config: ExperimentConfig) -> list[Seen]:
        """Give what a method sends; found out once, unless it asks for more than is allowed."""
        key = config.model_dump_json()
        if key not in self._seen:
            for task in registry.make(config.algorithm, config.settings).tasks().values():
                self._means.check(task)
            while len(self._seen) >= _MOST_OBSERVED:
                self._seen.popitem(last=False)
            seconds = self._means.max_seconds
            self._seen[key] = observe(
                config, self._agreement, members=_OBSERVED_MEMBERS, limit=lambda engine: limited(engine, seconds)
            )
        return self._seen[key]

    def _make(self, config: ExperimentConfig, population: Population, sizes: list[int] | None) -> Resident:
        own, seen = self._means.applied(config), self.observed(config)
        self._scratch.mkdir(parents=True, exist_ok=True)
        simulation = make_simulation(own, self._agreement, population, sizes, self._scratch)
        mine = torch.tensor([self._client])
        start = simulation.engine.problem.start
        begin = {name: _same(value.cpu(), start) for name, value in simulation.clients.gather(mine).items()}
        # What the node has is on its disk, and what the others have is not its business.
        simulation.clients, simulation.server = ClientStates({}), {}
        simulation.placement = Placement("device", simulation.engine.device)
        simulation.exchange = LocalExchange(
            simulation.algorithm.title, simulation.engine, simulation.tasks, simulation.clients, simulation.placement
        )
        return Resident(own, simulation, begin, seen, self._agreement)


def _same(row: Tensor, start: Tensor) -> Tensor:
    """Give the model's own first row where a client's is no other: it is in memory already."""
    known = start.to(row.device).unsqueeze(0)
    return known if row.shape == known.shape and row.dtype == known.dtype and torch.equal(row, known) else row


def check_code(agreement: Agreement, means: Means) -> None:
    """Refuse an agreement that names code which the silo has not allowed in its own ``node.yaml``."""
    methods = [("method", spec) for spec in agreement.algorithms]
    for what, spec in (("model", agreement.model), ("loss", agreement.loss), *methods):
        if spec is not None and spec.startswith("import:") and spec not in means.allow:
            raise ConfigError(
                f"federation.yaml has the {what} {spec!r}, which is code that the node would run: read it, and put "
                f"that text into `allow` of node.yaml if it may"
            )
