"""The two matrix products of a convolution, over windows of images that are gathered while they are multiplied.

Names of strides: ``image_each`` leads to the next image, ``image_line`` to the next line of it, ``image_place`` to the
next place on a line, ``image_channel`` to the next channel. ``M``, ``N`` and ``K`` are the sides of the tiles.
"""

from __future__ import annotations

import triton
import triton.language as tl

from coterie.kernels._tile_product import tile_product, upper_bits, window_product


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
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
):
    """Images with their filters: out[m, f] = sum over places and channels of window[m, k] filters[f, k]."""
    row = tl.program_id(1).to(tl.int64)  # offsets of many rows exceed 32 bits; those within a row do where LONG says so
    columns = tl.cdiv(FEATURES, N)
    m = (tl.program_id(0) // columns) * M + tl.arange(0, M)
    n = (tl.program_id(0) % columns) * N + tl.arange(0, N)
    total = samples * DOWN * ACROSS
    inside = m < total
    if BY_SPOT:  # all samples' windows of one spot side by side, which reach over the image's border together
        spot = m // samples
        sample = m % samples
    else:
        spot = m % (DOWN * ACROSS)
        sample = m // (DOWN * ACROSS)
    if LONG:
        sample = sample.to(tl.int64)
    top = spot // ACROSS * STRIDE_H - PAD_H
    side = spot % ACROSS * STRIDE_W - PAD_W
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
        rest = weights
        if PRECISION == "tf32x3":
            rest = tl.load(low + at, mask=some, other=0.0)
        sums = window_product(window, weights, rest, sums, PRECISION)
    if BIAS:
        sums += tl.load(bias + row * bias_each + n, mask=n < FEATURES, other=0.0)[None, :]
    if RELU:
        sums = tl.where(sums <= 0, 0.0, sums)  # NaN stays
    out += row * samples * out_each
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
    PRECISION: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ON_LINE: tl.constexpr,
):
    """Gradient of the filters: out[f, k] = sum over windows m of gradient[m, f] window[m, k].

    K windows are a block of ON_LINE results on each of some lines: where they lie within it is reckoned once for all.
    ``piece`` counts blocks.
    """
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
    lines: tl.constexpr = K // ON_LINE
    down = tl.arange(0, K) // ON_LINE
    right = tl.arange(0, K) % ON_LINE
    shift = up * image_line + left * image_place + channel * image_channel
    of_window = shift[:, None] + (down * STRIDE_H * image_line + right * STRIDE_W * image_place)[None, :]
    of_step = (down * gradient_line + right * gradient_place)[:, None] + (n * gradient_feature)[None, :]
    of_mask = (down * mask_line + right * mask_place)[:, None] + (n * mask_feature)[None, :]
    image += row * samples * image_each
    gradient += row * samples * gradient_each
    mask += row * samples * mask_each
    first_terms = tl.program_id(0) // columns == 0
    sums = tl.zeros((M, N), dtype=tl.float32)
    shifts = tl.zeros((N,), dtype=tl.float32)
    high = tl.cdiv(DOWN, lines)
    wide = tl.cdiv(ACROSS, ON_LINE)
    end = tl.minimum((part + 1) * piece, samples * high * wide)
    for number in range(part * piece, end):
        sample = tl.cast(number // (high * wide), tl.int64)
        line = number // wide % high * lines
        column = number % wide * ON_LINE
        kept = right + column < ACROSS
        if DOWN % lines != 0:
            kept = kept & (down + line < DOWN)
        there = kept[None, :]
        if terms % M != 0:
            there = there & (k < terms)[:, None]
        if PAD_H > 0:
            y = up[:, None] + ((down + line) * STRIDE_H)[None, :]
            there = there & (y >= 0) & (y < HEIGHT)
        if PAD_W > 0:
            x = left[:, None] + ((right + column) * STRIDE_W)[None, :]
            there = there & (x >= 0) & (x < WIDTH)
        begin = image + (sample * image_each + line * STRIDE_H * image_line + column * STRIDE_W * image_place)
        window = tl.load(begin + of_window, mask=there, other=0.0)
        some = kept[:, None] & (n < FEATURES)[None, :]
        begin = gradient + (sample * gradient_each + line * gradient_line + column * gradient_place)
        step = tl.load(begin + of_step, mask=some, other=0.0)
        if MASKED:
            begin = mask + (sample * mask_each + line * mask_line + column * mask_place)
            step = tl.where(tl.load(begin + of_mask, mask=some, other=0.0) > 0, step, 0.0)
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
