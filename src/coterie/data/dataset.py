"""What every data set becomes: two tensors held once, and what is known about them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from coterie.errors import DataError
from coterie.options import Parameter, Spec
from coterie.tasks import TASKS

_INPUTS = (torch.uint8, torch.float32, torch.int64)

GapFilling = Literal["", "mean", "median", "zero"]
"""What a gap (NaN) in a column is filled with; empty for a column that has none."""


@dataclass(frozen=True)
class Preparation:
    """What is done to inputs with statistics that are taken from training samples, once it is known who has which.

    Parameters
    ----------
    scaled
        Of each entry of axis 1 of the inputs, whether it is brought to mean 0 and deviation 1.
    gaps
        Of each, what gaps (NaN) are filled with, before that; empty if there are none anywhere.
    bounds
        Of each, between which values those lie that count where statistics are told with noise; ``None`` where nobody
        said, empty if nowhere.
    """

    scaled: tuple[bool, ...]
    gaps: tuple[GapFilling, ...] = ()
    bounds: tuple[tuple[float, float] | None, ...] = ()


@dataclass(frozen=True, eq=False)
class Dataset:
    """Samples, labels, and what is known about them; held once and indexed, never copied for a client.

    Parameters
    ----------
    name
        The name it was loaded under, with the options that are not the default.
    x
        Inputs ``[N, *shape]``: uint8 images as stored, float32, or int64 numbers of words, which reach a model as they
        are.
    y
        Class numbers ``[N]`` (int64), or float32 targets when the task is regression.
    train_count
        The number of samples, from the first on, that are the official training set; the rest are the official test
        set. N if there is no test set.
    task
        ``"multiclass"``, ``"binary"`` or ``"regression"``.
    classes
        The classes' names; empty for regression.
    mean
        Subtracted when samples are gathered, one value or one for each entry of axis 1 of ``x``.
    std
        Standard deviations by which the result is divided, of the same length.
    owner
        The natural client of each sample (writer, client column, synthetic client), ``[N]``, where there is one.
    groups
        The known group of each natural client, where there is one.
    superclasses
        The super-class of each class, where the classes have any; ``groups`` partitions keep them together.
    features
        The names of a table's columns as they are in ``x``: a number's column by its name, a text's as ``name=text``.
    owner_names
        The natural clients' names, where they have any: ``owner`` counts them from 0.
    fill
        What stands in place of a gap (NaN), one for each entry of axis 1 of ``x``; empty if there are no gaps.
    preparation
        What ``mean``, ``std`` and ``fill`` are statistics of; a run takes them anew, from its training samples. Without
        one they are constants.
    columns
        What a table's columns are, by name and in their order, as in its schema: what makes ``x`` of new rows.
    test_apart
        Whether natural clients are tested on their own samples of the official test set, and on no others. Otherwise
        official training and test samples are dealt out together.
    """

    name: str
    x: Tensor = field(repr=False)
    y: Tensor = field(repr=False)
    train_count: int
    task: str
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    owner: Tensor | None = field(default=None, repr=False)
    groups: Tensor | None = field(default=None, repr=False)
    superclasses: tuple[int, ...] = field(default=(), repr=False)
    features: tuple[str, ...] = field(default=(), repr=False)
    owner_names: tuple[str, ...] = field(default=(), repr=False)
    fill: tuple[float, ...] = field(default=(), repr=False)
    preparation: Preparation | None = field(default=None, repr=False)
    columns: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, repr=False)
    test_apart: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        count = len(self.x)
        wanted = torch.float32 if self.task == "regression" else torch.int64
        problems = [
            (self.task not in TASKS, f"the task {self.task!r} is not one of {', '.join(TASKS)}"),
            (count == 0, "there are no samples"),
            (len(self.y) != count, f"there are {count} inputs but {len(self.y)} labels"),
            (self.x.dtype not in _INPUTS, f"inputs are {self.x.dtype}, not uint8, float32 or int64"),
            (
                self.x.dtype == torch.int64 and (set(self.mean) != {0.0} or set(self.std) != {1.0}),
                "integer inputs are not normalised: mean must be 0 and std 1",
            ),
            (self.y.dtype != wanted, f"labels are {self.y.dtype}, not {wanted}"),
            (not 0 < self.train_count <= count, f"train_count is {self.train_count}, not in 1..{count}"),
            (len(self.mean) != len(self.std), f"{len(self.mean)} means but {len(self.std)} standard deviations"),
            (any(not value > 0 for value in self.std), f"a standard deviation in {self.std} is not positive"),
            (self.owner is not None and len(self.owner) != count, "not every sample has an owner"),
            (
                self.owner is not None and 0 < len(self.owner_names) <= int(self.owner.max()),
                f"{len(self.owner_names)} owners have names, but there are more",
            ),
            (self.task == "binary" and len(self.classes) != 2, f"a binary task has 2 classes, not {len(self.classes)}"),
        ]
        for wrong, sentence in problems:
            if wrong:
                raise DataError(f"data set {self.name!r}: {sentence}")
        channels = self.x.shape[1] if self.x.dim() > 1 else 1
        if len(self.mean) not in (1, channels):
            raise DataError(f"data set {self.name!r}: {len(self.mean)} means for {channels} channels")
        if self.task != "regression" and not 0 <= int(self.y.min()) <= int(self.y.max()) < len(self.classes):
            raise DataError(
                f"data set {self.name!r}: labels {int(self.y.min())}..{int(self.y.max())} "
                f"for {len(self.classes)} classes"
            )

        for what, values in (("inputs", self.x), ("labels", self.y)):
            if values.is_floating_point():
                self._refuse_infinite(what, values)

    def _refuse_infinite(self, what: str, values: Tensor) -> None:
        # A piece at a time: a mask of all images at once would be a quarter of them. A sum is finite only if all its
        # terms are, but for overflow, which the exact test then clears.
        size = max(1, 2**22 // max(1, values[0].numel()))
        for begin in range(0, len(values), size):
            piece = values[begin : begin + size]
            if bool(piece.sum().isfinite()):
                continue
            wrong = ~piece.isfinite()
            if what == "inputs" and self.preparation is not None and self.preparation.gaps:
                fillable = torch.tensor([bool(gap) for gap in self.preparation.gaps])
                wrong &= ~(piece.isnan() & fillable.view(1, -1, *(1,) * (piece.dim() - 2)))
            bad = wrong.nonzero()
            if len(bad):
                first, *inside = bad[0].tolist()
                column = self.features[inside[0]] if what == "inputs" and len(inside) == 1 and self.features else None
                at = f", column {column!r}" if column else f", at {tuple(inside)}" if inside else ""
                raise DataError(
                    f"data set {self.name!r}: {what} must be finite numbers, but there is "
                    f"{piece[tuple(bad[0])].item()} in sample {begin + first}{at}"
                )

    def __len__(self) -> int:
        return len(self.x)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample, for instance ``(1, 28, 28)``."""
        return tuple(self.x.shape[1:])

    @property
    def num_outputs(self) -> int:
        """Outputs a model needs: one for each class, or 1 when the task is binary or regression."""
        return TASKS[self.task].outputs(len(self.classes))


@dataclass(frozen=True)
class DataInfo:
    """What there is to know about a data set before loading it.

    Parameters
    ----------
    name
        The name to load it by.
    samples
        How many, as text (it may depend on an option).
    shape
        Shape of one sample, as text.
    classes
        How many, as text.
    obtained
        Where it comes from: built in, downloaded, put there by hand, or the user's own.
    doc
        One line.
    citation
        Whom to cite.
    options
        What may follow the name.
    """

    name: str
    samples: str
    shape: str
    classes: str
    obtained: str
    doc: str
    citation: str
    options: tuple[Parameter, ...]


class Source(Spec, ABC):
    """A data set that can be loaded: its options are the fields, its facts the class variables."""

    kind: ClassVar[str] = "data set"
    how_many: ClassVar[str]
    shape: ClassVar[str]
    class_count: ClassVar[str]
    obtained: ClassVar[str]
    drawn: ClassVar[bool] = True
    """Whether it may differ from seed to seed."""

    @abstractmethod
    def load(self, folder: Path, seed: int) -> Dataset:
        """Read or make the data set.

        Parameters
        ----------
        folder
            The data folder.
        seed
            For data sets that are drawn.

        Returns
        -------
        Dataset
            The samples.
        """

    def owners(self) -> dict[str, int] | None:
        """Count the samples of each natural client of data that name them, without loading the data.

        Returns
        -------
        dict of str to int or None
            Samples by name, in the order of the natural clients' numbers; ``None`` if the data name none or are not
            there.
        """
        return None

    @classmethod
    def describe(cls) -> DataInfo:
        """Describe the data set without loading it.

        Returns
        -------
        DataInfo
            The facts.
        """
        return DataInfo(
            name=cls.name,
            samples=cls.how_many,
            shape=cls.shape,
            classes=cls.class_count,
            obtained=cls.obtained,
            doc=cls.summary(),
            citation=cls.citation,
            options=cls.parameters(),
        )
