"""Rows less their mean, cut into two numbers of 11 significant bits each, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_LINES, _COLUMNS = 8, 256


@triton.jit
def _split(
    rows,
    mean,
    high,
    low,
    count,
    width,
    rows_each,
    high_each,
    low_each,
    LINES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    line = (tl.program_id(1) * LINES + tl.arange(0, LINES)).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (line < count)[:, None] & (column < width)[None, :]
    value = tl.load(rows + (line * rows_each)[:, None] + column[None, :], mask=inside, other=0.0)
    value -= tl.load(mean + column, mask=column < width, other=0.0)[None, :]
    raw = value.to(tl.int32, bitcast=True)
    first = ((raw + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    tl.store(high + (line * high_each)[:, None] + column[None, :], first, mask=inside)
    tl.store(low + (line * low_each)[:, None] + column[None, :], value - first, mask=inside)


def split_centred(rows: Tensor, mean: Tensor, high: Tensor, low: Tensor) -> None:
    """Cut ``rows − mean`` into ``high + low``, of which ``high`` is exact in TF32.

    Parameters
    ----------
    rows
        A float32 matrix; columns lie side by side.
    mean
        A vector, one number a column.
    high
        Where the larger parts go.
    low
        Where the rests go.
    """
    count, width = rows.shape
    assert rows.stride(1) == high.stride(1) == low.stride(1) == 1
    grid = (triton.cdiv(width, _COLUMNS), triton.cdiv(count, _LINES))
    _split[grid](
        rows,
        mean,
        high,
        low,
        count,
        width,
        rows.stride(0),
        high.stride(0),
        low.stride(0),
        LINES=_LINES,
        COLUMNS=_COLUMNS,
    )
