"""A bound on how much one member's reply may change: a multiple of what the members' replies change in the middle.

A reply is finite and has the right shape, and may still hold numbers of 1e30, after which a mean of all members' models
is of no use to anybody. What a reply changes is measured as clipping does (:mod:`coterie.simulation.privacy`): the norm
of its difference to what was sent, or of the reply itself where it is a gradient, a difference or a number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from coterie.rows import Rows

_BLOCK_ELEMENTS = 2**17  # computed in float64, a megabyte at a time
_FEWEST = 3  # replies of which one can be said to stand out


def update_norms(
    replies: Rows, message: Rows, references: Mapping[str, str | None], *, of_message: bool = False
) -> Tensor:
    """Give the norm of what each reply changes, all its tensors together, in float64; rows are members.

    With ``of_message`` the norm of what it is a changed copy of; 0 where it is none.
    """
    count = len(next(iter(replies.values())))
    squares = torch.zeros(count, dtype=torch.float64)
    for name, value in replies.items():
        source = references.get(name, name)
        base = None if source is None else message.get(source)
        flat = value.reshape(count, -1)
        start = base.reshape(count, -1) if base is not None and base.shape == value.shape else None
        if of_message and start is None:
            continue
        for row in range(count):
            for begin in range(0, flat.shape[1], _BLOCK_ELEMENTS):
                some = slice(begin, begin + _BLOCK_ELEMENTS)
                change = torch.zeros((), dtype=torch.float64) if of_message else flat[row, some].double()
                if start is not None:
                    change = change - start[row, some].double()
                squares[row] += change.square().sum()
    return squares.sqrt()


def too_large(norms: Tensor, multiple: float, sent: Tensor | None = None) -> dict[int, str]:
    """Name the places of replies whose norm is more than a multiple of the median of all, and say by how much.

    Of fewer than three replies none stands out, nor where most replies change nothing. Then each is compared with the
    norm of what was ``sent``, where that is not 0.
    """
    middle = float(norms.quantile(0.5)) if len(norms) >= _FEWEST else 0.0
    if math.isfinite(middle) and middle > 0:
        return {
            place: f"it changes by {float(norm):.3g}, which is more than {multiple:g} times the members' median of "
            f"{middle:.3g}"
            for place, norm in enumerate(norms)
            if not float(norm) <= multiple * middle
        }
    pairs = enumerate(zip(norms.tolist(), [0.0] * len(norms) if sent is None else sent.tolist(), strict=True))
    return {
        place: f"it changes by {norm:.3g}, which is more than {multiple:g} times the {own:.3g} of what was sent"
        for place, (norm, own) in pairs
        if own > 0 and not norm <= multiple * own
    }
