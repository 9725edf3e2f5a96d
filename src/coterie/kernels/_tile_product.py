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
def window_product(window, weights, rest, sums, PRECISION: tl.constexpr):
    """Add ``window @ weights`` to ``sums``; with ``tf32x3``, ``rest`` is what the weights have beyond 11 bits."""
    if PRECISION == "tf32x3":
        # Three products of numbers with 11 bits, the smallest first. The filters were split beforehand, for those that
        # the matrix units take from shared memory cannot be changed on their way there.
        high = upper_bits(window)
        tile = tl.dot(window - high, weights, input_precision="tf32")
        tile = tl.dot(high, rest, tile, input_precision="tf32")
        # The units cut their sums off where float32 would round: a sum for each tile, added outside of them.
        sums += tl.dot(high, weights, tile, input_precision="tf32")
    else:
        sums = tile_product(window, weights, sums, PRECISION)
    return sums


@triton.jit
def appended(many, one):
    """Return a tuple of tiles with one more."""
    return many + (one,)  # noqa: RUF005  # Triton has no other way


def tile_side(least: int, number: int, most: int) -> int:
    """Return the side of a tile for so many numbers: the next power of two, within bounds."""
    return max(least, min(most, 1 << max(0, number - 1).bit_length()))
