"""Inner products of large float32 rows on a GPU's matrix units, to nearly float32's accuracy.

The units multiply numbers of 11 significant bits (TF32), eight times as fast as float32 is multiplied otherwise. A
float32 number is the sum of two such numbers to 22 bits, ``a = a_h + a_l``; so ``a b ≈ a_h b_h + a_h b_l + a_l b_h``
to about 2⁻²². Where a matrix is multiplied by its own transpose, the last two are each other's transpose: two fast
products in place of a slow one. Sums over many columns are carried from block to block in float64.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

_LARGE = 2**27
"""Elements from which on the splitting pays; below, plain products are quick enough."""

BLOCK = 2**14
"""Columns taken at a time."""


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
    products = torch.zeros(count, count, dtype=torch.float64, device=rows.device)
    with_mean = torch.zeros(count, dtype=torch.float64, device=rows.device)
    of_mean = torch.zeros((), dtype=torch.float64, device=rows.device)
    for block in rows.split(BLOCK, dim=1):
        mean = block.mean(0)
        centred = block - mean
        high, low = split(centred)
        with tf32():
            cross = high @ low.T
            products += (high @ high.T + (cross + cross.T)).double()
        with tf32(False):
            with_mean += (centred @ mean).double()
        of_mean += mean.double().square().sum()
    return (products + products.T) / 2, with_mean, of_mean
