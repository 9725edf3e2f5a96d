"""What a run asks of the engine, as values: its place among the runs, and the arguments of the engine's method."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from coterie.algorithms.base import Task
from coterie.compute.engine import Call, Predict
from coterie.compute.finiteness import Finiteness
from coterie.compute.samples import Split
from coterie.rows import Rows


@dataclass(frozen=True)
class TaskAsk:
    """A run's call of :meth:`~coterie.compute.engine.Engine.run`."""

    run: int
    task: Task
    clients: Tensor
    state: Rows
    message: Rows
    call: Call


@dataclass(frozen=True)
class TaskAnswer:
    """What a run is answered: what changes, the replies, and whether all that were computed together are finite."""

    changes: Rows
    reply: Rows
    finite: Finiteness | None = None


@dataclass(frozen=True)
class OutputsAsk:
    """Models of a run that are applied to all samples of its clients in some splits: one for each, or one for all."""

    run: int
    rows: Rows
    clients: Tensor
    splits: tuple[Split, ...]
    shared: bool


@dataclass(frozen=True)
class PredictAsk:
    """A run's call of :meth:`~coterie.compute.engine.Engine.predict_all`."""

    run: int
    predict: Predict
    rows: Rows
    clients: Tensor
    splits: tuple[Split, ...]
    shared: bool
