"""A convolution whose results are pooled: its forward pass, and the gradient of its filters.

A cell is a pooled result, and its places are the results that it is the largest of. Each place is a sum of its own, so
that the largest is found number by number. Strides are called as in :mod:`coterie.kernels._convolution_kernels`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coterie.kernels._tile_product import appended, window_product


@triton.jit(do_not_specialize=["samples"])
def pooled_windows_kernel(
    image,
    out,
    where,
    filters,
    low,
    bias,
    samples,
    bias_each,
    image_each,
    image_line,
    image_place,
    image_channel,
    out_each,
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
    LONG: tl.constexpr,
    BORDER: tl.constexpr,
    POOL_H: tl.constexpr,
    POOL_W: tl.constexpr,
    CHANNELS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Images with their filters: the largest of each cell, and its place. DOWN and ACROSS count the cells."""
    row = tl.program_id(1).to(tl.int64)
    columns = tl.cdiv(FEATURES, N)
    p = (tl.program_id(0) // columns) * M + tl.arange(0, M)
    n = (tl.program_id(0) % columns) * N + tl.arange(0, N)
    inside = p < samples * DOWN * ACROSS
    sample = p // (DOWN * ACROSS)
    cell = p % (DOWN * ACROSS)
    if LONG:
        sample = sample.to(tl.int64)
    top = cell // ACROSS * (POOL_H * STRIDE_H) - PAD_H
    side = cell % ACROSS * (POOL_W * STRIDE_W) - PAD_W
    image += row * samples * image_each
    corner = sample * image_each + top * image_line + side * image_place
    terms: tl.constexpr = KERNEL_H * KERNEL_W * CHANNELS
    of_filter = row * FEATURES * terms + n * terms
    chunks: tl.constexpr = CHANNELS // K
    sums = ()
    for _one in tl.static_range(POOL_H * POOL_W):
        sums = appended(sums, tl.zeros((M, N), dtype=tl.float32))
    for number in range(0, tl.cdiv(terms, K)):
        k = number * K + tl.arange(0, K)
        if CHANNELS % K == 0:  # one place of the filter at a time: its channels lie side by side
            spot = number // chunks
            channel = number % chunks * K + tl.arange(0, K)
        else:
            spot = k // CHANNELS
            channel = k % CHANNELS
        up = spot // KERNEL_W * DILATION_H
        left = spot % KERNEL_W * DILATION_W
        some = (n < FEATURES)[None, :]
        if terms % K != 0:
            some = some & (k < terms)[:, None]
        at = of_filter[None, :] + k[:, None]
        weights = tl.load(filters + at, mask=some, other=0.0)
        rest = weights
        if PRECISION == "tf32x3":
            rest = tl.load(low + at, mask=some, other=0.0)
        step = up * image_line + left * image_place + channel * image_channel
        new = ()
        for one in tl.static_range(POOL_H * POOL_W):
            there = inside[:, None]
            if BORDER:
                if CHANNELS % K == 0:
                    y = top + (up + one // POOL_W * STRIDE_H)
                    x = side + (left + one % POOL_W * STRIDE_W)
                    there = (inside & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH))[:, None]
                else:
                    y = top[:, None] + (up + one // POOL_W * STRIDE_H)[None, :]
                    x = side[:, None] + (left + one % POOL_W * STRIDE_W)[None, :]
                    there = there & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
            if terms % K != 0:
                there = there & (k < terms)[None, :]
            begin = corner + (one // POOL_W * STRIDE_H * image_line + one % POOL_W * STRIDE_W * image_place)
            window = tl.load(image + begin[:, None] + step[None, :], mask=there, other=0.0)
            new = appended(new, window_product(window, weights, rest, sums[one], PRECISION))
        sums = new
    shift = tl.zeros((N,), dtype=tl.float32)
    if BIAS:
        shift = tl.load(bias + row * bias_each + n, mask=n < FEATURES, other=0.0)
    best = tl.full((M, N), float("-inf"), dtype=tl.float32)
    place = tl.zeros((M, N), dtype=tl.int8)
    for one in tl.static_range(POOL_H * POOL_W):
        other = sums[one] + shift[None, :]
        larger = (other > best) | (other != other)  # NaN wins, as in PyTorch
        place = tl.where(larger, one, place).to(tl.int8)
        best = tl.where(larger, other, best)
    if RELU:
        place = tl.where(best <= 0, 127, place).to(tl.int8)  # no place: ReLU lets no gradient through
        best = tl.where(best <= 0, 0.0, best)
    stored = inside[:, None] & (n < FEATURES)[None, :]
    at = p.to(tl.int64) if LONG else p
    of = row * samples * (DOWN * ACROSS * FEATURES) + at * FEATURES
    tl.store(where + of[:, None] + n[None, :], place, mask=stored)
    if CHANNELS_FIRST:
        to = (sample * out_each + cell)[:, None] + (n * (DOWN * ACROSS))[None, :]
    else:
        to = (sample * out_each + cell * FEATURES)[:, None] + n[None, :]
    tl.store(out + row * samples * out_each + to, best, mask=stored)


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
    PAD_H: tl.constexpr,
    PAD_W: tl.constexpr,
    POOL_H: tl.constexpr,
    POOL_W: tl.constexpr,
    BIAS: tl.constexpr,
    LONG: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
):
    """Gradient of one channel's filters from that of pooled results, without matrix units: in float32 always.

    Each number of the filter is a sum of its own, over M cells at a time; a pixel is read once for all that it is
    multiplied with. DOWN and ACROSS count the cells; ``where`` lies side by side as [samples, DOWN, ACROSS, FEATURES].
    """
    row = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    columns = tl.cdiv(FEATURES, N)
    channel = tl.program_id(0) // columns
    n = (tl.program_id(0) % columns) * N + tl.arange(0, N)
    image += row * samples * image_each + channel * image_channel
    gradient += row * samples * gradient_each
    where += row * samples * (DOWN * ACROSS * FEATURES)
    taps: tl.constexpr = KERNEL_H * KERNEL_W
    sums = ()
    for _tap in tl.static_range(taps):
        sums = appended(sums, tl.zeros((M, N), dtype=tl.float32))
    shifts = tl.zeros((M, N), dtype=tl.float32)
    end = tl.minimum((part + 1) * piece, samples * DOWN * ACROSS)
    for first in range(part * piece, end, M):
        p = first + tl.arange(0, M)
        inside = p < end
        sample = p // (DOWN * ACROSS)
        at = p
        if LONG:
            sample = sample.to(tl.int64)
            at = p.to(tl.int64)
        line = p // ACROSS % DOWN
        column = p % ACROSS
        some = inside[:, None] & (n < FEATURES)[None, :]
        of = sample * gradient_each + line * gradient_line + column * gradient_place
        step = tl.load(gradient + of[:, None] + (n * gradient_feature)[None, :], mask=some, other=0.0)
        place = tl.load(where + (at * FEATURES)[:, None] + n[None, :], mask=some, other=127)
        own = ()
        for one in tl.static_range(POOL_H * POOL_W):
            own = appended(own, tl.where(place == one, step, 0.0))
        if BIAS:
            shifts += tl.where(place < POOL_H * POOL_W, step, 0.0)
        top = line * POOL_H - PAD_H
        side = column * POOL_W - PAD_W
        corner = image + (sample * image_each + top * image_line + side * image_place)
        for y in tl.static_range(KERNEL_H + POOL_H - 1):
            for x in tl.static_range(KERNEL_W + POOL_W - 1):
                there = inside
                if PAD_H > 0 or PAD_W > 0:
                    there = there & (top + y >= 0) & (top + y < HEIGHT) & (side + x >= 0) & (side + x < WIDTH)
                pixel = tl.load(corner + (y * image_line + x * image_place), mask=there, other=0.0)[:, None]
                new = ()
                for tap in tl.static_range(taps):
                    if (
                        y >= tap // KERNEL_W
                        and y < tap // KERNEL_W + POOL_H
                        and x >= tap % KERNEL_W
                        and x < tap % KERNEL_W + POOL_W
                    ):
                        new = appended(
                            new, sums[tap] + pixel * own[(y - tap // KERNEL_W) * POOL_W + x - tap % KERNEL_W]
                        )
                    else:
                        new = appended(new, sums[tap])
                sums = new
    row = part * rows + row
    to = out + row * FEATURES * CHANNELS * taps + n * (CHANNELS * taps) + channel * taps
    for tap in tl.static_range(taps):
        tl.store(to + tap, tl.sum(sums[tap], 0), mask=n < FEATURES)
    if BIAS and channel == 0:
        tl.store(out_bias + row * FEATURES + n, tl.sum(shifts, 0), mask=n < FEATURES)
