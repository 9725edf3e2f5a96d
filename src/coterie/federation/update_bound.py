"""A bound on how much one member's reply may change: a multiple of what the members' replies change in the middle.

A reply is finite and has the right shape, and may still hold numbers of 1e30, after which a mean of all members' models
is of no use to anybody. What a reply changes is measured as clipping does (:mod:`coterie.simulation.privacy`): the norm
of its difference to what was sent, or of the reply itself where it is a gradient, a difference or a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from coterie.rows import Rows

_BLOCK_ELEMENTS = 2**17  # computed in float64, a megabyte at a time
_FEWEST = 3  # replies of which one can be said to stand out


def update_norms(replies: Rows, message: Rows, references: Mapping[str, str | None]) -> Tensor:
    """Give the norm of what each reply changes, all its tensors together, in float64; rows are members."""
    squares = torch.zeros(_count(replies), dtype=torch.float64)
    for name, value in replies.items():
        start = _same_shape(value, message, references.get(name, name))
        for row in range(len(value)):
            for some in _blocks(value):
                change = value[row].reshape(-1)[some].double()
                if start is not None:
                    change = change - start[row].reshape(-1)[some].double()
                squares[row] += change.square().sum()
    return squares.sqrt()


def sent_norms(replies: Rows, message: Rows, references: Mapping[str, str | None], longest: int = 0) -> Tensor:
    """Give the norm of the models that each reply changes, in float64: what one reply alone can be compared with.

    A gradient or a difference is compared with the model in the message; a model that is sent by nobody, or is all
    zeros, with a model of ones. It is 0 where a reply has no model, as one of losses alone: a model is as long as the
    longest row of message, reply and the client's state, whose ``longest`` is given.
    """
    squares = torch.zeros(_count(replies), dtype=torch.float64)
    longest = max(longest, *(_length(value) for value in (*replies.values(), *message.values())))
    ones = 0
    for name, value in replies.items():
        changed = _same_shape(value, message, references.get(name, name))
        if _length(value) == longest > 1:
            ones += value[0].numel()
            if changed is None:
                changed = next((sent for sent in message.values() if sent.shape == value.shape), None)
        if changed is not None:
            for row in range(len(changed)):
                for some in _blocks(changed):
                    squares[row] += changed[row].reshape(-1)[some].double().square().sum()
    return torch.where(squares > 0, squares, float(ones)).sqrt()


def _length(rows: Tensor) -> int:
    return rows.shape[-1] if rows.ndim > 1 else 1


def _count(replies: Rows) -> int:
    return len(next(iter(replies.values())))


def _same_shape(value: Tensor, message: Rows, source: str | None) -> Tensor | None:
    found = None if source is None else message.get(source)
    return found if found is not None and found.shape == value.shape else None


def _blocks(value: Tensor) -> Iterator[slice]:
    return (slice(at, at + _BLOCK_ELEMENTS) for at in range(0, value[0].numel(), _BLOCK_ELEMENTS))


def too_large(norms: Tensor, multiple: float, sent: Callable[[], Tensor]) -> dict[int, str]:
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
    return {
        place: f"it changes by {norm:.3g}, which is more than {multiple:g} times the {own:.3g} of what was sent"
        for place, (norm, own) in enumerate(zip(norms.tolist(), sent().tolist(), strict=True))
        if own > 0 and not norm <= multiple * own
    }
