"""Inner products of large float32 rows on a GPU's matrix units, to nearly float32's accuracy.

The units multiply numbers of 11 significant bits (TF32), eight times as fast as float32 is multiplied otherwise. A
float32 number is the sum of two such numbers to 22 bits, ``a = a_h + a_l``; so ``a b ≈ a_h b_h + a_h b_l + a_l b_h``
to about 2⁻²². Where a matrix is multiplied by its own transpose, the last two are each other's transpose: two fast
products in place of a slow one. Sums over many columns are carried from block to block in float64.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from coterie import kernels

_LARGE = 2**27
"""Elements from which on the splitting pays; below, plain products are quick enough."""

BLOCK = 2**12
"""Columns over which sums are carried in the matrix units, which cut off what they cannot hold instead of rounding."""

_WIDE = 32 * BLOCK
"""Columns that are split at a time."""


def pays(rows: Tensor) -> bool:
    """Say whether splitting pays for a matrix.

    Parameters
    ----------
    rows
        The matrix.

    Returns
    -------
    bool
        True for a large float32 matrix on a GPU.
    """
    return rows.is_cuda and rows.dtype == torch.float32 and rows.numel() >= _LARGE


@contextlib.contextmanager
def tf32(on: bool = True) -> Iterator[None]:
    """Let the matrix units round to TF32 (or not), and put PyTorch's process-wide switch back afterwards.

    Parameters
    ----------
    on
        Whether they may.

    Yields
    ------
    None
        While the context is open.
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32, cudnn.allow_tf32 = on, on
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


Precision = Literal["float32", "tf32", "bf16"]
"""How a GPU rounds what it multiplies: not at all, to 11 significant bits, or to 8 where a kernel of ours does it and
to 11 elsewhere. Sums are float32 in any case."""


@contextlib.contextmanager
def rounded(precision: Precision) -> Iterator[None]:
    """Let products be rounded so.

    Parameters
    ----------
    precision
        How.

    Yields
    ------
    None
        While the context is open.
    """
    with tf32(precision != "float32"), kernels.coarse(precision == "bf16"):
        yield


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """Cut float32 numbers into two of 11 significant bits each, the larger part rounded to nearest.

    Parameters
    ----------
    values
        Float32 numbers.

    Returns
    -------
    tuple of Tensor
        The larger parts, which TF32 holds exactly, and the rests; their sum is ``values``.
    """
    high = ((values.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return high, values - high


class _Blocks:
    """Blocks of columns of a matrix, centred and split, in buffers that are used again.

    Below the rows lies their mean, so that products with it come with the others; then zeros up to a round number.
    """

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.width = min(_WIDE, -(-rows.shape[1] // BLOCK) * BLOCK)
        self.height = -(-(len(rows) + 1) // 16) * 16
        self.both = rows.new_zeros(2, self.height, self.width)

    def __iter__(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Give which columns, and their larger parts and rests."""
        high, low = self.both
        count = len(self.rows)
        for begin in range(0, self.rows.shape[1], self.width):
            block = self.rows[:, begin : begin + self.width]
            here = block.shape[1]
            if here < self.width:
                self.both.zero_()
            mean = block.mean(0)
            high[count, :here], low[count, :here] = split(mean)
            if kernels.usable(block):
                from coterie.kernels.splitting import split_centred

                split_centred(block, mean, high[:count, :here], low[:count, :here])
            else:
                high[:count, :here], low[:count, :here] = split(block - mean)
            yield slice(begin, begin + here), high, low


def centred_gram(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inner products of all pairs of rows less their mean, and what is needed to undo the centring.

    Parameters
    ----------
    rows
        A float32 matrix ``[clients, parameters]``.

    Returns
    -------
    tuple of Tensor
        In float64: the products ``[clients, clients]``, symmetric, each row's product with the mean ``[clients]``, and
        the mean's with itself.
    """
    count = len(rows)
    blocks = _Blocks(rows)
    products = torch.zeros(blocks.height, blocks.height, dtype=torch.float64, device=rows.device)
    crosses = torch.zeros_like(products)
    rough = torch.backends.cuda.matmul.allow_tf32
    for _, high, low in blocks:
        # A few narrow blocks at a time: one product of so few rows would leave most of the device idle.
        left = high.unflatten(1, (-1, BLOCK)).transpose(0, 1)
        with tf32():
            products += torch.bmm(left, left.transpose(1, 2)).sum(0, dtype=torch.float64)
            if not rough:
                right = low.unflatten(1, (-1, BLOCK)).transpose(0, 1)
                crosses += torch.bmm(left, right.transpose(1, 2)).sum(0, dtype=torch.float64)
    products += crosses + crosses.T
    products = (products + products.T) / 2
    return products[:count, :count], products[:count, count], products[count, count]


def mixed(weights: Tensor, rows: Tensor) -> Tensor:
    """Weighted sums of rows.

    Parameters
    ----------
    weights
        A matrix ``[out, clients]``.
    rows
        A float32 matrix ``[clients, parameters]``.

    Returns
    -------
    Tensor
        ``[out, parameters]``.
    """
    count = len(rows)
    blocks = _Blocks(rows)
    wide = torch.zeros(len(weights), blocks.height, dtype=torch.float32, device=rows.device)
    wide[:, :count] = weights
    share = weights.double().sum(1).to(rows.dtype)
    high_weights, low_weights = split(wide)
    twice = torch.cat([high_weights, high_weights], 1)
    out = rows.new_empty(len(weights), rows.shape[1])
    rough = torch.backends.cuda.matmul.allow_tf32
    for columns, high, low in blocks:
        here = columns.stop - columns.start
        target = out[:, columns]
        with tf32():
            if rough:
                torch.mm(high_weights, high[:, :here], out=target)
            else:
                torch.mm(twice, blocks.both.view(2 * blocks.height, -1)[:, :here], out=target)
                target.addmm_(low_weights, high[:, :here])
        # Last, and rounded properly: the mean is much larger than the rows' distances from it.
        target.addr_(share, high[count, :here] + low[count, :here])
    return out
