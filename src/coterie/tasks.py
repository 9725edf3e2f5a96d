"""The tasks that can be learnt, and all that follows from a task: its loss, its usual metric, a model's outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

TaskName = Literal["multiclass", "binary", "regression"]
"""What is to be predicted: one of many classes, one of two, or a number."""


@dataclass(frozen=True)
class TaskFacts:
    """What follows from a task.

    ``loss`` and ``metric`` are what is used where the configuration names no other; ``fixed_classes`` is how many
    classes there must be, ``None`` for two or more.
    """

    loss: str
    metric: str
    fixed_classes: int | None

    def allows(self, classes: int) -> bool:
        """Say whether there may be so many classes."""
        return classes >= 2 if self.fixed_classes is None else classes == self.fixed_classes

    def outputs(self, classes: int) -> int:
        """Say how many outputs a model needs: one for each of many classes, else one."""
        return classes if self.fixed_classes is None else 1


TASKS: Mapping[str, TaskFacts] = {
    "multiclass": TaskFacts("cross_entropy", "accuracy", None),
    "binary": TaskFacts("binary", "accuracy", 2),
    "regression": TaskFacts("squared_error", "rmse", 0),
}
"""The tasks by name."""
