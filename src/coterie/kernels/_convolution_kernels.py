"""The two matrix products of a convolution, over windows of images that are gathered while they are multiplied.

Names of strides: ``image_each`` leads to the next image, ``image_line`` to the next line of it, ``image_place`` to the
next place on a line, ``image_channel`` to the next channel. ``M``, ``N`` and ``K`` are the sides of the tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coterie.kernels._tile_product import tile_product


@triton.jit
def windows_kernel(
    image,
    out,
    filters,
    bias,
    mask,
    bias_each,
    image_each,
    image_line,
    image_place,
    image_channel,
    out_each,
    out_line,
    out_place,
    mask_each,
    mask_line,
    mask_place,
    mask_channel,
    SAMPLES: tl.constexpr,
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
    BIAS: tl.constexpr,
    RELU: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Images with their filters: out[m, f] = sum over places and channels of window[m, k] filters[k, f]."""
    row = tl.program_id(1).to(tl.int64)  # offsets of many rows exceed 32 bits
    columns = tl.cdiv(FEATURES, N)
    m = (tl.program_id(0) // columns) * M + tl.arange(0, M)
    n = (tl.program_id(0) % columns) * N + tl.arange(0, N)
    total = SAMPLES * DOWN * ACROSS
    sample = m // (DOWN * ACROSS)
    top = (m // ACROSS) % DOWN
    side = m % ACROSS
    each = row * SAMPLES + sample
    inside = m < total
    terms = KERNEL_H * KERNEL_W * CHANNELS
    filters += row * terms * FEATURES
    sums = tl.zeros((M, N), dtype=tl.float32)
    for first in range(0, terms, K):
        k = first + tl.arange(0, K)
        channel = k % CHANNELS
        place = k // CHANNELS
        y = (top * STRIDE_H - PAD_H)[:, None] + ((place // KERNEL_W) * DILATION_H)[None, :]
        x = (side * STRIDE_W - PAD_W)[:, None] + ((place % KERNEL_W) * DILATION_W)[None, :]
        there = inside[:, None] & (k < terms)[None, :] & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
        at = (each * image_each)[:, None] + y * image_line + x * image_place + (channel * image_channel)[None, :]
        window = tl.load(image + at, mask=there, other=0.0)
        if MASKED:
            of = (each * mask_each)[:, None] + y * mask_line + x * mask_place + (channel * mask_channel)[None, :]
            window = tl.where(tl.load(mask + of, mask=there, other=0.0) > 0, window, 0.0)
        some = (k < terms)[:, None] & (n < FEATURES)[None, :]
        weights = tl.load(filters + k[:, None] * FEATURES + n[None, :], mask=some, other=0.0)
        sums = tile_product(window, weights, sums, PRECISION)
    if BIAS:
        sums += tl.load(bias + row * bias_each + n, mask=n < FEATURES, other=0.0)[None, :]
    if RELU:
        sums = tl.maximum(sums, 0.0)
    to = (each * out_each + top * out_line + side * out_place)[:, None] + n[None, :]
    tl.store(out + to, sums, mask=inside[:, None] & (n < FEATURES)[None, :])


@triton.jit
def filters_kernel(
    image,
    gradient,
    mask,
    out,
    out_bias,
    piece,
    rows,
    image_each,
    image_line,
    image_place,
    image_channel,
    gradient_each,
    gradient_line,
    gradient_place,
    gradient_feature,
    mask_each,
    mask_line,
    mask_place,
    mask_feature,
    SAMPLES: tl.constexpr,
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
    BIAS: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Gradient of the filters: out[f, k] = sum over windows m of gradient[m, f] window[m, k]."""
    row = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    columns = tl.cdiv(FEATURES, N)
    k = (tl.program_id(0) // columns) * M + tl.arange(0, M)
    n = (tl.program_id(0) % columns) * N + tl.arange(0, N)
    terms = KERNEL_H * KERNEL_W * CHANNELS
    channel = k % CHANNELS
    place = k // CHANNELS
    up = (place // KERNEL_W) * DILATION_H - PAD_H
    left = (place % KERNEL_W) * DILATION_W - PAD_W
    total = SAMPLES * DOWN * ACROSS
    first_terms = tl.program_id(0) // columns == 0
    sums = tl.zeros((M, N), dtype=tl.float32)
    shifts = tl.zeros((N,), dtype=tl.float32)
    end = tl.minimum((part + 1) * piece, total)
    for first in range(part * piece, end, K):
        m = first + tl.arange(0, K)
        each = row * SAMPLES + m // (DOWN * ACROSS)
        top = (m // ACROSS) % DOWN
        side = m % ACROSS
        y = (top * STRIDE_H)[None, :] + up[:, None]
        x = (side * STRIDE_W)[None, :] + left[:, None]
        there = (m < end)[None, :] & (k < terms)[:, None] & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
        at = (each * image_each)[None, :] + y * image_line + x * image_place + (channel * image_channel)[:, None]
        window = tl.load(image + at, mask=there, other=0.0)
        some = (m < end)[:, None] & (n < FEATURES)[None, :]
        of = (each * gradient_each + top * gradient_line + side * gradient_place)[:, None]
        step = tl.load(gradient + of + (n * gradient_feature)[None, :], mask=some, other=0.0)
        if MASKED:
            of = (each * mask_each + top * mask_line + side * mask_place)[:, None]
            step = tl.where(tl.load(mask + of + (n * mask_feature)[None, :], mask=some, other=0.0) > 0, step, 0.0)
        if BIAS and first_terms:  # the bias is the same for all terms: the programs of the first ones sum it
            shifts += tl.sum(step, 0)
        sums = tile_product(window, step, sums, PRECISION)
    # As the layer keeps its filters: [features, channels, kernel height, kernel width].
    row = part * rows + row
    to = row * FEATURES * terms + (n * terms)[None, :] + (channel * (KERNEL_H * KERNEL_W) + place)[:, None]
    tl.store(out + to, sums, mask=(k < terms)[:, None] & (n < FEATURES)[None, :])
    if BIAS and first_terms:
        tl.store(out_bias + row * FEATURES + n, shifts, mask=n < FEATURES)
