"""The tasks of several runs as one: each begins and ends its own rows, and the steps between are taken together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms.base import Batch, ClientContext, Fold, Task
from coterie.algorithms.contract import check_rows
from coterie.compute._cache import Identity
from coterie.compute.engine import join, take
from coterie.rows import Rows
from coterie.rows.host_copies import to_device

_COLUMN = "number of its own: "  # before the names of working rows that no task has

Path = tuple[str, ...]
"""A field of a task, or of a part of it: ``("optimiser", "momentum")``."""


def signature(part: Any, whole: bool = False, outside: Sequence[str] = ()) -> Hashable:
    """Give what two tasks must have in common for their steps to be taken together, or with ``whole`` to be the same.

    The first is everything but the fields that no step looks at, and the numbers that a step takes row by row, of which
    it must only be the same whether they are 0. What cannot be compared has nothing in common with anything else.
    ``outside`` names fields of a part of a task that no step of the task looks at.
    """
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        names, per_row = ((), ()) if whole else ((*_own(part, "outside_steps"), *outside), _own(part, "per_row"))
        return type(part), tuple(
            (field.name, bool(value) if field.name in per_row else signature(value, whole, _within(names, field.name)))
            for field in dataclasses.fields(part)
            for value in (getattr(part, field.name),)
            if field.name not in names
        )
    if part is None or isinstance(part, bool | int | float | str):
        return type(part), part
    if isinstance(part, tuple):
        return tuple, tuple(signature(each, whole) for each in part)
    return Identity(part)


def _within(names: Sequence[str], part: str) -> tuple[str, ...]:
    """Give what names such as ``data.epochs`` say of one part."""
    return tuple(name.removeprefix(f"{part}.") for name in names if name.startswith(f"{part}."))


def _own(part: Any, name: str) -> tuple[str, ...]:
    # A class that extends another may use its fields otherwise.
    found: tuple[str, ...] = vars(type(part)).get(name, ())
    return found


def numbers_of(part: Any) -> dict[Path, float]:
    """Give the numbers that a step takes row by row."""
    found: dict[Path, float] = {}
    per_row = _own(part, "per_row")
    for field in dataclasses.fields(part) if dataclasses.is_dataclass(part) else ():
        value = getattr(part, field.name)
        if field.name in per_row:
            found[(field.name,)] = value
        elif dataclasses.is_dataclass(value):
            found |= {(field.name, *path): number for path, number in numbers_of(value).items()}
    return found


def _with(part: Any, values: Mapping[Path, Any]) -> Any:
    """Give a task with other values in some fields of it and of its parts."""
    heads: dict[str, dict[Path, Any]] = {}
    for (head, *rest), value in values.items():
        heads.setdefault(head, {})[tuple(rest)] = value
    changed = {name: found[()] if () in found else _with(getattr(part, name), found) for name, found in heads.items()}
    return dataclasses.replace(part, **changed)


@dataclasses.dataclass(frozen=True)
class JointContext(ClientContext):
    """What the clients of several runs know about themselves, each run's by itself.

    Parameters
    ----------
    parts
        Gives of each run that has rows here its place among those that asked, the places of its rows, and its own
        context.
    """

    parts: Callable[[], list[tuple[int, Tensor, ClientContext]]]


class JointTask(Task):
    """Tasks of one :func:`signature`, whose steps are taken together.

    Its rows are working rows: the tasks have started before, and finish afterwards.

    Parameters
    ----------
    tasks
        The task of each run.
    """

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = tuple(tasks)
        numbers = [numbers_of(task) for task in tasks]
        self._varied = [path for path in numbers[0] if len({each[path] for each in numbers}) > 1]
        self._columns = {_COLUMN + " ".join(path): [each[path] for each in numbers] for path in self._varied}

    def columns(self, counts: Sequence[int], device: torch.device) -> Rows:
        """Give the working rows that hold each row's own numbers, for runs with so many rows each."""
        repeats = torch.tensor(counts)
        return {
            name: to_device(torch.tensor(values, dtype=torch.float64).repeat_interleave(repeats).unsqueeze(1), device)
            for name, values in self._columns.items()
        }

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Give the rows that were started."""
        return dict(state)

    def folds(self) -> tuple[Fold, ...]:
        """Make the passes that all of them make."""
        folds = self._tasks[0].folds()
        return tuple(
            Fold(fold.over, self._step(number, fold), None if fold.then is None else self._followed(number))
            for number, fold in enumerate(folds)
        )

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """Give the rows, which their tasks finish."""
        return {name: value for name, value in work.items() if name not in self._columns}, {}

    def _step(self, number: int, fold: Fold) -> Callable[..., Rows]:
        if not self._varied:
            return fold.step

        def step(work: Rows, *batches: Batch) -> Rows:
            work, columns = self._apart(work)
            own = dict(zip(self._varied, columns.values(), strict=True))
            task: Task = _with(self._tasks[0], own)
            return task.folds()[number].step(work, *batches) | columns

        return step

    def _followed(self, number: int) -> Callable[[ClientContext, Rows], Rows]:
        def then(context: ClientContext, work: Rows) -> Rows:
            assert isinstance(context, JointContext)
            work, columns = self._apart(work)
            parts = context.parts()
            done = []
            for ask, places, own in parts:
                follow = self._tasks[ask].folds()[number].then
                assert follow is not None
                done.append(follow(own, take(work, places)))
                check_rows("what then gives", done[-1], len(places))
            back = torch.argsort(torch.cat([places for _, places, _ in parts]))
            return take(join(done), back) | columns

        return then

    def _apart(self, work: Rows) -> tuple[Rows, dict[str, Tensor]]:
        columns = {name: work[name] for name in self._columns}
        return {name: value for name, value in work.items() if name not in columns}, columns
