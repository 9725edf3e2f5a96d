"""What replies must look like, found by running their tasks on blank samples."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from coterie.algorithms.base import Task
from coterie.compute.engine import Call, Engine
from coterie.compute.loop import LoopEngine
from coterie.compute.samples import Samples
from coterie.federation.agreement import Agreement
from coterie.federation.party_data import blank_population
from coterie.federation.wire import TensorSpec
from coterie.rows import Rows

_MOST = 256  # of messages of different shapes that are remembered


class ReplySchema:
    """The names, shapes and types of replies, whatever samples they are made of.

    Parameters
    ----------
    engine
        Runs tasks on blank samples.
    tasks
        The method's.
    state
        Any client's state, one row for each name: only its shapes matter.

    Attributes
    ----------
    longest
        How many numbers the longest row of the state has.
    """

    def __init__(self, engine: Engine, tasks: Mapping[str, Task], state: Rows) -> None:
        self._engine, self.tasks, self._state = engine, tasks, state
        self.longest = max((value.shape[-1] for value in state.values() if value.ndim > 1), default=0)
        self._known: dict[object, dict[str, TensorSpec]] = {}

    def of(self, task: str, message: Rows, call: Call) -> dict[str, TensorSpec]:
        """Give what the reply of a task to a message like this one looks like."""
        key = (task, tuple((name, TensorSpec.of(value)) for name, value in message.items()))
        if key not in self._known:
            rows = {name: value.unsqueeze(0) for name, value in message.items()}
            state = {name: value.clone() for name, value in self._state.items()}
            with torch.no_grad():
                _, reply = self._engine.run(self.tasks[task], torch.tensor([0]), state, rows, call)
            if len(self._known) >= _MOST:
                self._known.clear()
            self._known[key] = {name: TensorSpec.of(value[0]) for name, value in reply.items()}
        return self._known[key]


def blank_engine(engine: Engine, agreement: Agreement) -> LoopEngine:
    """Give an engine for the same model in which each client has two blank samples of each split."""
    # Two and not one: of a single value a BatchNorm layer has no variance.
    count = len(agreement.members)
    blank = blank_population(agreement, {split: [2] * count for split in ("train", "validation", "test")})
    samples = Samples.of(
        blank.dataset, blank.shares, seed=engine.seed, dtype=engine.samples.dtype, device=engine.device
    )
    made = LoopEngine(engine.problem, samples, engine.seed)
    made.most_passes = 1  # what is sent does not hang on how long they train
    return made
