r"""Grouped clients with a known structure: within a group they agree, between groups they do not.

Every group g has a teacher :math:`T_g`, a random linear map (or a network of one hidden layer) from features to scores;
client i of the group labels its own inputs with a teacher close to it,

.. math::

   x \sim N(0, I), \qquad T_i = \sqrt{1 - v}\, T_{g(i)} + \sqrt{v}\, E_i, \qquad
   y = \arg\max_c\, \bigl(T_i(x) + \sigma \varepsilon\bigr)_c,

with :math:`E_i` drawn like a teacher. All clients see the same inputs' law, so nothing but the labelling tells groups
apart: with few samples a client gains from its own group, and a model for all groups must contradict itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, model_validator

from coterie.data.dataset import Dataset, Source
from coterie.errors import DataError
from coterie.memory import free_memory
from coterie.randomness import stream
from coterie.tasks import TASKS, TaskName
from coterie.units import format_bytes

Array = npt.NDArray[np.float64]


class Synthetic(Source):
    """Grouped synthetic clients whose groups are known: collaborating helps within a group and hurts across."""

    name: ClassVar[str] = "synthetic"
    how_many: ClassVar[str] = "1,800 (30 clients of 60, unless set)"
    shape: ClassVar[str] = "20 (unless set)"
    class_count: ClassVar[str] = "4 (unless set)"
    obtained: ClassVar[str] = "built in"
    citation: ClassVar[str] = "none: drawn by Coterie, a function of the seed"

    clients: int = Field(30, ge=1, description="natural clients")
    groups: int = Field(3, ge=1, description="groups of clients, in order and as equal as can be")
    samples: int = Field(60, ge=2, description="samples of each client")
    features: int = Field(20, ge=1, description="length of an input")
    classes: int = Field(4, ge=2, description="classes (multiclass only)")
    noise: float = Field(0.1, ge=0, description="standard deviation of the noise on the teacher's scores, which have 1")
    variation: float = Field(0.05, ge=0, le=1, description="share of a client's teacher that is its own")
    hidden: int = Field(0, ge=0, description="width of the teachers' hidden layer; 0 for linear teachers")
    task: TaskName = Field("multiclass", description="what is to be predicted")

    @model_validator(mode="after")
    def _groups_have_clients(self) -> Self:
        if self.groups > self.clients:
            raise ValueError(f"groups is {self.groups}, but there are only {self.clients} clients")
        return self

    def load(self, folder: Path, seed: int) -> Dataset:
        """Draw the clients."""
        # At once, for they are drawn one by one; each client's samples are there twice before they are put together.
        size, room = self.clients * self.samples * (4 * self.features + 8), free_memory()
        if 2 * size > room:
            raise DataError(
                f"clients={self.clients}, samples={self.samples} and features={self.features} of 'synthetic' are "
                f"{format_bytes(size)}, more than half of the {format_bytes(room)} of memory that are free: use fewer"
            )
        group = np.arange(self.clients) * self.groups // self.clients
        outputs = TASKS[self.task].outputs(self.classes)
        teachers = [self._teacher(outputs, seed, "synthetic: group", g) for g in range(self.groups)]
        inputs, targets = [], []
        for client in range(self.clients):
            own = self._teacher(outputs, seed, "synthetic: client", client)
            teacher = [
                np.sqrt(1 - self.variation) * shared + np.sqrt(self.variation) * extra
                for shared, extra in zip(teachers[group[client]], own, strict=True)
            ]
            draw = stream(seed, "synthetic: samples", client=client)
            points = draw.standard_normal((self.samples, self.features))
            scores = self._scores(teacher, points) + self.noise * draw.standard_normal((self.samples, outputs))
            inputs.append(points.astype(np.float32))
            targets.append(self._labels(scores))
        x, y = torch.from_numpy(np.concatenate(inputs)), torch.from_numpy(np.concatenate(targets))
        fixed = TASKS[self.task].fixed_classes
        names = self.classes if fixed is None else fixed
        return Dataset(
            name=self.text(),
            x=x,
            y=y,
            train_count=len(x),
            task=self.task,
            classes=tuple(map(str, range(names))),
            mean=(0.0,),
            std=(1.0,),
            owner=torch.arange(self.clients).repeat_interleave(self.samples),
            groups=torch.from_numpy(group),
        )

    def _teacher(self, outputs: int, seed: int, purpose: str, number: int) -> list[Array]:
        draw = stream(seed, purpose, client=number)
        if not self.hidden:
            return [draw.standard_normal((self.features, outputs)) / np.sqrt(self.features)]
        first = draw.standard_normal((self.features, self.hidden)) / np.sqrt(self.features)
        return [first, draw.standard_normal((self.hidden, outputs)) * np.sqrt(2 / self.hidden)]

    def _scores(self, teacher: list[Array], x: Array) -> Array:
        # Layers are scaled so that scores have about unit variance whatever the widths.
        scores: Array = x @ teacher[0] if len(teacher) == 1 else np.maximum(x @ teacher[0], 0) @ teacher[1]
        return scores

    def _labels(self, scores: Array) -> npt.NDArray[Any]:
        if self.task == "regression":
            return scores[:, 0].astype(np.float32)
        labels = scores[:, 0] > 0 if self.task == "binary" else scores.argmax(1)
        return labels.astype(np.int64)
