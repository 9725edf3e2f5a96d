"""Numbers of a task that may be one for all rows, or one for each.

Runs of a study that differ in a number alone, as λ or a momentum, are computed together. A step of theirs finds in the
field a column ``[rows, 1]`` in float64 instead of a number, if the task names the field in
:attr:`~coterie.algorithms.client.Task.per_row`. What is here takes either, and gives for a column what it gives for
the numbers in it, row by row and bit for bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

Number = float | Tensor
"""A number, or a column of numbers ``[rows, 1]``."""


def nonzero(number: Number) -> bool:
    """Say whether a number is not 0; runs are computed together only if it is 0 for all of them or for none."""
    return isinstance(number, Tensor) or bool(number)


def fitting(number: Number, rows: Tensor) -> Number:
    """Give the number so that it can be multiplied with rows of any shape, in their type."""
    if not isinstance(number, Tensor):
        return number
    return number.to(rows.dtype).view(-1, *(1,) * (rows.dim() - 1))


def add_times(rows: Tensor, others: Tensor, number: Number) -> Tensor:
    """Return ``rows + number · others``, rounded once where the device can."""
    if not isinstance(number, Tensor):
        return torch.add(rows, others, alpha=number)
    return torch.addcmul(rows, others, number.to(rows.dtype))
