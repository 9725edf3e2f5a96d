"""Rows as sums of half-precision numbers, for the matrix units: centred, scaled and split in one pass, and back.

:mod:`coterie.rows.matrix_units` says why: products of half-precision numbers run at 650 TFLOP/s on an H200, where TF32
reaches 390, and two of them hold nearly as many bits of a centred and scaled number as float32 does.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from coterie.kernels import launch

_LINES, _COLUMNS = 8, 256  # of a program


@triton.jit
def _place(count, width, LINES: tl.constexpr, COLUMNS: tl.constexpr):
    line = (tl.program_id(1) * LINES + tl.arange(0, LINES)).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    return line, column, (line < count)[:, None] & (column < width)[None, :]


@triton.jit
def _split(
    count,
    width,
    rows,
    centre,
    scale,
    parts,
    rows_each,
    part_each,
    line_each,
    PARTS: tl.constexpr,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    line, column, inside = _place(count, width, LINES, COLUMNS)
    value = tl.load(rows + (line * rows_each)[:, None] + column[None, :], mask=inside, other=0.0)
    value -= tl.load(centre + column, mask=column < width, other=0.0)[None, :]
    value *= tl.load(scale + line, mask=line < count, other=0.0)[:, None]
    high = value.to(tl.float16)
    place = parts + (line * line_each)[:, None] + column[None, :]
    tl.store(place, high, mask=inside)
    if PARTS > 1:
        tl.store(place + part_each, (value - high.to(tl.float32)).to(tl.float16), mask=inside)
    if PARTS > 2:
        tl.store(place + 2 * part_each, high, mask=inside)


@triton.jit
def _add(
    count,
    width,
    sums,
    scale,
    share,
    centre,
    out,
    sums_each,
    out_each,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    line, column, inside = _place(count, width, LINES, COLUMNS)
    value = tl.load(sums + (line * sums_each)[:, None] + column[None, :], mask=inside, other=0.0)
    value *= tl.load(scale + line, mask=line < count, other=0.0)[:, None]
    part = tl.load(share + line, mask=line < count, other=0.0)[:, None]
    value += part * tl.load(centre + column, mask=column < width, other=0.0)[None, :]
    tl.store(out + (line * out_each)[:, None] + column[None, :], value, mask=inside)


def _run(kernel: Any, shape: tuple[int, ...], *arguments: Any, **constants: int) -> None:
    """Launch a kernel over a matrix of ``shape``."""
    grid = (triton.cdiv(shape[1], _COLUMNS), triton.cdiv(shape[0], _LINES))
    launch(kernel, grid, *shape, *arguments, LINES=_LINES, COLUMNS=_COLUMNS, **constants)


def split_centred(rows: Tensor, centre: Tensor, scale: Tensor, parts: Tensor) -> None:
    """Write ``(rows − centre) · scale`` into ``parts [parts, rows, columns]`` as half-precision numbers.

    The parts are the rounded numbers, what rounding left, and the rounded numbers again: as many as there is room for.
    ``scale`` has a power of two for each row.
    """
    assert rows.stride(1) == parts.stride(2) == 1
    strides = rows.stride(0), parts.stride(0), parts.stride(1)
    _run(_split, rows.shape, rows, centre, scale, parts, *strides, PARTS=len(parts))


def add_centre(sums: Tensor, scale: Tensor, share: Tensor, centre: Tensor, out: Tensor) -> None:
    """Write ``sums · scale + share · centre``."""
    assert sums.stride(1) == out.stride(1) == 1
    _run(_add, sums.shape, sums, scale, share, centre, out, sums.stride(0), out.stride(0))
