"""Max pooling over windows that do not overlap, with ReLU if wanted, in one pass forward and one backward.

The backward pass needs only the place of each window's largest value, which takes a byte; PyTorch keeps eight.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 1024  # elements of a program


@triton.jit
def _down(
    image,
    out,
    where,
    total,
    image_each,
    image_line,
    image_place,
    image_channel,
    CHANNELS: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    RELU: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    channel = at % CHANNELS
    side = (at // CHANNELS) % ACROSS
    top = (at // (CHANNELS * ACROSS)) % DOWN
    each = at // (CHANNELS * ACROSS * DOWN)
    base = each * image_each + top * HIGH * image_line + side * WIDE * image_place + channel * image_channel
    best = tl.load(image + base, mask=inside, other=0.0)
    place = tl.zeros((BLOCK,), dtype=tl.int32)
    for i in tl.static_range(HIGH):
        for j in tl.static_range(WIDE):
            if i + j > 0:
                value = tl.load(image + base + i * image_line + j * image_place, mask=inside, other=0.0)
                larger = (value > best) | (value != value)  # NaN wins, as in PyTorch
                best = tl.where(larger, value, best)
                place = tl.where(larger, i * WIDE + j, place)
    if RELU:
        place = tl.where(best <= 0, 127, place)  # no place: ReLU lets no gradient through
        best = tl.where(best <= 0, 0.0, best)
    tl.store(out + at, best, mask=inside)
    tl.store(where + at, place.to(tl.int8), mask=inside)


@triton.jit
def _up(
    gradient,
    where,
    out,
    total,
    gradient_each,
    gradient_line,
    gradient_place,
    gradient_channel,
    CHANNELS: tl.constexpr,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    HIGH: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    channel = at % CHANNELS
    x = (at // CHANNELS) % WIDTH
    y = (at // (CHANNELS * WIDTH)) % HEIGHT
    each = at // (CHANNELS * WIDTH * HEIGHT)
    top = y // HIGH
    side = x // WIDE
    there = inside & (top < DOWN) & (side < ACROSS)
    place = tl.load(where + ((each * DOWN + top) * ACROSS + side) * CHANNELS + channel, mask=there, other=127)
    mine = there & (place == (y % HIGH) * WIDE + x % WIDE)
    of = each * gradient_each + top * gradient_line + side * gradient_place + channel * gradient_channel
    tl.store(out + at, tl.load(gradient + of, mask=mine, other=0.0), mask=inside)


class MaxPool(torch.autograd.Function):
    """Maximum over windows that lie side by side, with ReLU if wanted; the results have channels last in memory."""

    @staticmethod
    def forward(image: Tensor, window: tuple[int, int], relu: bool) -> tuple[Tensor, Tensor]:
        """Return the largest values, and where each was."""
        samples, channels, height, width = image.shape
        down, across = height // window[0], width // window[1]
        out = image.new_empty(samples, down, across, channels)
        where = torch.empty(samples, down, across, channels, dtype=torch.int8, device=image.device)
        each, channel, line, place = image.stride()
        _down[(triton.cdiv(out.numel(), _BLOCK),)](
            image,
            out,
            where,
            out.numel(),
            each,
            line,
            place,
            channel,
            CHANNELS=channels,
            DOWN=down,
            ACROSS=across,
            HIGH=window[0],
            WIDE=window[1],
            RELU=relu,
            BLOCK=_BLOCK,
        )
        return out.permute(0, 3, 1, 2), where

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save what the backward pass needs."""
        image, ctx.window, _ = inputs
        ctx.shape = image.shape
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, _: Any) -> Any:
        """Return each window's gradient to its largest value."""
        (where,) = ctx.saved_tensors
        samples, channels, height, width = ctx.shape
        out = gradient.new_empty(samples, height, width, channels)
        each, channel, line, place = gradient.stride()
        _up[(triton.cdiv(out.numel(), _BLOCK),)](
            gradient,
            where,
            out,
            out.numel(),
            each,
            line,
            place,
            channel,
            CHANNELS=channels,
            HEIGHT=height,
            WIDTH=width,
            DOWN=where.shape[1],
            ACROSS=where.shape[2],
            HIGH=ctx.window[0],
            WIDE=ctx.window[1],
            BLOCK=_BLOCK,
        )
        return out.permute(0, 3, 1, 2), None, None


def pool(image: Tensor, window: tuple[int, int], relu: bool) -> Tensor:
    """Take the largest value of each window ``(height, width)``; can be differentiated once."""
    function: Any = MaxPool.apply
    out: Tensor = function(image, window, relu)[0]
    return out
