"""The tasks that can be learnt, and all that follows from a task: its loss, its usual metric, a model's outputs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

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

BALANCED = "balanced"


def written_weights(value: Any) -> Any:
    """Write weights by class as a text, ``no=1.0,yes=3.0``, which :func:`read_weights` reads; a text stays as it is."""
    if not isinstance(value, Mapping):
        return value
    names = [str(name) for name in value]
    if any("," in name or "=" in name or name.startswith("{") for name in names):
        return json.dumps(dict(zip(names, value.values(), strict=True)), ensure_ascii=False)
    return ",".join(f"{name}={weight}" for name, weight in zip(names, value.values(), strict=True))


def read_weights(text: str) -> dict[str, float]:
    """Read weights by class; anything else is a ``ValueError`` that says what is allowed."""
    try:
        pairs = json.loads(text) if text.startswith("{") else dict(part.rsplit("=", 1) for part in text.split(","))
        weights = {str(name).strip(): float(weight) for name, weight in pairs.items()}
    except (ValueError, TypeError, AttributeError):
        weights = {}
    if not weights or not all(0 < weight < math.inf for weight in weights.values()):
        raise ValueError(f"class_weights is {text!r}, but must be {BALANCED}, or positive weights as in no=1,yes=3")
    return weights
