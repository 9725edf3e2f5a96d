"""Taking some rows of a matrix, and putting others in their place, wherever the matrix is kept."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from coterie.rows.matrix import ClientMatrix, chosen_of


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
        return rows.pick(chosen_of(rows, index))
    # A row that is wanted several times is brought here once.
    each, place = index.unique(return_inverse=True)
    return rows.pick(chosen_of(rows, each))[place]


def look_at_rows(rows: Tensor, index: Tensor) -> Tensor:
    """Give some rows to be read, and only before any is changed.

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
    return take_rows(rows, index) if rows.backend.whole() is None else rows.dense()


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
        A new tensor, of which a kept matrix shares all other rows with the old.
    """
    if isinstance(rows, ClientMatrix):
        return rows.patched(chosen_of(rows, index), values)
    return rows.index_copy(0, index, values.to(rows.dtype))


def row_blocks(rows: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Give all rows on the device that computes, in blocks where they are kept elsewhere.

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
    elif rows.is_cuda and rows.backend.whole() is not None:
        yield 0, rows.dense()
    else:
        yield from rows.blocks()
