"""The launches of a convolution's products of images with gradients: the gradients of its filters."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
from torch import Tensor

from coterie.kernels import launch
from coterie.kernels._convolution_kernels import filters_kernel
from coterie.kernels._convolution_products import (
    ConvolutionGeometry,
    Pooling,
    Tiles,
    constants_of,
    is_long,
    places_of,
    sizes_of,
    tiles_of,
)
from coterie.kernels._pooled_kernels import pooled_filters_kernel
from coterie.kernels._tile_product import tile_side

_WARPS = 4224
"""Warps that keep a device busy: 32 on each of the 132 processors of an H200."""


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
    of_mask = gradient if mask is None else mask
    features, down, across = gradient.shape[1:]
    terms = shape.kernel[0] * shape.kernel[1] * image.shape[1]
    tiles = tiles or tiles_of("filters", features, terms, precision)
    on_line = _on_line(down, across, tiles.k)
    blocks = len(image) // rows * triton.cdiv(down, tiles.k // on_line) * triton.cdiv(across, on_line)
    programs = triton.cdiv(terms, tiles.m) * triton.cdiv(features, tiles.n)
    least = triton.cdiv(256, tiles.k)
    sums = _PartialSums.of(image, gradient, rows, shape, bias, programs * tiles.warps, blocks, least)
    grid = (programs, *sums.grid)
    launch(
        filters_kernel,
        grid,
        image,
        gradient,
        of_mask,
        *sums.given,
        *places_of(image),
        *places_of(gradient),
        *places_of(of_mask),
        MASKED=mask is not None,
        ON_LINE=on_line,
        PRECISION=precision,
        **sums.constants,
        **constants_of(shape, tiles),
    )
    return sums.total()


def _on_line(down: int, across: int, together: int) -> int:
    """Say how many results of a line a block of ``together`` has, so that few of it lie beyond the results."""
    widths = [width for width in (32, 16, 8) if width <= together]
    return min(widths, key=lambda wide: triton.cdiv(across, wide) * triton.cdiv(down, together // wide))


def from_pooled(shape: ConvolutionGeometry, channels: int, pooling: Pooling) -> bool:
    """Return whether filters' gradients are summed from the pooled gradient where nobody else needs it written out."""
    # 3x3 filters, 6,400 images on an H200: on one channel 2.10 to 0.64 ms, on three 0.42 to 0.30. Each number of the
    # filter takes registers of its own, and each channel reads the gradient anew.
    small = shape.kernel[0] * shape.kernel[1] <= 9 and pooling.window[0] * pooling.window[1] <= 4
    return small and channels <= 3 and shape.stride == (1, 1) and shape.dilation == (1, 1)


def pooled_filters_gradient(
    image: Tensor,
    gradient: Tensor,
    where: Tensor,
    rows: int,
    shape: ConvolutionGeometry,
    pooling: Pooling,
    *,
    bias: bool,
) -> tuple[Tensor, Tensor | None]:
    """Sum the same gradients from that of pooled results, of which each belongs to the largest value of its window."""
    samples, channels = len(image) // rows, image.shape[1]
    features, down, across = gradient.shape[1:]
    cells, m, n, warps = samples * down * across, 32, tile_side(16, features, 32), 4
    blocks, programs = triton.cdiv(cells, m), channels * triton.cdiv(features, n)
    sums = _PartialSums.of(image, gradient, rows, shape, bias, programs * warps, blocks, 8)
    (kernel_h, kernel_w), (pad_h, pad_w) = shape.kernel, shape.padding
    out, shifts, piece, *counts = sums.given
    launch(
        pooled_filters_kernel,
        (programs, *sums.grid),
        image,
        gradient,
        where,
        out,
        shifts,
        piece * m,
        *counts,
        *places_of(image),
        *places_of(gradient),
        LONG=is_long(samples, image, gradient, where),
        KERNEL_H=kernel_h,
        KERNEL_W=kernel_w,
        PAD_H=pad_h,
        PAD_W=pad_w,
        POOL_H=pooling.window[0],
        POOL_W=pooling.window[1],
        M=m,
        N=n,
        num_warps=warps,
        **sums.constants,
    )
    return sums.total()


class _PartialSums(NamedTuple):
    """The gradients of filters as several programs sum them, each over a part of a row's windows.

    These are added in a fixed order, since atomic additions would not repeat bit for bit.
    """

    out: Tensor
    shifts: Tensor | None
    grid: tuple[int, int]
    given: tuple[Any, ...]
    constants: dict[str, Any]

    @classmethod
    def of(
        cls,
        image: Tensor,
        gradient: Tensor,
        rows: int,
        shape: ConvolutionGeometry,
        bias: bool,
        warps: int,
        blocks: int,
        least: int,
    ) -> _PartialSums:
        """Split each row's blocks of windows into parts of ``least`` or more, each of so many warps."""
        (everything, channels), (features, down, across) = image.shape[:2], gradient.shape[1:]
        parts = max(1, min(_WARPS // (warps * rows), blocks // least))
        piece = triton.cdiv(blocks, parts)
        parts = triton.cdiv(blocks, piece)
        out = image.new_empty(parts, rows, features, channels, *shape.kernel)
        shifts = image.new_empty(parts, rows, features) if bias else None
        constants = sizes_of(image, features, (down, across), bias)
        given = (out, out if shifts is None else shifts, piece, rows, everything // rows)
        return cls(out, shifts, (rows, parts), given, constants)

    def total(self) -> tuple[Tensor, Tensor | None]:
        """Add the parts."""
        if len(self.out) == 1:
            return self.out.squeeze(0), None if self.shifts is None else self.shifts.squeeze(0)
        return self.out.sum(0), None if self.shifts is None else self.shifts.sum(0)
