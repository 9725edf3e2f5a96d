"""Dense layers of many clients with few samples each.

Such a layer takes as long as reading its weights does, for each is used for a handful of samples only. So the weights
are read once, by as many programs as keep the memory busy, and a gradient step is written over them while it is
computed. Sums that are split among programs are added in a fixed order, so results repeat bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from coterie.kernels import launch
from coterie.kernels._tile_product import tile_product, tile_side

MOST_SAMPLES = 64
"""With more samples the arithmetic takes longer than reading the weights, and the library's products are faster."""

_PROGRAMS = 1056  # eight on each of the 132 processors of an H200


@triton.jit(do_not_specialize=["samples"])
def _forward(
    x,
    weight,
    bias,
    out,
    x_row,
    x_sample,
    weight_row,
    weight_out,
    bias_row,
    piece,
    rows,
    samples,
    INSIDE: tl.constexpr,
    OUTSIDE: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """out[m, n] = bias[n] + sum over i of x[m, i] weight[n, i], for one piece of the sum."""
    row = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    m = tl.arange(0, M)
    n = tl.program_id(0) * N + tl.arange(0, N)
    sums = tl.zeros((M, N), dtype=tl.float32)
    begin = part * piece
    end = tl.minimum(begin + piece, INSIDE)
    for first in range(begin, end, K):
        k = first + tl.arange(0, K)
        given = tl.load(
            x + row * x_row + (m * x_sample)[:, None] + k[None, :],
            mask=(m < samples)[:, None] & (k < end)[None, :],
            other=0.0,
        )
        factors = tl.load(
            weight + row * weight_row + (n * weight_out)[None, :] + k[:, None],
            mask=(n < OUTSIDE)[None, :] & (k < end)[:, None],
            other=0.0,
        )
        sums = tile_product(given, factors, sums, PRECISION)
    if BIAS and part == 0:
        sums += tl.load(bias + row * bias_row + n, mask=n < OUTSIDE, other=0.0)[None, :]
    to = ((part * rows + row) * samples + m)[:, None] * OUTSIDE + n[None, :]
    tl.store(out + to, sums, mask=(m < samples)[:, None] & (n < OUTSIDE)[None, :])


@triton.jit(do_not_specialize=["samples"])
def _backward(
    gradient,
    weight,
    out,
    gradient_row,
    gradient_sample,
    weight_row,
    weight_out,
    samples,
    INSIDE: tl.constexpr,
    OUTSIDE: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """out[m, i] = sum over n of gradient[m, n] weight[n, i]."""
    row = tl.program_id(1).to(tl.int64)
    m = tl.arange(0, M)
    i = tl.program_id(0) * N + tl.arange(0, N)
    sums = tl.zeros((M, N), dtype=tl.float32)
    for first in range(0, OUTSIDE, K):
        n = first + tl.arange(0, K)
        given = tl.load(
            gradient + row * gradient_row + (m * gradient_sample)[:, None] + n[None, :],
            mask=(m < samples)[:, None] & (n < OUTSIDE)[None, :],
            other=0.0,
        )
        factors = tl.load(
            weight + row * weight_row + (n * weight_out)[:, None] + i[None, :],
            mask=(n < OUTSIDE)[:, None] & (i < INSIDE)[None, :],
            other=0.0,
        )
        sums = tile_product(given, factors, sums, PRECISION)
    to = (row * samples + m)[:, None] * INSIDE + i[None, :]
    tl.store(out + to, sums, mask=(m < samples)[:, None] & (i < INSIDE)[None, :])


@triton.jit(do_not_specialize=["samples"])
def _descend(
    gradient,
    x,
    rate,
    weight,
    bias,
    gradient_row,
    gradient_sample,
    x_row,
    x_sample,
    rate_row,
    weight_row,
    weight_out,
    bias_row,
    samples,
    INSIDE: tl.constexpr,
    OUTSIDE: tl.constexpr,
    BIAS: tl.constexpr,
    PRECISION: tl.constexpr,
    S: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """weight[n, i] -= rate * sum over samples of gradient[s, n] x[s, i], and the bias likewise."""
    row = tl.program_id(1).to(tl.int64)
    across = tl.cdiv(INSIDE, K)
    n = (tl.program_id(0) // across) * N + tl.arange(0, N)
    i = (tl.program_id(0) % across) * K + tl.arange(0, K)
    s = tl.arange(0, S)
    step = tl.load(
        gradient + row * gradient_row + (s * gradient_sample)[None, :] + n[:, None],
        mask=(s < samples)[None, :] & (n < OUTSIDE)[:, None],
        other=0.0,
    )
    step = step * -tl.load(rate + row * rate_row)
    given = tl.load(
        x + row * x_row + (s * x_sample)[:, None] + i[None, :],
        mask=(s < samples)[:, None] & (i < INSIDE)[None, :],
        other=0.0,
    )
    there = (n < OUTSIDE)[:, None] & (i < INSIDE)[None, :]
    at = weight + row * weight_row + (n * weight_out)[:, None] + i[None, :]
    old = tl.load(at, mask=there, other=0.0)
    # The old weights are added last: to sum on top of them would round every term to their size.
    change = tile_product(step, given, tl.zeros((N, K), dtype=tl.float32), PRECISION)
    tl.store(at, old + change, mask=there)
    if BIAS and tl.program_id(0) % across == 0:
        shift = bias + row * bias_row + n
        tl.store(shift, tl.load(shift, mask=n < OUTSIDE, other=0.0) + tl.sum(step, 1), mask=n < OUTSIDE)


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, precision: str) -> Tensor:
    """Apply each row's layer to its samples."""
    rows, samples, inside = x.shape
    outside = weight.shape[1]
    m = tile_side(16, samples, MOST_SAMPLES)
    n, k = tile_side(16, outside, 64), tile_side(16, inside, 64 if m == 16 else 32)
    blocks = triton.cdiv(outside, n)
    # Long sums are split where there would be too few programs, into pieces that are worth a program of their own.
    parts = max(1, min(_PROGRAMS // (blocks * rows), inside // 512))
    piece = triton.cdiv(triton.cdiv(inside, k), parts) * k
    parts = triton.cdiv(inside, piece)
    # No view where there is one part: what a layer gave may be changed in place, which autograd forbids for views
    # that a function made.
    out = x.new_empty(*([parts] if parts > 1 else []), rows, samples, outside)
    launch(
        _forward,
        (blocks, rows, parts),
        x,
        weight,
        weight if bias is None else bias,
        out,
        *x.stride()[:2],
        *weight.stride()[:2],
        0 if bias is None else bias.stride(0),
        piece,
        rows,
        samples,
        INSIDE=inside,
        OUTSIDE=outside,
        BIAS=bias is not None,
        PRECISION=precision,
        M=m,
        N=n,
        K=k,
        num_warps=4,
        num_stages=3,
    )
    return out if parts == 1 else out.sum(0)


def backward(gradient: Tensor, weight: Tensor, precision: str) -> Tensor:
    """Return the gradient of the samples."""
    rows, samples, outside = gradient.shape
    inside = weight.shape[2]
    gradient = gradient if gradient.stride(2) == 1 else gradient.contiguous()
    out = gradient.new_empty(rows, samples, inside)
    m = tile_side(16, samples, MOST_SAMPLES)
    # Timed on an H200. With four warps and 64 samples Triton uses Hopper's warp-group products, which need the weights
    # transposed first: 0.19 instead of 0.07 ms (TF32), 0.35 instead of 0.14.
    wide, deep, warps = (128, 32, 4) if m == 16 else (64, 16, 2) if precision == "tf32x3" else (64, 64, 2)
    n, k = tile_side(16, inside, wide), tile_side(16, outside, deep)
    launch(
        _backward,
        (triton.cdiv(inside, n), rows),
        gradient,
        weight,
        out,
        *gradient.stride()[:2],
        *weight.stride()[:2],
        samples,
        INSIDE=inside,
        OUTSIDE=outside,
        PRECISION=precision,
        M=m,
        N=n,
        K=k,
        num_warps=warps,
        num_stages=3,
    )
    return out


def descend_(weight: Tensor, bias: Tensor | None, x: Tensor, gradient: Tensor, rate: Tensor, precision: str) -> None:
    """Take the step ``weight − rate · gradientᵀ x`` in place, and that of the bias."""
    rows, samples, inside = x.shape
    outside = weight.shape[1]
    gradient = gradient if gradient.stride(2) == 1 else gradient.contiguous()
    s, n, k = tile_side(16, samples, MOST_SAMPLES), tile_side(16, outside, 32), tile_side(16, inside, 64)
    launch(
        _descend,
        (triton.cdiv(outside, n) * triton.cdiv(inside, k), rows),
        gradient,
        x,
        rate,
        weight,
        weight if bias is None else bias,
        *gradient.stride()[:2],
        *x.stride()[:2],
        rate.stride(0),
        *weight.stride()[:2],
        0 if bias is None else bias.stride(0),
        samples,
        INSIDE=inside,
        OUTSIDE=outside,
        BIAS=bias is not None,
        PRECISION=precision,
        S=s,
        N=n,
        K=k,
        num_warps=2 if precision == "tf32x3" else 4,
        num_stages=1,
    )


class LinearLayer(torch.autograd.Function):
    """A layer whose own parameters need no gradient."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, precision: str) -> Tensor:
        """Apply it to ``[rows, samples, inside]``."""
        return forward(x, weight, bias, precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save what the backward pass needs."""
        _, weight, _, ctx.precision = inputs
        ctx.save_for_backward(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradient of the samples."""
        (weight,) = ctx.saved_tensors
        return backward(gradient, weight, ctx.precision), None, None, None


def apply(x: Tensor, weight: Tensor, bias: Tensor | None, precision: str) -> Tensor:
    """Apply each row's layer; can be differentiated once, with respect to the samples."""
    function: Any = LinearLayer.apply
    out: Tensor = function(x, weight, bias, precision)
    return out
