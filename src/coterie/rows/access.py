"""Reading and replacing some rows of a matrix, a plain tensor or a client matrix, wherever it lies."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from coterie.rows.backends import RowIndex
from coterie.rows.matrix import ClientMatrix


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Give some rows.

    Parameters
    ----------
    rows
        A tensor whose first axis is the client.
    index
        Which rows, in an order and a shape of its own.

    Returns
    -------
    Tensor
        A copy ``[*index.shape, ...]`` on the device that computes.
    """
    if not isinstance(rows, ClientMatrix):
        return rows[index]
    if index.dim() == 1:
        return rows.gather_rows(RowIndex.of(index, rows.backend.device))
    # A row that is wanted several times is fetched once.
    each, place = index.unique(return_inverse=True)
    return rows.gather_rows(RowIndex.of(each, rows.device))[place]


def take_local_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Give some of the rows that lie with this process: of a plain tensor, any.

    Parameters
    ----------
    rows
        A tensor whose first axis is the client.
    index
        Which rows ``[rows]``.

    Returns
    -------
    Tensor
        A copy ``[rows, ...]`` on the device that computes.
    """
    return rows.gather_local_rows(RowIndex(index)) if isinstance(rows, ClientMatrix) else rows[index]


def look_at_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Give some rows that are read before any is changed, without a copy where that is possible.

    Parameters
    ----------
    rows
        A tensor whose first axis is the client.
    index
        Which rows, in an order of its own.

    Returns
    -------
    Tensor
        As :func:`take_rows`; but where these are all rows, in order, and lie in a CPU's memory, the matrix itself.
    """
    if rows.is_cuda or index.shape != rows.shape[:1] or not torch.equal(index, torch.arange(len(rows))):
        return take_rows(rows, index)
    if not isinstance(rows, ClientMatrix):
        return rows
    return take_rows(rows, index) if rows.backend.device_tensor() is None else rows.dense()


def put_rows(rows: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Give ``rows`` with some rows replaced; ``rows`` itself is left as it is.

    Parameters
    ----------
    rows
        A tensor whose first axis is the client.
    index
        The rows to replace, each once.
    values
        What to put there.

    Returns
    -------
    Tensor
        A new tensor; a client matrix shares all other rows with the old one.
    """
    if isinstance(rows, ClientMatrix):
        return rows.patched(RowIndex.of(index, rows.backend.device), values)
    return rows.index_copy(0, index, values.to(rows.dtype))


def row_blocks(rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Give all rows on the device that computes, block by block where they lie elsewhere.

    Parameters
    ----------
    rows
        A tensor whose first axis is the client.

    Yields
    ------
    tuple
        The first row's number, and consecutive rows, which must not be changed.
    """
    if not isinstance(rows, ClientMatrix):
        yield 0, rows
    elif rows.is_cuda and rows.backend.device_tensor() is not None:
        yield 0, rows.dense()
    else:
        yield from rows.blocks()
