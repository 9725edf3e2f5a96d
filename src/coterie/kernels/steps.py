"""A step of gradient descent with momentum, weight decay and a proximal term, in one pass over the rows.

With an operation for each term the rows are read and written some twenty times a step, and beside small convolutions
that was a quarter of all that a GPU did.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from coterie.kernels import launch

_BLOCK = 2048  # elements of a program


@triton.jit
def _take_step(
    weights,
    gradient,
    centre,
    velocity,
    rate,
    pull,
    decay,
    momentum,
    count,
    weights_row,
    gradient_row,
    centre_row,
    velocity_row,
    rate_row,
    PULLED: tl.constexpr,
    DECAYED: tl.constexpr,
    MOVING: tl.constexpr,
    PULLS: tl.constexpr,
    DECAYS: tl.constexpr,
    MOMENTA: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Step each row; PULLS, DECAYS and MOMENTA say of a number that it is a column with one for each row."""
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    w = tl.load(weights + row * weights_row + at, mask=inside)
    step = tl.load(gradient + row * gradient_row + at, mask=inside)
    if PULLED:
        if PULLS:
            pull = tl.load(pull + row).to(tl.float32)
        step += pull * (w - tl.load(centre + row * centre_row + at, mask=inside))
    if DECAYED:
        if DECAYS:
            decay = tl.load(decay + row).to(tl.float32)
        step += decay * w
    if MOVING:
        if MOMENTA:
            momentum = tl.load(momentum + row).to(tl.float32)
        step += momentum * tl.load(velocity + row * velocity_row + at, mask=inside)
        tl.store(velocity + row * velocity_row + at, step, mask=inside)
    tl.store(weights + row * weights_row + at, w - tl.load(rate + row * rate_row) * step, mask=inside)


def descend_(
    params: Tensor,
    gradient: Tensor,
    rate: Tensor,
    *,
    pull: float | Tensor = 0.0,
    centre: Tensor | None = None,
    decay: float | Tensor = 0.0,
    momentum: float | Tensor = 0.0,
    velocity: Tensor | None = None,
) -> None:
    """Take a step of rows ``[rows, parameters]`` in place, and of their velocity.

    ``v ← momentum · v + gradient + pull · (w − centre) + decay · w`` and ``w ← w − rate · v``, with a rate for each row
    ``[rows, 1]``; the other numbers are one for all rows, or such columns. Without a centre or a velocity their terms
    are left out.
    """
    rows, count = params.shape
    gradient = _side_by_side(gradient)
    held = params if centre is None else _side_by_side(centre)
    moved = params if velocity is None else velocity
    launch(
        _take_step,
        (triton.cdiv(count, _BLOCK), rows),
        params,
        gradient,
        held,
        moved,
        rate,
        *(value.contiguous() if isinstance(value, Tensor) else float(value) for value in (pull, decay, momentum)),
        count,
        params.stride(0),
        gradient.stride(0),
        held.stride(0),
        moved.stride(0),
        rate.stride(0),
        PULLED=centre is not None,
        DECAYED=isinstance(decay, Tensor) or bool(decay),
        MOVING=velocity is not None,
        PULLS=isinstance(pull, Tensor),
        DECAYS=isinstance(decay, Tensor),
        MOMENTA=isinstance(momentum, Tensor),
        BLOCK=_BLOCK,
    )


def _side_by_side(rows: Tensor) -> Tensor:
    """Give rows whose numbers lie side by side in memory."""
    return rows if rows.stride(1) == 1 else rows.contiguous()
