"""Sequences of whole numbers (words, events) of any length, brought to one: cut, or filled up at the end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from coterie.errors import DataError


def padded(sequences: Sequence[Any], length: int | None, padding: int, where: str) -> Tensor:
    """Give integers ``[samples, length]``; ``length`` is by default that of the longest, ``padding`` fills the others.

    A sequence is a list or array of whole numbers, or a text of them with spaces between.
    """
    rows = [_numbers(each, number, where) for number, each in enumerate(sequences)]
    width = length or max((len(row) for row in rows), default=0)
    if not width:
        raise DataError(f"all sequences in {where} are empty")
    out = np.full((len(rows), width), padding, dtype=np.int64)
    for place, row in enumerate(rows):
        out[place, : len(row)] = row[:width]
    if out.min() < 0:
        raise DataError(f"there is {int(out.min())} in {where}, but numbers of words begin at 0")
    return torch.from_numpy(out)


def _numbers(each: Any, number: int, where: str) -> Any:
    try:
        found = np.array(each.split(), dtype=np.int64) if isinstance(each, str) else np.asarray(each)
    except ValueError:
        found = np.zeros((0, 0))
    if found.ndim == 1 and not len(found):
        return np.zeros(0, dtype=np.int64)
    if found.ndim != 1 or not np.issubdtype(found.dtype, np.integer):
        raise DataError(
            f"sequence {number} in {where} is {str(each)[:40]!r}, but must be whole numbers: a list, or a text with "
            "spaces between them"
        )
    return found
