"""The hash of :mod:`coterie.randomness` in one pass; step by step it takes 25 launches."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from coterie.kernels import launch

_BLOCK = 1024  # elements of a program


@triton.jit
def mixed(value, MIX_1: tl.constexpr, MIX_2: tl.constexpr):
    """Mix the bits of 64-bit integers."""
    # Two's complement: products and sums wrap, and shifts fill with zeros, as in coterie.randomness.
    value = (value ^ ((value >> 30) & 0x3FFFFFFFF)) * MIX_1
    value = (value ^ ((value >> 27) & 0x1FFFFFFFFF)) * MIX_2
    return value ^ ((value >> 31) & 0x1FFFFFFFF)


@triton.jit(do_not_specialize=["count", "counter", "number_each"])
def _fold(
    key,
    number,
    out,
    count,
    counter,
    number_each,
    NUMBERS: tl.constexpr,
    GOLDEN: tl.constexpr,
    MIX_1: tl.constexpr,
    MIX_2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    given = tl.load(key + at, mask=inside, other=0) + counter
    if NUMBERS:
        given += tl.load(number + at * number_each, mask=inside, other=0) * GOLDEN
    tl.store(out + at, mixed(mixed(given, MIX_1, MIX_2) ^ MIX_1, MIX_1, MIX_2), mask=inside)


def fold_in(key: Tensor, number: int | Tensor, constants: tuple[int, int, int]) -> Tensor:
    """Derive new keys ``[keys]`` from keys and numbers, which are as many or a single one."""
    key = key.contiguous()
    out = torch.empty_like(key)
    golden, first, second = constants
    several = isinstance(number, Tensor)
    launch(
        _fold,
        (triton.cdiv(len(key), _BLOCK),),
        key,
        number if several else key,
        out,
        len(key),
        0 if isinstance(number, Tensor) else (number * golden + 2**63) % 2**64 - 2**63,
        number.stride(0) if isinstance(number, Tensor) and len(number) > 1 else 0,
        NUMBERS=several,
        GOLDEN=golden,
        MIX_1=first,
        MIX_2=second,
        BLOCK=_BLOCK,
    )
    return out
