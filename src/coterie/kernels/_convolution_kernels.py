"""The two matrix products of a convolution, over windows of images that are gathered while they are multiplied.

Names of strides: ``image_each`` leads to the next image, ``image_line`` to the next line of it, ``image_place`` to the
next place on a line, ``image_channel`` to the next channel. ``M``, ``N`` and ``K`` are the sides of the tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coterie.kernels._tile_product import tile_product, upper_bits


@triton.jit
def places_on_image(first, last, STRIDE, PAD, DILATION, KERNEL, SIDE):
    """Return the first place of a filter that lies on the image for one of some windows, and the end of them."""
    begin = tl.maximum(0, tl.cdiv(PAD - last * STRIDE, DILATION))
    end = tl.minimum(KERNEL, (SIDE - 1 + PAD - first * STRIDE) // DILATION + 1)
    return begin, tl.maximum(begin, end)


@triton.jit(do_not_specialize=["samples"])
def windows_kernel(
    image,
    out,
    where,
    filters,
    low,
    bias,
    mask,
    samples,
    bias_each,
    image_each,
    image_line,
    image_place,
    image_channel,
    out_each,
    mask_each,
    mask_line,
    mask_place,
    mask_channel,
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
    LONG: tl.constexpr,
    BORDER: tl.constexpr,
    BY_SPOT: tl.constexpr,
    POOL_H: tl.constexpr,
    POOL_W: tl.constexpr,
    CHANNELS_FIRST: tl.constexpr,
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Images with their filters: out[m, f] = sum over places and channels of window[m, k] filters[f, k].

    DOWN and ACROSS count the results, after pooling over POOL_H x POOL_W of them.
    """
    row = tl.program_id(1).to(tl.int64)  # offsets of many rows exceed 32 bits; those within a row do where LONG says so
    columns = tl.cdiv(FEATURES, N)
    m = (tl.program_id(0) // columns) * M + tl.arange(0, M)
    n = (tl.program_id(0) % columns) * N + tl.arange(0, N)
    pooled: tl.constexpr = POOL_H * POOL_W
    total = samples * DOWN * ACROSS * pooled
    inside = m < total
    if BY_SPOT:  # all samples' windows of one spot side by side, which reach over the image's border together
        spot = m // samples
        sample = m % samples
    else:
        spot = m // pooled % (DOWN * ACROSS)
        sample = m // (DOWN * ACROSS * pooled)
    if LONG:
        sample = sample.to(tl.int64)
    top = (spot // ACROSS * POOL_H + m % pooled // POOL_W) * STRIDE_H - PAD_H
    side = (spot % ACROSS * POOL_W + m % POOL_W) * STRIDE_W - PAD_W
    terms: tl.constexpr = KERNEL_H * KERNEL_W * CHANNELS
    image += row * samples * image_each
    mask += row * samples * mask_each
    corner = sample * image_each + top * image_line + side * image_place
    of_mask = sample * mask_each + top * mask_line + side * mask_place
    of_filter = row * FEATURES * terms + n * terms
    sums = tl.zeros((M, N), dtype=tl.float32)
    chunks: tl.constexpr = CHANNELS // K
    count = tl.cdiv(terms, K)
    if BY_SPOT:  # only the places of the filter that lie on the image for some window of the tile
        one = (tl.program_id(0) // columns) * M // samples
        other = tl.minimum((tl.program_id(0) // columns) * M + M, total) - 1
        other = other // samples
        upper = one // ACROSS
        lower = other // ACROSS
        up_begin, up_end = places_on_image(upper, lower, STRIDE_H, PAD_H, DILATION_H, KERNEL_H, HEIGHT)
        same = upper == lower
        leftmost = tl.where(same, one % ACROSS, 0)
        rightmost = tl.where(same, other % ACROSS, ACROSS - 1)
        left_begin, left_end = places_on_image(leftmost, rightmost, STRIDE_W, PAD_W, DILATION_W, KERNEL_W, WIDTH)
        wide = left_end - left_begin
        count = (up_end - up_begin) * wide * chunks
    for number in range(0, count):
        if BY_SPOT:
            place = (up_begin + number // chunks // wide) * KERNEL_W + left_begin + number // chunks % wide
            first = place * CHANNELS + number % chunks * K
            channel = number % chunks * K + tl.arange(0, K)
        elif CHANNELS % K == 0:  # one place of the filter at a time: its channels lie side by side
            first = number * K
            place = number // chunks
            channel = number % chunks * K + tl.arange(0, K)
        else:
            first = number * K
            place = (first + tl.arange(0, K)) // CHANNELS
            channel = (first + tl.arange(0, K)) % CHANNELS
        k = first + tl.arange(0, K)
        up = place // KERNEL_W * DILATION_H
        left = place % KERNEL_W * DILATION_W
        there = inside[:, None]
        if BORDER:
            if CHANNELS % K == 0:
                y = top + up
                x = side + left
                there = (inside & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH))[:, None]
            else:
                y = top[:, None] + up[None, :]
                x = side[:, None] + left[None, :]
                there = there & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
        if terms % K != 0:
            there = there & (k < terms)[None, :]
        step = up * image_line + left * image_place + channel * image_channel
        window = tl.load(image + corner[:, None] + step[None, :], mask=there, other=0.0)
        if MASKED:
            step = up * mask_line + left * mask_place + channel * mask_channel
            kept = tl.load(mask + of_mask[:, None] + step[None, :], mask=there, other=0.0)
            window = tl.where(kept > 0, window, 0.0)
        some = (n < FEATURES)[None, :]
        if terms % K != 0:
            some = some & (k < terms)[:, None]
        at = of_filter[None, :] + k[:, None]
        weights = tl.load(filters + at, mask=some, other=0.0)
        if PRECISION == "tf32x3":
            # Three products of numbers with 11 bits, the smallest first. The filters were split beforehand, for those
            # that the matrix units take from shared memory cannot be changed on their way there.
            rest = tl.load(low + at, mask=some, other=0.0)
            high = upper_bits(window)
            tile = tl.dot(window - high, weights, input_precision="tf32")
            tile = tl.dot(high, rest, tile, input_precision="tf32")
            # The units cut their sums off where float32 would round: a sum for each tile, added outside of them.
            sums += tl.dot(high, weights, tile, input_precision="tf32")
        else:
            sums = tile_product(window, weights, sums, PRECISION)
    if BIAS:
        sums += tl.load(bias + row * bias_each + n, mask=n < FEATURES, other=0.0)[None, :]
    out += row * samples * out_each
    if pooled > 1:
        windows = tl.reshape(sums, (M // pooled, pooled, N))
        best, place = tl.max(windows, 1, return_indices=True, return_indices_tie_break_left=True)
        if RELU:
            place = tl.where(best <= 0, 127, place)  # no place: ReLU lets no gradient through
            best = tl.where(best <= 0, 0.0, best)
        p = (tl.program_id(0) // columns) * (M // pooled) + tl.arange(0, M // pooled)
        stored = (p < samples * DOWN * ACROSS)[:, None] & (n < FEATURES)[None, :]
        sample = p // (DOWN * ACROSS)
        if LONG:
            sample = sample.to(tl.int64)
        of = row * samples * (DOWN * ACROSS * FEATURES) + p * FEATURES
        tl.store(where + of[:, None] + n[None, :], place.to(tl.int8), mask=stored)
        if CHANNELS_FIRST:
            to = (sample * out_each + p % (DOWN * ACROSS))[:, None] + (n * (DOWN * ACROSS))[None, :]
        else:
            to = (sample * out_each + p % (DOWN * ACROSS) * FEATURES)[:, None] + n[None, :]
        tl.store(out + to, best, mask=stored)
    else:
        if RELU:
            sums = tl.maximum(sums, 0.0)
        to = sample * out_each + spot * FEATURES
        tl.store(out + to[:, None] + n[None, :], sums, mask=inside[:, None] & (n < FEATURES)[None, :])


@triton.jit(do_not_specialize=["samples"])
def filters_kernel(
    image,
    gradient,
    mask,
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
    mask_each,
    mask_line,
    mask_place,
    mask_feature,
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
    LONG: tl.constexpr,
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
    terms: tl.constexpr = KERNEL_H * KERNEL_W * CHANNELS
    channel = k % CHANNELS
    place = k // CHANNELS
    up = place // KERNEL_W * DILATION_H - PAD_H
    left = place % KERNEL_W * DILATION_W - PAD_W
    shift = up * image_line + left * image_place + channel * image_channel
    image += row * samples * image_each
    gradient += row * samples * gradient_each
    mask += row * samples * mask_each
    first_terms = tl.program_id(0) // columns == 0
    sums = tl.zeros((M, N), dtype=tl.float32)
    shifts = tl.zeros((N,), dtype=tl.float32)
    end = tl.minimum((part + 1) * piece, samples * DOWN * ACROSS)
    for first in range(part * piece, end, K):
        m = first + tl.arange(0, K)
        sample = m // (DOWN * ACROSS)
        if LONG:
            sample = sample.to(tl.int64)
        line = m // ACROSS % DOWN
        column = m % ACROSS
        there = (m < end)[None, :]
        if terms % M != 0:
            there = there & (k < terms)[:, None]
        if PAD_H > 0 or PAD_W > 0:
            y = (line * STRIDE_H)[None, :] + up[:, None]
            x = (column * STRIDE_W)[None, :] + left[:, None]
            there = there & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
        corner = sample * image_each + line * STRIDE_H * image_line + column * STRIDE_W * image_place
        window = tl.load(image + shift[:, None] + corner[None, :], mask=there, other=0.0)
        some = (m < end)[:, None] & (n < FEATURES)[None, :]
        of = sample * gradient_each + line * gradient_line + column * gradient_place
        step = tl.load(gradient + of[:, None] + (n * gradient_feature)[None, :], mask=some, other=0.0)
        if MASKED:
            of = sample * mask_each + line * mask_line + column * mask_place
            kept = tl.load(mask + of[:, None] + (n * mask_feature)[None, :], mask=some, other=0.0)
            step = tl.where(kept > 0, step, 0.0)
        if BIAS and first_terms:  # the bias is the same for all terms: the programs of the first ones sum it
            shifts += tl.sum(step, 0)
        sums = tile_product(window, step, sums, PRECISION)
    # As the layer keeps its filters: [features, channels, kernel height, kernel width].
    row = part * rows + row
    to = row * FEATURES * terms + (n * terms)[None, :] + (channel * (KERNEL_H * KERNEL_W) + place)[:, None]
    tl.store(out + to, sums, mask=(k < terms)[:, None] & (n < FEATURES)[None, :])
    if BIAS and first_terms:
        tl.store(out_bias + row * FEATURES + n, shifts, mask=n < FEATURES)


@triton.jit
def arrange_kernel(
    weight,
    out,
    low,
    weight_row,
    weight_to,
    weight_from,
    TO: tl.constexpr,
    FROM: tl.constexpr,
    PLACES: tl.constexpr,
    TURNED: tl.constexpr,
    SPLIT: tl.constexpr,
    B: tl.constexpr,
    P: tl.constexpr,
):
    """Write filters as [to, places, from], turned by half a turn and split into upper and lower bits if wanted."""
    row = tl.program_id(1).to(tl.int64)
    to = tl.program_id(0) // tl.cdiv(FROM, B)
    source = tl.program_id(0) % tl.cdiv(FROM, B) * B + tl.arange(0, B)
    place = tl.arange(0, P)
    there = (source < FROM)[:, None] & (place < PLACES)[None, :]
    at = row * weight_row + to * weight_to + source[:, None] * weight_from + place[None, :]
    values = tl.load(weight + at, mask=there, other=0.0)
    if TURNED:
        place = PLACES - 1 - place
    at = (row * TO + to) * (PLACES * FROM) + place[None, :] * FROM + source[:, None]
    if SPLIT:
        upper = upper_bits(values)
        tl.store(low + at, values - upper, mask=there)
        values = upper
    tl.store(out + at, values, mask=there)
