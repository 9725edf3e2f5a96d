"""The algebra of row matrices, in blocks of columns.

Sums are carried in float64 where a result feeds a decision (cosines, distances, Gram matrices), so that memory stays
bounded and a float32 matrix loses nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from coterie import matrix_units

_BLOCK_ELEMENTS = 2**22  # elements of a float64 block: 32 MiB


def column_blocks(rows: Tensor, clients: int | None = None) -> Iterator[Tensor]:
    """Cut a matrix into blocks of columns whose float64 copies stay small.

    Parameters
    ----------
    rows
        A matrix ``[clients, parameters]``.
    clients
        The number of rows that decides the blocks' width, where two matrices must be cut alike.

    Yields
    ------
    Tensor
        Views of consecutive columns.
    """
    width = max(256, _BLOCK_ELEMENTS // max(1, len(rows) if clients is None else clients))
    yield from rows.split(width, dim=1)


def gram(rows: Tensor, other: Tensor | None = None) -> Tensor:
    """Inner products of all pairs of rows, in float64, exactly symmetric when ``other`` is not given.

    Parameters
    ----------
    rows
        A matrix ``[a, parameters]``.
    other
        A matrix ``[b, parameters]``, or ``None`` for ``rows`` itself.

    Returns
    -------
    Tensor
        A float64 matrix ``[a, b]``.
    """
    if other is None and matrix_units.pays(rows):
        centred, with_mean, of_mean = matrix_units.centred_gram(rows)
        return centred + with_mean.unsqueeze(1) + with_mean.unsqueeze(0) + of_mean
    columns = rows if other is None else other
    total = torch.zeros(rows.shape[0], columns.shape[0], dtype=torch.float64, device=rows.device)
    most = max(len(rows), len(columns))
    for left, right in zip(column_blocks(rows, most), column_blocks(columns, most), strict=True):
        wide = left.double()
        total.addmm_(wide, (wide if other is None else right.double()).T)
    # A computed Gram matrix is not bit-symmetric, and ties in a threshold would then depend on the clients' order.
    return (total + total.T) / 2 if other is None else total


def norms(rows: Tensor) -> Tensor:
    """Euclidean norm of each row, in float64.

    Parameters
    ----------
    rows
        A matrix ``[clients, parameters]``.

    Returns
    -------
    Tensor
        A float64 vector ``[clients]``.
    """
    total = torch.zeros(rows.shape[0], dtype=torch.float64, device=rows.device)
    for block in column_blocks(rows):
        total += block.double().square().sum(1)
    return total.sqrt()


def cosines(rows: Tensor) -> Tensor:
    """Cosine of the angle between all pairs of rows: symmetric, ones on the diagonal, within [-1, 1].

    Parameters
    ----------
    rows
        A matrix ``[clients, parameters]``.

    Returns
    -------
    Tensor
        A float64 matrix ``[clients, clients]``; a zero row has cosine 0 with every other.
    """
    products = gram(rows)
    length = products.diagonal().clamp_min(0).sqrt()
    length = torch.where(length > 0, length, torch.ones_like(length))
    out = (products / length.unsqueeze(1) / length.unsqueeze(0)).clamp(-1.0, 1.0)
    out = (out + out.T) / 2
    return out.fill_diagonal_(1.0)


def squared_distances(rows: Tensor) -> Tensor:
    """Squared Euclidean distance between all pairs of rows, in float64, zeros on the diagonal.

    Rows are centred on their mean first: the distances are small differences of large numbers otherwise.

    Parameters
    ----------
    rows
        A matrix ``[clients, parameters]``.

    Returns
    -------
    Tensor
        A float64 matrix ``[clients, clients]``, symmetric and not negative.
    """
    if matrix_units.pays(rows):
        products, _, _ = matrix_units.centred_gram(rows)
        floor = 2.0**-20  # of the squares: what is below may be rounding, and equal models must lie at distance 0
    else:
        total = torch.zeros(rows.shape[0], rows.shape[0], dtype=torch.float64, device=rows.device)
        for block in column_blocks(rows):
            wide = block.double()
            wide = wide - wide.mean(0)
            total.addmm_(wide, wide.T)
        products, floor = (total + total.T) / 2, 0.0
    square = products.diagonal()
    sums = square.unsqueeze(1) + square.unsqueeze(0)
    apart = sums - 2 * products
    return torch.where(apart > floor * sums, apart, 0.0).fill_diagonal_(0.0)


def mix(weights: Tensor, rows: Tensor) -> Tensor:
    """Weighted sums of rows, ``weights @ rows``, in the rows' own type.

    Parameters
    ----------
    weights
        A matrix ``[out, clients]`` or a vector ``[clients]``.
    rows
        A matrix ``[clients, parameters]``.

    Returns
    -------
    Tensor
        ``[out, parameters]``, or ``[parameters]`` for a vector of weights.
    """
    return weights.to(rows.dtype) @ rows


def put_rows(rows: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Give ``rows`` with some rows replaced; ``rows`` itself is left as it is.

    Parameters
    ----------
    rows
        A tensor whose first axis is the client.
    index
        The rows to replace.
    values
        What to put there.

    Returns
    -------
    Tensor
        A new tensor.
    """
    return rows.index_copy(0, index, values.to(rows.dtype))
