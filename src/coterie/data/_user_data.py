"""What the sources of the user's own data share: facts, labels, owners, normalisation."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BeforeValidator
from torch import Tensor

from coterie.data.dataset import Dataset, Source
from coterie.data.statistics import prepared
from coterie.errors import DataError
from coterie.tasks import TaskName

AsText = BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)


class UserSource(Source):
    """A data set of the user's own, of which nothing is known before it is loaded."""

    how_many: ClassVar[str] = "your own"
    class_count: ClassVar[str] = "your own"
    obtained: ClassVar[str] = "your own"
    citation: ClassVar[str] = "your own"
    drawn: ClassVar[bool] = False


def with_statistics(dataset: Dataset) -> Dataset:
    """Give a data set its statistics over the official training set, for whoever looks at it outside of a run."""
    return prepared(dataset, [torch.arange(dataset.train_count)], "pooled")


def encode_labels(values: npt.NDArray[Any], task: TaskName, where: str) -> tuple[Tensor, tuple[str, ...]]:
    """Return class numbers (int64) and the classes' names in sorted order; for regression float32 targets and no names.

    ``where`` names the file, and the column if there is one, in error messages.
    """
    numeric = np.issubdtype(values.dtype, np.number)
    if numeric and not np.isfinite(values).all():
        raise DataError(f"a label in {where} is missing or infinite")
    if task == "regression":
        if not numeric:
            raise DataError(f"the labels in {where} are not numbers, so the task cannot be regression")
        return torch.from_numpy(values.astype(np.float32)), ()
    if np.issubdtype(values.dtype, np.floating) and (values != np.rint(values)).any():
        raise DataError(f"the labels in {where} are fractions: give task=regression, or whole numbers or texts")
    names, codes = np.unique(values, return_inverse=True)
    if len(names) < 2 or (task == "binary" and len(names) != 2):
        needed = "2 classes" if task == "binary" else "at least 2 classes"
        raise DataError(f"a {task} task needs {needed}, but the labels in {where} have {len(names)} different values")
    shown = [str(int(name)) if np.issubdtype(values.dtype, np.floating) else str(name) for name in names]
    return torch.from_numpy(codes.astype(np.int64)), tuple(shown)


def encode_owner(values: npt.NDArray[Any], where: str) -> tuple[Tensor, tuple[str, ...]]:
    """Replace the names of natural clients by numbers from 0, in the sorted order of the names; give the names too."""
    numeric = np.issubdtype(values.dtype, np.floating)
    if numeric and not np.isfinite(values).all():
        raise DataError(f"the owner of a sample in {where} is missing: entry {int(np.argmin(np.isfinite(values)))}")
    found, codes = np.unique(values, return_inverse=True)
    names = [str(int(name)) if numeric and name == np.rint(name) else str(name) for name in found]
    return torch.from_numpy(codes.astype(np.int64)), tuple(names)


def count_owners(owner: Tensor, names: tuple[str, ...]) -> dict[str, int]:
    """Count the samples of each natural client."""
    return dict(zip(names, owner.bincount(minlength=len(names)).tolist(), strict=True))
