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

from coterie.kernels import launch

_PLACES = 32  # windows of a program; with up to 64 channels of each


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
    FIRST: tl.constexpr,
    P: tl.constexpr,
    C: tl.constexpr,
):
    """Take each window's largest value; with FIRST the channels come before the places in memory, else after them."""
    p = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside = (p < total)[:, None] & (channel < CHANNELS)[None, :]
    spot = p % (DOWN * ACROSS)
    each = p // (DOWN * ACROSS)
    corner = each * image_each + spot // ACROSS * HIGH * image_line + spot % ACROSS * WIDE * image_place
    base = image + corner[:, None] + (channel * image_channel)[None, :]
    best = tl.load(base, mask=inside, other=0.0)
    place = tl.zeros((P, C), dtype=tl.int32)
    for i in tl.static_range(HIGH):
        for j in tl.static_range(WIDE):
            if i + j > 0:
                value = tl.load(base + i * image_line + j * image_place, mask=inside, other=0.0)
                larger = (value > best) | (value != value)  # NaN wins, as in PyTorch
                best = tl.where(larger, value, best)
                place = tl.where(larger, i * WIDE + j, place)
    if RELU:
        place = tl.where(best <= 0, 127, place)  # no place: ReLU lets no gradient through
        best = tl.where(best <= 0, 0.0, best)
    last = (p * CHANNELS)[:, None] + channel[None, :]
    tl.store(where + last, place.to(tl.int8), mask=inside)
    if FIRST:
        to = (each * (CHANNELS * DOWN * ACROSS) + spot)[:, None] + (channel * (DOWN * ACROSS))[None, :]
        tl.store(out + to, best, mask=inside)
    else:
        tl.store(out + last, best, mask=inside)


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
    P: tl.constexpr,
    C: tl.constexpr,
):
    """Give each window's gradient to its largest value, and zero to its others."""
    p = tl.program_id(0).to(tl.int64) * P + tl.arange(0, P)
    channel = tl.program_id(1) * C + tl.arange(0, C)
    inside = (p < total)[:, None] & (channel < CHANNELS)[None, :]
    spot = p % (DOWN * ACROSS)
    each = p // (DOWN * ACROSS)
    top = spot // ACROSS
    side = spot % ACROSS
    of = each * gradient_each + top * gradient_line + side * gradient_place
    given = tl.load(gradient + of[:, None] + (channel * gradient_channel)[None, :], mask=inside, other=0.0)
    place = tl.load(where + (p * CHANNELS)[:, None] + channel[None, :], mask=inside, other=127)
    corner = ((each * HEIGHT + top * HIGH) * WIDTH + side * WIDE) * CHANNELS
    to = out + corner[:, None] + channel[None, :]
    for i in tl.static_range(HIGH):
        for j in tl.static_range(WIDE):
            mine = tl.where(place == i * WIDE + j, given, 0.0)
            tl.store(to + (i * WIDTH + j) * CHANNELS, mine, mask=inside)


def _grid(windows: int, channels: int) -> tuple[tuple[int, int], dict[str, int]]:
    wide = min(64, triton.next_power_of_2(channels))
    return (triton.cdiv(windows, _PLACES), triton.cdiv(channels, wide)), {"P": _PLACES, "C": wide}


def unpooled(gradient: Tensor, where: Tensor, window: tuple[int, int], size: tuple[int, int]) -> Tensor:
    """Give each window's gradient to its largest value, in images of a size, with channels last in memory."""
    samples, down, across, channels = where.shape
    height, width = size
    # What lies beyond the last whole window is in no window.
    covered = height == down * window[0] and width == across * window[1]
    make = gradient.new_empty if covered else gradient.new_zeros
    out = make(samples, height, width, channels)
    each, channel, line, place = gradient.stride()
    grid, tile = _grid(samples * down * across, channels)
    launch(
        _up,
        grid,
        gradient,
        where,
        out,
        samples * down * across,
        each,
        line,
        place,
        channel,
        CHANNELS=channels,
        HEIGHT=height,
        WIDTH=width,
        DOWN=down,
        ACROSS=across,
        HIGH=window[0],
        WIDE=window[1],
        **tile,
    )
    return out.permute(0, 3, 1, 2)


class MaxPool(torch.autograd.Function):
    """Maximum over windows that lie side by side, with ReLU if wanted."""

    @staticmethod
    def forward(image: Tensor, window: tuple[int, int], relu: bool, channels_first: bool) -> tuple[Tensor, Tensor]:
        """Return the largest values, and where each was."""
        samples, channels, height, width = image.shape
        down, across = height // window[0], width // window[1]
        where = torch.empty(samples, down, across, channels, dtype=torch.int8, device=image.device)
        if channels_first:
            out = image.new_empty(samples, channels, down, across)
        else:
            out = image.new_empty(samples, down, across, channels).permute(0, 3, 1, 2)
        each, channel, line, place = image.stride()
        grid, tile = _grid(samples * down * across, channels)
        launch(
            _down,
            grid,
            image,
            out,
            where,
            samples * down * across,
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
            FIRST=channels_first,
            **tile,
        )
        return out, where

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save what the backward pass needs."""
        image, ctx.window, _, _ = inputs
        ctx.size = image.shape[2], image.shape[3]
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, _: Any) -> Any:
        """Return each window's gradient to its largest value."""
        if gradient is None:
            return None, None, None, None
        (where,) = ctx.saved_tensors
        return unpooled(gradient, where, ctx.window, ctx.size), None, None, None


def pool(image: Tensor, window: tuple[int, int], relu: bool, channels_first: bool = False) -> Tensor:
    """Take the largest value of each window ``(height, width)``; can be differentiated once.

    The results have channels last in memory, as convolutions want them, unless they are wanted first, to be flattened.
    """
    function: Any = MaxPool.apply
    out: Tensor = function(image, window, relu, channels_first)[0]
    return out
