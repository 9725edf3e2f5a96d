"""Dropout with masks from the streams of :mod:`coterie.randomness`, drawn and applied in one pass.

The mask is never stored: the backward pass draws it again from the same keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from coterie.kernels import launch
from coterie.kernels.hashing import mixed

_BLOCK = 1024  # elements of a program


@triton.jit
def _drop(
    x,
    key,
    idle,
    out,
    count,
    threshold,
    scale,
    GOLDEN: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    seed = tl.load(key + row)
    value = mixed(seed + ((at // 4 + 1).to(tl.int64)) * GOLDEN, MIX_1, MIX_2)
    # One hash gives four elements 16 bits each, a quarter of the integer work; the chance is exact to 2^-16.
    lane = (value >> ((at % 4) * 16).to(tl.int64)).to(tl.int16)
    kept = lane.to(tl.int32) >= threshold
    given = tl.load(x + row * count + at, mask=inside, other=0.0)
    factor = tl.where(kept, scale, 0.0)
    factor = tl.where(tl.load(idle + row) == 0, 1.0, factor)
    tl.store(out + row * count + at, given * factor, mask=inside)


class DropoutRule(NamedTuple):
    """Which elements are dropped, and how the others are scaled.

    Parameters
    ----------
    threshold
        An element is kept where its 16-bit number is at least this.
    scale
        What a kept element is multiplied by.
    constants
        The three constants of the hash.
    """

    threshold: int
    scale: float
    constants: tuple[int, int, int]


def _apply(x: Tensor, key: Tensor, idle: Tensor, draw: DropoutRule) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    count = x.numel() // len(key)
    grid = (triton.cdiv(count, _BLOCK), len(key))
    golden, first, second = draw.constants
    launch(
        _drop,
        grid,
        x,
        key,
        idle,
        out,
        count,
        draw.threshold,
        draw.scale,
        GOLDEN=golden,
        MIX_1=first,
        MIX_2=second,
        BLOCK=_BLOCK,
    )
    return out


class Dropout(torch.autograd.Function):
    """Zeroes some elements of each row and scales the others; a row whose ``idle`` is 0 is left as it is."""

    @staticmethod
    def forward(x: Tensor, key: Tensor, idle: Tensor, draw: DropoutRule) -> Tensor:
        """Apply it to rows ``[rows, ...]``, with a key for each."""
        return _apply(x, key, idle, draw)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save what the backward pass needs."""
        _, key, idle, ctx.draw = inputs
        ctx.save_for_backward(key, idle)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Apply the same factors to the gradient."""
        key, idle = ctx.saved_tensors
        return _apply(gradient, key, idle, ctx.draw), None, None, None


def drop(x: Tensor, key: Tensor, idle: Tensor, draw: DropoutRule) -> Tensor:
    """Zero some elements of each row and scale the others; can be differentiated once."""
    function: Any = Dropout.apply
    out: Tensor = function(x, key, idle, draw)
    return out
