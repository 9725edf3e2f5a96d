"""The launches of a convolution's products of images with filters: tiles, arranged filters, pooled results."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from coterie.kernels import launch
from coterie.kernels._convolution_kernels import arrange_kernel, windows_kernel
from coterie.kernels._pooled_kernels import pooled_windows_kernel
from coterie.kernels._tile_product import tile_side


class ConvolutionGeometry(NamedTuple):
    """The size and position of a convolution's windows.

    Parameters
    ----------
    kernel
        Height and width of the filters.
    stride
        Distance from one window to the next.
    padding
        Zeros around the image.
    dilation
        Distance between the places of a window.
    """

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]


class Tiles(NamedTuple):
    """How a product is cut into tiles.

    Parameters
    ----------
    m
        Rows of a tile of the result.
    n
        Columns of it.
    k
        Terms that are summed at a time.
    warps
        Warps that compute it.
    stages
        Tiles that are fetched ahead.
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int


def places_of(image: Tensor) -> tuple[int, int, int, int]:
    """Return the strides of an image ``[samples, channels, height, width]`` in the order of the kernels."""
    each, channel, line, place = image.stride()
    return each, line, place, channel


def tiles_of(kind: str, features: int, terms: int, precision: str) -> Tiles:
    """Return the tiles for ``"forward"``, ``"images"`` or ``"filters"``: what is computed."""
    # Timed on an H200. The filters' gradient gets few warps: with four, Triton uses Hopper's warp-group products, which
    # need both factors transposed first (4.9 instead of 1.0 ms in TF32).
    exact = precision == "tf32x3"
    if kind == "filters" and terms < 64:
        return Tiles(tile_side(16, terms, 32), tile_side(16, features, 32), 32, 1, 3)
    if kind == "filters":
        if features <= 32:
            return Tiles(32, tile_side(16, features, 32), 32 if exact else 64, 1, 2)
        return Tiles(64, 64, 32 if exact else 64, 2, 3 if exact else 2)
    if terms <= 16 and not exact:
        return Tiles(128, tile_side(16, features, 32), 16, 4, 1)
    if terms < 64:
        return Tiles(128, tile_side(16, features, 32), 32, 4, 3)
    if kind == "images":
        # With 16 channels, 16 terms are of one place of the filter and lie side by side; 32 are not.
        return Tiles(64 if exact else 128, tile_side(16, features, 32), 32 if exact or terms % 32 == 0 else 16, 4, 3)
    if exact:
        return Tiles(128, tile_side(16, features, 64), 32, 4, 3)
    # With few features a tile of 64 terms takes a third longer than two of 32.
    return Tiles(128, 64, 64, 4, 2) if features > 32 else Tiles(128, tile_side(16, features, 32), 32, 4, 2)


def pooled_tiles_of(features: int, channels: int, terms: int, of_cell: int, precision: str) -> Tiles:
    """Return the tiles of a convolution whose results are pooled; ``m`` counts cells, of so many results each."""
    # Timed on an H200, 6,400 images: 3x3 filters on one channel 1.03 to 0.50 ms (float32 1.47 to 0.69), on 16 channels
    # 0.22 to 0.14 (0.34 to 0.27), on 32 as before (1.02 to 0.95).
    n = tile_side(16, features, 64 if of_cell <= 4 else 32)  # each result has sums of its own, in registers
    if terms <= 16:
        return Tiles(64 if precision == "tf32x3" or of_cell > 4 else 128, n, 16, 4, 2)
    k = 16 if channels % 32 == 16 else 32
    return Tiles(64, n, k, 4, 3 if k == 16 else 2)


def constants_of(shape: ConvolutionGeometry, tiles: Tiles) -> dict[str, int]:
    """Give what is compiled into a kernel of a convolution's windows and of how it is cut."""
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = shape
    return {
        "M": tiles.m,
        "N": tiles.n,
        "K": tiles.k,
        "num_warps": tiles.warps,
        "num_stages": tiles.stages,
        "KERNEL_H": kh,
        "KERNEL_W": kw,
        "STRIDE_H": sh,
        "STRIDE_W": sw,
        "PAD_H": ph,
        "PAD_W": pw,
        "DILATION_H": dh,
        "DILATION_W": dw,
    }


def sizes_of(image: Tensor, features: int, results: tuple[int, int], bias: bool) -> dict[str, int]:
    """Give what is compiled into a kernel of the sizes of its images and results."""
    _, channels, height, width = image.shape
    return {
        "HEIGHT": height,
        "WIDTH": width,
        "CHANNELS": channels,
        "DOWN": results[0],
        "ACROSS": results[1],
        "FEATURES": features,
        "BIAS": bias,
    }


class Filters(NamedTuple):
    """Filters as the kernels read them.

    Parameters
    ----------
    upper
        ``[rows, results, places, inputs]``.
    lower
        What remains of numbers that were cut to their 11 leading bits; the same as ``upper`` where none were cut.
    """

    upper: Tensor
    lower: Tensor


def arranged(weight: Tensor, precision: str, turned: bool = False) -> Filters:
    """Arrange filters ``[rows, features, channels, height, width]`` for a convolution with them.

    With ``turned``, for the gradient of the images: by half a turn, from features to channels.
    """
    weight = weight if weight[0].is_contiguous() else weight.contiguous()
    rows, features, channels, height, width = weight.shape
    places = height * width
    to, source = (channels, features) if turned else (features, channels)
    row, feature, channel = weight.stride()[:3]
    upper = weight.new_empty(rows, to, places, source)
    split = precision == "tf32x3"
    lower = torch.empty_like(upper) if split else upper
    block = tile_side(1, source, 32)
    launch(
        arrange_kernel,
        (to * triton.cdiv(source, block), rows),
        weight,
        upper,
        lower,
        row,
        channel if turned else feature,
        feature if turned else channel,
        TO=to,
        FROM=source,
        PLACES=places,
        TURNED=turned,
        SPLIT=split,
        B=block,
        P=tile_side(1, places, places * 2),
    )
    return Filters(upper, lower)


class Pooling(NamedTuple):
    """Max pooling of a convolution's results, over windows that lie side by side.

    Parameters
    ----------
    window
        Height and width of the windows.
    channels_first
        Whether the pooled images have their channels first in memory, to be flattened; otherwise last.
    """

    window: tuple[int, int] = (1, 1)
    channels_first: bool = False


def images_with_filters(
    image: Tensor,
    filters: Filters,
    bias: Tensor | None,
    shape: ConvolutionGeometry,
    size: tuple[int, int],
    *,
    relu: bool = False,
    mask: Tensor | None = None,
    precision: str = "tf32x3",
    kind: str = "forward",
    tiles: Tiles | None = None,
) -> Tensor:
    """Convolve images ``[rows × samples, channels, height, width]`` with :func:`arranged` filters.

    Where ``mask``, which is shaped like the image, is not above zero, the image counts as zero. The result is
    ``[rows × samples, features, *size]`` with channels last in memory.
    """
    rows, features, places, channels = filters.upper.shape
    everything, sides = len(image), (image.shape[2], image.shape[3])
    samples, (down, across) = everything // rows, size
    out = image.new_empty(everything, down, across, features)
    tiles = tiles or tiles_of(kind, features, places * channels, precision)
    grid = (triton.cdiv(samples * down * across, tiles.m) * triton.cdiv(features, tiles.n), rows)
    of_mask = image if mask is None else mask
    border = _border(shape, size, sides)
    launch(
        windows_kernel,
        grid,
        image,
        out,
        filters.upper,
        filters.lower,
        filters.upper if bias is None else bias,
        of_mask,
        samples,
        0 if bias is None else bias.stride(0),
        *places_of(image),
        out.stride(0),
        *places_of(of_mask),
        RELU=relu,
        MASKED=mask is not None,
        LONG=is_long(samples, image, out, of_mask),
        BORDER=border > 0,
        BY_SPOT=border >= 0.2 and channels % tiles.k == 0,
        PRECISION=precision,
        **sizes_of(image, features, (down, across), bias is not None),
        **constants_of(shape, tiles),
    )
    return out.permute(0, 3, 1, 2)


def pooled_images_with_filters(
    image: Tensor,
    filters: Filters,
    bias: Tensor | None,
    shape: ConvolutionGeometry,
    size: tuple[int, int],
    pooling: Pooling,
    *,
    relu: bool = False,
    precision: str = "tf32x3",
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve in the same way, and give the largest results of each pooling window, and their places in it."""
    rows, features, places, channels = filters.upper.shape
    everything, sides = len(image), (image.shape[2], image.shape[3])
    samples, first = everything // rows, pooling.channels_first
    down, across = (side // window for side, window in zip(size, pooling.window, strict=True))
    out = image.new_empty((everything, features, down, across) if first else (everything, down, across, features))
    where = torch.empty(everything, down, across, features, dtype=torch.int8, device=image.device)
    of_cell = pooling.window[0] * pooling.window[1]
    tiles = tiles or pooled_tiles_of(features, channels, places * channels, of_cell, precision)
    launch(
        pooled_windows_kernel,
        (triton.cdiv(samples * down * across, tiles.m) * triton.cdiv(features, tiles.n), rows),
        image,
        out,
        where,
        filters.upper,
        filters.lower,
        filters.upper if bias is None else bias,
        samples,
        0 if bias is None else bias.stride(0),
        *places_of(image),
        out.stride(0),
        RELU=relu,
        LONG=is_long(samples, image, out),
        BORDER=_border(shape, size, sides) > 0,
        POOL_H=pooling.window[0],
        POOL_W=pooling.window[1],
        CHANNELS_FIRST=first,
        PRECISION=precision,
        **sizes_of(image, features, (down, across), bias is not None),
        **constants_of(shape, tiles),
    )
    return (out if first else out.permute(0, 3, 1, 2)), where


def _border(shape: ConvolutionGeometry, size: tuple[int, int], sides: tuple[int, int]) -> float:
    """Return which part of all windows' places lies beyond the images; where it is large, skipping them pays."""
    share = 1.0
    for kernel, stride, pad, dilation, count, side in zip(*shape, size, sides, strict=True):
        starts = [at * stride - pad for at in range(count)]
        on_image = sum(0 <= start + place * dilation < side for start in starts for place in range(kernel))
        share *= on_image / (kernel * count)
    return 1 - share


def is_long(samples: int, *tensors: Tensor) -> bool:
    """Return whether offsets within the samples of a row exceed 32 bits."""
    return any(samples * tensor.stride(0) >= 2**31 for tensor in tensors)
