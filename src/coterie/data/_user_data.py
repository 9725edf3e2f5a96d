"""What the sources of the user's own data share: facts, labels, owners, normalisation."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import BeforeValidator
from torch import Tensor

from coterie.data.dataset import Source
from coterie.errors import DataError

TaskKind = Literal["multiclass", "binary", "regression"]
AsText = BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)


class UserSource(Source):
    """A data set of the user's own, of which nothing is known before it is loaded."""

    how_many: ClassVar[str] = "your own"
    class_count: ClassVar[str] = "your own"
    obtained: ClassVar[str] = "your own"
    citation: ClassVar[str] = "your own"


def channel_norm(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel ``x[:, channel]``, of what is gathered: bytes count as 0 to 1.

    A channel that is constant gets a deviation of 1.
    """
    unit = 255.0 if x.dtype == torch.uint8 else 1.0
    rest = [axis for axis in range(x.dim()) if axis != 1]
    count = x.numel() // x.shape[1]
    pieces = x.split(4096)  # in float64, but never all at once: that would be eight times the images
    mean = torch.stack([piece.double().sum(rest) for piece in pieces]).sum(0) / count
    shape = (1, -1, *(1,) * (x.dim() - 2))
    square = torch.stack([(piece.double() - mean.view(shape)).square().sum(rest) for piece in pieces]).sum(0) / count
    std = (square.sqrt() / unit).where(square > 0, torch.ones(()).double())
    return tuple((mean / unit).tolist()), tuple(std.tolist())


def encode_labels(values: npt.NDArray[Any], task: TaskKind, where: str) -> tuple[Tensor, tuple[str, ...]]:
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
