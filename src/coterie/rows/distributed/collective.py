"""Work on large matrices that several ranks share out: by rows where these are spread over them, else by columns.

What comes out has the same bits on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from coterie.rows.backends import RowIndex
from coterie.rows.distributed import Ranks, sharing
from coterie.rows.matrix import ClientMatrix

_SLICE = 2**26  # elements of the columns of all rows that a rank holds at once


def ranks_of(rows: Tensor) -> Ranks | None:
    """Give the ranks over which the rows of a matrix are spread.

    Parameters
    ----------
    rows
        The matrix.

    Returns
    -------
    Ranks or None
        They; ``None`` if all rows lie with this process.
    """
    return rows.backend.ranks if isinstance(rows, ClientMatrix) else None


def sharing_out(products: int) -> Ranks | None:
    """Give the ranks among which a product of matrices that all of them have is to be shared out.

    Parameters
    ----------
    products
        How many multiplications it takes.

    Returns
    -------
    Ranks or None
        They; ``None`` if it does not pay.
    """
    ranks = sharing()
    return ranks if ranks is not None and ranks.count > 1 and products >= ranks.worth else None


def summed(rows: Tensor, ranks: Ranks, start: Tensor, part: Callable[[RowIndex, Tensor], Tensor]) -> Tensor:
    """Add up what every rank makes of its own rows.

    Parameters
    ----------
    rows
        A matrix whose rows are spread over ranks.
    ranks
        They.
    start
        Zeros of the result's shape and type, which are changed.
    part
        From some rows, and which they are, to their part of the sum.

    Returns
    -------
    Tensor
        The sum over all rows.
    """
    assert isinstance(rows, ClientMatrix)
    for chosen, block in rows.own_blocks():
        start += part(chosen, block)
    return ranks.sum(start)


def each(rows: Tensor, ranks: Ranks, start: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
    """Put together what every rank finds for its own rows.

    Parameters
    ----------
    rows
        A matrix whose rows are spread over ranks.
    ranks
        They.
    start
        A tensor ``[0, ...]`` of the result's type, for a rank without rows.
    part
        From some rows to a row of results for each.

    Returns
    -------
    Tensor
        The results ``[rows, ...]``, in the order of the rows.
    """
    assert isinstance(rows, ClientMatrix)
    found = torch.cat([start, *(part(block) for _, block in rows.own_blocks())])
    return ranks.collect(found, ranks.owner(torch.arange(len(rows))))


def by_columns(rows: Tensor, ranks: Ranks, part: Callable[[Tensor], Tensor]) -> Tensor:
    """Add up what is made of the columns of a matrix whose rows are spread over ranks, some columns a rank.

    Parameters
    ----------
    rows
        A matrix ``[rows, columns]``.
    ranks
        They.
    part
        From some columns of all rows to their part of the sum.

    Returns
    -------
    Tensor
        The sum over all columns.
    """
    assert isinstance(rows, ClientMatrix)
    count, size = rows.shape
    start = torch.empty(0, size, dtype=rows.dtype, device=rows.device)
    own = torch.cat([start, *(block for _, block in rows.own_blocks())])
    width = max(1, min(-(-size // ranks.count), _SLICE // max(1, count)))
    out: Tensor | None = None
    for begin in range(0, max(1, size), width * ranks.count):
        found = part(ranks.columns(own, count, begin, width))
        out = found if out is None else out.add_(found)
    assert out is not None
    return ranks.sum(out)


def sliced(ranks: Ranks, part: Callable[[slice], Tensor], size: int) -> Tensor:
    """Add up what every rank makes of its slice of the columns of matrices that all of them have.

    Parameters
    ----------
    ranks
        They.
    part
        From a slice of columns to its part of the sum.
    size
        How many columns.

    Returns
    -------
    Tensor
        The sum over all columns.
    """
    return ranks.sum(part(slice(*ranks.bounds(size)[ranks.rank])))


def joined(ranks: Ranks, part: Callable[[slice], Tensor], size: int) -> Tensor:
    """Put the columns together that every rank makes for its slice.

    Parameters
    ----------
    ranks
        They.
    part
        From a slice of columns to these columns of the result ``[rows, columns]``.
    size
        How many columns.

    Returns
    -------
    Tensor
        The result ``[rows, all columns]``.
    """
    bounds = ranks.bounds(size)
    own = part(slice(*bounds[ranks.rank])).contiguous()
    pieces = [
        own if rank == ranks.rank else own.new_empty(len(own), end - begin) for rank, (begin, end) in enumerate(bounds)
    ]
    return torch.cat(ranks.spread(pieces), 1)
