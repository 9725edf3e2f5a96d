"""The gradient of a convolution's filters from that of its pooled results, which is never written out.

Strides are called as in :mod:`coterie.kernels._convolution_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coterie.kernels._tile_product import tile_product


@triton.jit(do_not_specialize=["samples"])
def pooled_filters_kernel(
    image,
    gradient,
    where,
    out,
    out_bias,
    piece,
    rows,
    samples,
    image_each,
    image_line,
    image_place,
    image_channel,
    gradient_each,
    gradient_line,
    gradient_place,
    gradient_feature,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    CHANNELS: tl.constexpr,
    DOWN: tl.constexpr,
    ACROSS: tl.constexpr,
    FEATURES: tl.constexpr,
    KERNEL_H: tl.constexpr,
    KERNEL_W: tl.constexpr,
    STRIDE_H: tl.constexpr,
    STRIDE_W: tl.constexpr,
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    DILATION_H: tl.constexpr,
    DILATION_W: tl.constexpr,
    POOL_H: tl.constexpr,
    POOL_W: tl.constexpr,
    BIAS: tl.constexpr,
    LONG: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Gradient of the filters from that of pooled results: each of the pooled places takes its turn as the largest.

    DOWN and ACROSS count the pooled results; ``where`` lies side by side as [samples, DOWN, ACROSS, FEATURES].
    """
    row = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    columns = tl.cdiv(FEATURES, N)
    k = (tl.program_id(0) // columns) * M + tl.arange(0, M)
    n = (tl.program_id(0) % columns) * N + tl.arange(0, N)
    terms: tl.constexpr = KERNEL_H * KERNEL_W * CHANNELS
    channel = k % CHANNELS
    spot = k // CHANNELS
    up = spot // KERNEL_W * DILATION_H - PAD_H
    left = spot % KERNEL_W * DILATION_W - PAD_W
    shift = up * image_line + left * image_place + channel * image_channel
    image += row * samples * image_each
    gradient += row * samples * gradient_each
    where += row * samples * (DOWN * ACROSS * FEATURES)
    first_terms = tl.program_id(0) // columns == 0
    sums = tl.zeros((M, N), dtype=tl.float32)
    shifts = tl.zeros((N,), dtype=tl.float32)
    end = tl.minimum((part + 1) * piece, samples * DOWN * ACROSS)
    for first in range(part * piece, end, K):
        m = first + tl.arange(0, K)
        sample = m // (DOWN * ACROSS)
        at = m
        if LONG:
            sample = sample.to(tl.int64)
            at = m.to(tl.int64)
        line = m // ACROSS % DOWN
        column = m % ACROSS
        some = (m < end)[:, None] & (n < FEATURES)[None, :]
        place = tl.load(where + (at * FEATURES)[:, None] + n[None, :], mask=some, other=127)
        of = sample * gradient_each + line * gradient_line + column * gradient_place
        step = tl.load(gradient + of[:, None] + (n * gradient_feature)[None, :], mask=some, other=0.0)
        if BIAS and first_terms:
            shifts += tl.sum(tl.where(place < POOL_H * POOL_W, step, 0.0), 0)
        for one in tl.static_range(POOL_H * POOL_W):
            top = (line * POOL_H + one // POOL_W) * STRIDE_H
            side = (column * POOL_W + one % POOL_W) * STRIDE_W
            there = (m < end)[None, :]
            if terms % M != 0:
                there = there & (k < terms)[:, None]
            if PAD_H > 0 or PAD_W > 0:
                y = top[None, :] + up[:, None]
                x = side[None, :] + left[:, None]
                there = there & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
            corner = sample * image_each + top * image_line + side * image_place
            window = tl.load(image + shift[:, None] + corner[None, :], mask=there, other=0.0)
            sums = tile_product(window, tl.where(place == one, step, 0.0), sums, PRECISION)
    row = part * rows + row
    to = row * FEATURES * terms + (n * terms)[None, :] + (channel * (KERNEL_H * KERNEL_W) + spot)[:, None]
    tl.store(out + to, sums, mask=(k < terms)[:, None] & (n < FEATURES)[None, :])
    if BIAS and first_terms:
        tl.store(out_bias + row * FEATURES + n, shifts, mask=n < FEATURES)
