"""An engine that has what it is asked answered elsewhere, together with what other runs ask."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor

from coterie.algorithms.base import Net, Task
from coterie.compute.batched import BatchedEngine
from coterie.compute.engine import Call, Engine, Predict
from coterie.compute.finiteness import Finiteness
from coterie.compute.joint.asks import PredictAsk, TaskAnswer, TaskAsk
from coterie.compute.samples import Split
from coterie.rows import Rows


class GuestEngine(Engine):
    """A run's engine among others.

    Parameters
    ----------
    own
        The engine that the run would have alone.
    ask
        Gives what an ask is answered with.
    """

    name = BatchedEngine.name

    def __init__(self, own: BatchedEngine, ask: Callable[[TaskAsk | PredictAsk], Any]) -> None:
        super().__init__(own.problem, own.samples, own.seed)
        self._own, self._ask = own, ask
        self._last: Finiteness | None = None

    @property
    def net(self) -> Net:
        """The model."""
        return self._own.net

    @property
    def choices(self) -> dict[str, Any]:
        """What the run would have chosen alone, as it may be resumed."""
        return self._own.choices

    def rounding(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a GPU rounds products as the engine was configured to."""
        return self._own.rounding()

    def run(self, task: Task, clients: Tensor, state: Rows, message: Rows, call: Call) -> tuple[Rows, Rows]:
        """Have a task run."""
        found: TaskAnswer = self._ask(TaskAsk(0, task, clients, state, message, call))
        self._last = found.finite
        return found.changes, found.reply

    @property
    def unsettled(self) -> list[Finiteness]:
        """What :meth:`examine` has put off, and nobody has looked at."""
        return [finite for finite, _ in self._put_off if finite.total is not None]

    def examine(self, look_closely: Callable[[], None]) -> None:
        """Put off the look at what was computed together with others: the device is asked for all of it at once."""
        if self._last is None:
            look_closely()
        else:
            self._put_off.append((self._last, look_closely))

    def predict(self, predict: Predict, rows: Rows, clients: Tensor, split: Split, shared: bool = False) -> Tensor:
        """Have each client's model applied to its own samples."""
        return self.predict_all(predict, rows, clients, (split,), shared)[0]

    def predict_all(
        self, predict: Predict, rows: Rows, clients: Tensor, splits: tuple[Split, ...], shared: bool = False
    ) -> list[Tensor]:
        """Have each client's model applied to its own samples of several splits."""
        outputs: list[Tensor] = self._ask(PredictAsk(0, predict, rows, clients, splits, shared))
        return outputs
