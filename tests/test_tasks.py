"""The table of tasks agrees with the losses and metrics that it names."""

from __future__ import annotations

from typing import get_args

import pytest

from coterie.evaluation import metrics
from coterie.models.problem import LOSSES
from coterie.tasks import TASKS, TaskName


def test_every_name_is_in_the_table() -> None:
    assert tuple(TASKS) == get_args(TaskName)


@pytest.mark.parametrize("name", TASKS)
def test_a_task_has_a_loss_and_a_metric_that_fit(name: str) -> None:
    task = TASKS[name]
    assert task.loss in LOSSES
    assert metrics.names(name)[0] == task.metric and name in metrics.get(task.metric).tasks
    assert metrics.usual(task.metric) == task.metric


@pytest.mark.parametrize(
    ("name", "classes", "allowed", "outputs"),
    [
        ("multiclass", 1, False, 1),
        ("multiclass", 2, True, 2),
        ("multiclass", 10, True, 10),
        ("binary", 2, True, 1),
        ("binary", 3, False, 1),
        ("regression", 0, True, 1),
        ("regression", 2, False, 1),
    ],
)
def test_classes_and_outputs(name: str, classes: int, allowed: bool, outputs: int) -> None:
    assert TASKS[name].allows(classes) is allowed and TASKS[name].outputs(classes) == outputs
