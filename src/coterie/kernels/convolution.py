"""Convolution of each row's samples with its own filters, as products of matrices that are never written out.

A convolution is a product of the matrix of all windows of the images with the matrix of filters. The windows of a 3x3
filter take nine times the memory of the images, to be written and read again. So each tile of them is gathered when it
is multiplied. Images may have any strides; results have channels last. Programs never add to the same number, so
results repeat bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from coterie.kernels import launch
from coterie.kernels._convolution_kernels import arrange_kernel, filters_kernel, windows_kernel

_PROGRAMS = 1056
"""Programs that keep a device busy: eight on each of the 132 processors of an H200, most of which idle with 250."""


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


def _places(image: Tensor) -> tuple[int, int, int, int]:
    """Return the strides of an image ``[samples, channels, height, width]`` in the order of the kernels."""
    each, channel, line, place = image.stride()
    return each, line, place, channel


def _power(least: int, number: int, most: int) -> int:
    return max(least, min(most, 1 << max(0, number - 1).bit_length()))


def tiles_of(kind: str, features: int, terms: int, precision: str) -> Tiles:
    """Return the tiles for ``"forward"``, ``"images"`` or ``"filters"``: what is computed."""
    # Timed on an H200. The filters' gradient gets few warps: with four, Triton uses Hopper's warp-group products, which
    # need both factors transposed first (0.59 instead of 0.22 ms in TF32).
    exact = precision == "tf32x3"
    if kind == "filters" and terms < 64:
        return Tiles(_power(16, terms, 32), _power(16, features, 32), 32 if exact else 16, 1, 3)
    if kind == "filters":
        return Tiles(64, _power(16, features, 64), 32 if exact else 64, 2, 3 if exact else 2)
    if terms < 64:
        return Tiles(128, _power(16, features, 32), 32, 4, 3)
    if kind == "images":
        return Tiles(64 if exact else 128, _power(16, features, 32), 32, 4, 3)
    return Tiles(128, _power(16, features, 64), 32, 4, 3) if exact else Tiles(128, _power(16, features, 64), 64, 4, 2)


def _constants(shape: ConvolutionGeometry) -> dict[str, int]:
    (kh, kw), (sh, sw), (ph, pw), (dh, dw) = shape
    return {
        "KERNEL_H": kh,
        "KERNEL_W": kw,
        "STRIDE_H": sh,
        "STRIDE_W": sw,
        "PAD_H": ph,
        "PAD_W": pw,
        "DILATION_H": dh,
        "DILATION_W": dw,
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
    block = _power(1, source, 32)
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
        P=_power(1, places, places * 2),
    )
    return Filters(upper, lower)


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

    Where ``mask``, which is shaped like the image, is not above
    zero, the image counts as zero. The result is ``[rows × samples, features, *size]`` with channels last in memory.
    """
    rows, features, places, channels = filters.upper.shape
    terms = places * channels
    everything, _, height, width = image.shape
    samples = everything // rows
    out = image.new_empty(everything, *size, features)
    tiles = tiles or tiles_of(kind, features, terms, precision)
    grid = (triton.cdiv(samples * size[0] * size[1], tiles.m) * triton.cdiv(features, tiles.n), rows)
    of_mask = image if mask is None else mask
    by_spot = channels % tiles.k == 0 and _over_the_border(shape, size, (height, width))
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
        *_places(image),
        out.stride(0),
        *_places(of_mask),
        HEIGHT=height,
        WIDTH=width,
        CHANNELS=channels,
        DOWN=size[0],
        ACROSS=size[1],
        FEATURES=features,
        **_constants(shape),
        BIAS=bias is not None,
        RELU=relu,
        MASKED=mask is not None,
        LONG=_is_long(samples, image, out, of_mask),
        BY_SPOT=by_spot,
        PRECISION=precision,
        M=tiles.m,
        N=tiles.n,
        K=tiles.k,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    return out.permute(0, 3, 1, 2)


def _over_the_border(shape: ConvolutionGeometry, size: tuple[int, int], sides: tuple[int, int]) -> bool:
    """Return whether a fifth or more of all windows' places lie beyond the images, so that skipping them pays."""
    share = 1.0
    for kernel, stride, pad, dilation, count, side in zip(*shape, size, sides, strict=True):
        starts = [at * stride - pad for at in range(count)]
        on_image = sum(0 <= start + place * dilation < side for start in starts for place in range(kernel))
        share *= on_image / (kernel * count)
    return share <= 0.8


def _is_long(samples: int, *tensors: Tensor) -> bool:
    """Return whether offsets within the samples of a row exceed 32 bits."""
    return any(samples * tensor.stride(0) >= 2**31 for tensor in tensors)


def filters_gradient(
    image: Tensor,
    gradient: Tensor,
    rows: int,
    shape: ConvolutionGeometry,
    *,
    bias: bool,
    mask: Tensor | None = None,
    precision: str = "tf32x3",
    tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Sum the gradients of the filters and, if wanted, of the bias over each row's windows.

    Where ``mask``, which is shaped like ``gradient``, is not above zero, the gradient counts as zero.
    """
    everything, channels, height, width = image.shape
    _, features, down, across = gradient.shape
    terms = shape.kernel[0] * shape.kernel[1] * channels
    tiles = tiles or tiles_of("filters", features, terms, precision)
    blocks = triton.cdiv(terms, tiles.m) * triton.cdiv(features, tiles.n)
    windows = everything // rows * down * across
    # The windows are split among enough programs to keep the device busy. Each writes a sum of its own, and these are
    # added in a fixed order, since atomic additions would not repeat bit for bit.
    parts = max(1, min(_PROGRAMS // (blocks * rows), windows // 256))
    piece = triton.cdiv(triton.cdiv(windows, tiles.k), parts) * tiles.k
    parts = triton.cdiv(windows, piece)
    out = image.new_empty(parts, rows, features, channels, *shape.kernel)
    shifts = image.new_empty(parts, rows, features) if bias else None
    grid = (blocks, rows, parts)
    of_mask = gradient if mask is None else mask
    launch(
        filters_kernel,
        grid,
        image,
        gradient,
        of_mask,
        out,
        out if shifts is None else shifts,
        piece,
        rows,
        everything // rows,
        *_places(image),
        *_places(gradient),
        *_places(of_mask),
        HEIGHT=height,
        WIDTH=width,
        CHANNELS=channels,
        DOWN=down,
        ACROSS=across,
        FEATURES=features,
        **_constants(shape),
        BIAS=bias,
        MASKED=mask is not None,
        LONG=_is_long(everything // rows, image, gradient, of_mask),
        PRECISION=precision,
        M=tiles.m,
        N=tiles.n,
        K=tiles.k,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if parts == 1:
        return out.squeeze(0), None if shifts is None else shifts.squeeze(0)
    return out.sum(0), None if shifts is None else shifts.sum(0)


class RowConvolution(torch.autograd.Function):
    """Convolution of each row with its own filters, with a bias and, if wanted, ReLU; the stride must be 1."""

    @staticmethod
    def forward(
        image: Tensor, weight: Tensor, bias: Tensor | None, shape: ConvolutionGeometry, relu: bool, precision: str
    ) -> Tensor:
        """Convolve ``[rows × samples, channels, height, width]`` with ``[rows, features, channels, ...]``."""
        filters = arranged(weight, precision)
        reach = [d * (k - 1) for d, k in zip(shape.dilation, shape.kernel, strict=True)]
        size = tuple(
            (side + 2 * pad - far - 1) // stride + 1
            for side, pad, far, stride in zip(image.shape[2:], shape.padding, reach, shape.stride, strict=True)
        )
        assert len(size) == 2
        return images_with_filters(image, filters, bias, shape, size, relu=relu, precision=precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save what the backward pass needs."""
        image, weight, bias, ctx.shape, ctx.relu, ctx.precision = inputs
        ctx.shifted = bias is not None
        ctx.save_for_backward(image, weight, output if ctx.relu else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of images, filters and biases."""
        image, weight, output = ctx.saved_tensors
        shape, rows = ctx.shape, len(weight)
        of_image = of_weight = of_bias = None
        if ctx.needs_input_grad[0]:
            # The images' gradient is the result's gradient, convolved with the filters turned by half a turn.
            turned = arranged(weight, ctx.precision, turned=True)
            padding = tuple(
                d * (k - 1) - p for d, k, p in zip(shape.dilation, shape.kernel, shape.padding, strict=True)
            )
            back = ConvolutionGeometry(shape.kernel, (1, 1), padding, shape.dilation)
            of_image = images_with_filters(
                gradient, turned, None, back, image.shape[2:], mask=output, precision=ctx.precision, kind="images"
            )
        if ctx.needs_input_grad[1]:
            of_weight, of_bias = filters_gradient(
                image, gradient, rows, shape, bias=ctx.shifted, mask=output, precision=ctx.precision
            )
        return of_image, of_weight, of_bias, None, None, None


def convolve(
    image: Tensor, weight: Tensor, bias: Tensor | None, shape: ConvolutionGeometry, relu: bool, precision: str
) -> Tensor:
    """Convolve each row's images with its own filters ``[rows, features, channels, height, width]``.

    The stride must be 1. The result has channels last in memory, and can be differentiated once.
    """
    function: Any = RowConvolution.apply
    out: Tensor = function(image, weight, bias, shape, relu, precision)
    return out
