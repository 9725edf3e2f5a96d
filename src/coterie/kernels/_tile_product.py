"""The product of two tiles, which all kernels share, and how numbers are split for it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tile_product(left, right, sums, PRECISION: tl.constexpr):
    """Add ``left @ right`` to ``sums``, which are float32 whatever the factors are rounded to."""
    if PRECISION == "bf16":
        sums = tl.dot(left.to(tl.bfloat16), right.to(tl.bfloat16), sums)
    else:
        sums = tl.dot(left, right, sums, input_precision=PRECISION)
    return sums


@triton.jit
def upper_bits(values):
    """Return the 11 leading bits of float32 numbers, which TF32 holds exactly; the rest is what remains."""
    return (values.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)


@triton.jit
def appended(many, one):
    """Return a tuple of tiles with one more."""
    return many + (one,)  # noqa: RUF005  # Triton has no other way


def tile_side(least: int, number: int, most: int) -> int:
    """Return the side of a tile for so many numbers: the next power of two, within bounds."""
    return max(least, min(most, 1 << max(0, number - 1).bit_length()))
