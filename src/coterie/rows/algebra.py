"""The algebra of row matrices, in blocks of columns and, of matrices that are kept elsewhere, in blocks of rows.

Sums are carried in float64 where a result feeds a decision (cosines, distances, Gram matrices), so that memory stays
bounded and a float32 matrix loses nothing.

On a CPU, how a matrix is cut depends on its shape and not on where it is kept, so that neither do the last bits. In a
sharded run, what is done with a matrix whose rows are spread over ranks, and with other large ones, is shared out
(:mod:`coterie.rows.distributed.collective`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from coterie.rows import matrix_units
from coterie.rows.access import row_blocks, take_rows
from coterie.rows.distributed import collective
from coterie.rows.matrix import ClientMatrix

_MANY = 64  # sums from which on splitting their terms pays
_LONG = 256  # terms of a sum from which on it costs more to compute than to send
_BLOCK_ELEMENTS = 2**22  # elements of a float64 block: 32 MiB
_AT_ONCE = 2**30  # bytes of a kept matrix that is taken into a CPU's memory for all pairs of its rows
_PAIRED = 2**28  # bytes of a block of rows where pairs of blocks are multiplied


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


def _together(rows: Tensor) -> Tensor | None:
    """Give a matrix as a plain one, if it may lie on the device that computes as a whole."""
    if not isinstance(rows, ClientMatrix):
        return rows
    room = _AT_ONCE
    if rows.is_cuda:
        room = torch.cuda.get_device_properties(rows.device).total_memory // 8
        if rows.backend.whole() is not None:
            return rows.dense()
    return rows.dense() if rows.nbytes <= room else None


def total(rows: Tensor, weights: Tensor) -> Tensor:
    """Weighted sum of rows, carried in float64.

    Parameters
    ----------
    rows
        A matrix ``[clients, parameters]``.
    weights
        A weight for each, which is multiplied in the rows' own type.

    Returns
    -------
    Tensor
        A float64 vector ``[parameters]``.
    """
    out = torch.zeros(rows.shape[1:], dtype=torch.float64, device=rows.device)
    if ranks := collective.ranks_of(rows):
        return collective.summed(
            rows, ranks, out, lambda some, block: (block * weights[some.here].unsqueeze(1)).sum(0, dtype=torch.float64)
        )
    for begin, block in row_blocks(rows):
        out += (block * weights[begin : begin + len(block)].unsqueeze(1)).sum(0, dtype=torch.float64)
    return out


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
    if other is not None and (ranks := collective.ranks_of(other)):
        mine = rows.dense() if isinstance(rows, ClientMatrix) else rows
        none = torch.empty(0, len(mine), dtype=torch.float64, device=mine.device)
        return collective.each(other, ranks, none, lambda block: _gram(block, mine)).T
    if other is not None and collective.ranks_of(rows):
        return gram(other, rows).T
    if other is not None and isinstance(other, ClientMatrix):
        return torch.cat([gram(rows, block) for _, block in row_blocks(other)], 1)
    if other is not None and isinstance(rows, ClientMatrix):
        return torch.cat([gram(block, other) for _, block in row_blocks(rows)])
    if other is None and isinstance(rows, ClientMatrix) and (ranks := rows.backend.ranks) and _fits(rows, ranks.count):
        return _symmetric(collective.by_columns(rows, ranks, _gram))
    plain = _together(rows)
    if plain is None:
        return _pairs(rows, torch.zeros(rows.shape[1:], dtype=torch.float64, device=rows.device))
    columns = plain if other is None else other
    if ranks := collective.sharing_out(len(columns) * plain.numel()):
        found = collective.sliced(
            ranks, lambda some: _gram(plain[:, some], None if other is None else other[:, some]), plain.shape[1]
        )
        return _symmetric(found) if other is None else found
    return _gram(plain, other)


def _gram(rows: Tensor, other: Tensor | None = None) -> Tensor:
    """Inner products of rows of plain matrices."""
    if other is None and matrix_units.pays(rows):
        centred, with_mean, of_mean = matrix_units.centred_gram(rows)
        return centred + with_mean.unsqueeze(1) + with_mean.unsqueeze(0) + of_mean
    columns = rows if other is None else other
    total = torch.zeros(rows.shape[0], columns.shape[0], dtype=torch.float64, device=rows.device)
    most = max(len(rows), len(columns))
    for left, right in zip(column_blocks(rows, most), column_blocks(columns, most), strict=True):
        wide = left.double()
        total.addmm_(wide, (wide if other is None else right.double()).T)
    return _symmetric(total) if other is None else total


def _symmetric(products: Tensor) -> Tensor:
    # A computed Gram matrix is not bit-symmetric, and ties in a threshold would then depend on the clients' order.
    return (products + products.T) / 2


def _fits(rows: ClientMatrix, count: int) -> bool:
    """Say whether a process may hold one of so many parts of a kept matrix."""
    room = torch.cuda.get_device_properties(rows.device).total_memory // 8 if rows.is_cuda else _AT_ONCE
    return rows.nbytes // count <= room


def _pairs(rows: Tensor, centre: Tensor) -> Tensor:
    """Inner products of all pairs of rows less a centre, of a matrix that is read in blocks of rows."""
    assert isinstance(rows, ClientMatrix)
    count = max(16, _PAIRED // max(1, rows.backend.row_bytes) // 16 * 16)
    out = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    ranks, turn = collective.ranks_of(rows), 0
    for begin, left in rows.blocks(count):
        for first, right in rows.blocks(count, begin):
            turn += 1
            if ranks is not None and turn % ranks.count != ranks.rank:
                continue  # another rank's
            part = torch.zeros(len(left), len(right), dtype=torch.float64, device=rows.device)
            at = 0
            for one, two in zip(column_blocks(left, count), column_blocks(right, count), strict=True):
                middle = centre[at : at + one.shape[1]]
                part.addmm_(one.double() - middle, (two.double() - middle).T)
                at += one.shape[1]
            out[begin : begin + len(left), first : first + len(right)] = part
            out[first : first + len(right), begin : begin + len(left)] = part.T
    return _symmetric(out if ranks is None else ranks.sum(out))


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
    if ranks := collective.ranks_of(rows):
        return collective.each(rows, ranks, torch.empty(0, dtype=torch.float64, device=rows.device), norms)
    if isinstance(rows, ClientMatrix):
        return torch.cat([norms(block) for _, block in row_blocks(rows)])
    if rows.is_cuda:  # its reduction turns numbers into float64 as it reads them
        whole: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
        return whole
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
    spread = collective.ranks_of(rows)
    plain = None if spread else _together(rows)
    # Of the squares: what is below may be the matrix units' rounding, and equal models must lie at distance 0.
    floor = 2.0**-20 if matrix_units.pays(rows) else 0.0
    if spread and isinstance(rows, ClientMatrix) and _fits(rows, spread.count):
        products = _symmetric(collective.by_columns(rows, spread, _centred_gram))
    elif plain is None:
        products, floor = _pairs(rows, _centre(rows)), 0.0
    elif ranks := collective.sharing_out(len(plain) * plain.numel()):
        found = collective.sliced(ranks, lambda some: _centred_gram(plain[:, some]), plain.shape[1])
        products = _symmetric(found)
    else:
        products = _centred_gram(plain)
    square = products.diagonal()
    sums = square.unsqueeze(1) + square.unsqueeze(0)
    apart = sums - 2 * products
    return torch.where(apart > floor * sums, apart, 0.0).fill_diagonal_(0.0)


def _centred_gram(rows: Tensor) -> Tensor:
    """Inner products of the rows of a plain matrix less their mean."""
    if matrix_units.pays(rows):
        return matrix_units.centred_gram(rows)[0]
    total = torch.zeros(rows.shape[0], rows.shape[0], dtype=torch.float64, device=rows.device)
    for block in column_blocks(rows):
        wide = block.double()
        wide = wide - wide.mean(0)
        total.addmm_(wide, wide.T)
    return _symmetric(total)


def distances_from(rows: Tensor, some: Tensor) -> Tensor:
    """Squared Euclidean distances from some rows to all rows, in float64.

    Parameters
    ----------
    rows
        A matrix ``[clients, parameters]``.
    some
        The rows to measure from.

    Returns
    -------
    Tensor
        A float64 matrix ``[some, clients]``, not negative; a row's distance to itself may be of the order of rounding.
    """
    mine, centre = take_rows(rows, some), _centre(rows)

    def both(block: Tensor) -> Tensor:
        """Give for each row of a block its products with those to measure from, and its square."""
        product = torch.zeros(len(mine), len(block), dtype=torch.float64, device=rows.device)
        square = torch.zeros(len(block), dtype=torch.float64, device=rows.device)
        most, at = max(len(mine), len(block)), 0
        for left, right in zip(column_blocks(mine, most), column_blocks(block, most), strict=True):
            middle = centre[at : at + left.shape[1]]  # distances are small differences of large numbers otherwise
            wide = right.double() - middle
            product.addmm_(left.double() - middle, wide.T)
            square += wide.square().sum(1)
            at += left.shape[1]
        return torch.cat([product, square.unsqueeze(0)]).T

    if ranks := collective.ranks_of(rows):
        none = torch.empty(0, len(mine) + 1, dtype=torch.float64, device=rows.device)
        found = collective.each(rows, ranks, none, both)
    else:
        found = torch.cat([both(block) for _, block in row_blocks(rows)])
    products, square = found[:, :-1].T.contiguous(), found[:, -1].contiguous()
    return (square[some].unsqueeze(1) + square - 2 * products).clamp_min(0)


def _centre(rows: Tensor) -> Tensor:
    """Give the mean row in float64."""
    out = torch.zeros(rows.shape[1:], dtype=torch.float64, device=rows.device)
    if ranks := collective.ranks_of(rows):
        return collective.summed(rows, ranks, out, lambda _, block: block.sum(0, dtype=torch.float64)) / len(rows)
    for _, block in row_blocks(rows):
        out += block.sum(0, dtype=torch.float64)
    return out / len(rows)


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
    if ranks := collective.ranks_of(rows):
        own = weights.to(rows.dtype)
        start = torch.zeros((*own.shape[:-1], *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        return collective.summed(rows, ranks, start, lambda some, block: own[..., some.here] @ block)
    many = weights.dim() == 2 and len(weights) >= _MANY
    long = many and not isinstance(rows, ClientMatrix) and rows.dim() == 2 and len(rows) >= _LONG
    if long and (ranks := collective.sharing_out(len(weights) * rows.numel())):
        return collective.joined(ranks, lambda some: _mix(weights, rows[:, some], many), rows.shape[1])
    return _mix(weights, rows, many)


def _mix(weights: Tensor, rows: Tensor, many: bool) -> Tensor:
    plain = _together(rows) if many and (rows.is_cuda or not isinstance(rows, ClientMatrix)) else None
    if plain is not None and matrix_units.pays(plain):
        return matrix_units.mixed(weights, plain)
    weights = weights.to(rows.dtype)
    if plain is not None:
        return weights @ plain
    out: Tensor | None = None
    for begin, block in row_blocks(rows):
        part = weights[..., begin : begin + len(block)] @ block
        out = part if out is None else out.add_(part)
    return weights @ rows if out is None else out
