"""The algebra of row matrices, in blocks of columns and, for matrices that lie off the device, in blocks of rows.

Sums are carried in float64 where a result feeds a decision (cosines, distances, Gram matrices), in blocks, so that
memory stays bounded and a float32 matrix loses nothing.

On a CPU, how a matrix is cut depends on its shape and not on where it lies, so that neither do the last bits. Where
several processes compute a run, a matrix that is spread over them and other large products are divided among them, in
the four functions above :func:`norms` and in :func:`mix` (:mod:`coterie.rows._collectives`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from coterie.memory import gpu_memory
from coterie.rows import matrix_units
from coterie.rows._collectives import Collectives, RowsPart, divided
from coterie.rows.access import row_blocks, take_rows
from coterie.rows.matrix import ClientMatrix

_MANY_SUMS = 64  # from which on splitting their terms pays
_LONG_SUM = 256  # terms from which on a sum costs more to compute than to send
_BLOCK_ELEMENTS = 2**22  # of a float64 block on a GPU, where each costs launches: 32 MiB
_CACHED_ELEMENTS = 2**18  # and on a CPU, where it is read again from the core's own cache: 2 MiB
_DENSE_BYTES = 2**30  # up to which a client matrix is copied into a CPU's memory as a whole
_PAIR_BYTES = 2**28  # of a block of rows where pairs of blocks are multiplied


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
    elements = _BLOCK_ELEMENTS if rows.is_cuda else _CACHED_ELEMENTS
    width = max(256, elements // max(1, len(rows) if clients is None else clients))
    whole = not isinstance(rows, ClientMatrix) and rows.shape[1] <= width
    yield from (rows,) if whole else rows.split(width, dim=1)


def _dense(rows: Tensor) -> Tensor | None:
    """Give a matrix as a plain one, if it may lie on the device that computes as a whole."""
    if not isinstance(rows, ClientMatrix):
        return rows
    if rows.is_cuda and rows.backend.device_tensor() is not None:
        return rows.dense()
    return rows.dense() if _fits(rows) else None


def _fits(rows: ClientMatrix, parts: int = 1) -> bool:
    """Say whether one of so many equal parts of a matrix may lie on the device that computes."""
    room = gpu_memory(rows.device)[1] // 8 if rows.is_cuda else _DENSE_BYTES
    return rows.nbytes // parts <= room


def _spread_over(rows: Tensor) -> Collectives | None:
    """Give the processes over which the rows of a matrix are spread; ``None`` if all lie with this one."""
    return rows.backend.collectives if isinstance(rows, ClientMatrix) else None


def _divided(multiplications: int) -> Collectives | None:
    """Give the processes among which a product of plain matrices is to be divided; ``None`` if it is not."""
    group = divided()
    return group if group is not None and group.pays(multiplications) else None


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
    return _sum_rows(rows, out, lambda which, block: (block * weights[which].unsqueeze(1)).sum(0, dtype=torch.float64))


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
    if other is None:
        products = _sum_columns(rows, _gram)
        if products is not None:
            return products
        return _pairs(rows, torch.zeros(rows.shape[1:], dtype=torch.float64, device=rows.device))
    if _spread_over(other) is not None:
        dense = rows.dense() if isinstance(rows, ClientMatrix) else rows
        return _map_rows(other, lambda block: _gram(block, dense)).T
    if _spread_over(rows) is not None:
        return gram(other, rows).T
    if isinstance(other, ClientMatrix):
        return torch.cat([gram(rows, block) for _, block in row_blocks(other)], 1)
    if isinstance(rows, ClientMatrix):
        return torch.cat([gram(block, other) for _, block in row_blocks(rows)])
    if group := _divided(len(other) * rows.numel()):
        return group.sum_slices(lambda columns: _gram(rows[:, columns], other[:, columns]), rows.shape[1])
    return _gram(rows, other)


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


def _sum_rows(rows: Tensor, out: Tensor, part: RowsPart) -> Tensor:
    """Add to zeros what ``part`` makes of every block of rows."""
    if (group := _spread_over(rows)) is not None:
        return group.sum_rows(rows, out, part)
    for begin, block in row_blocks(rows):
        out += part(slice(begin, begin + len(block)), block)
    return out


def _map_rows(rows: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
    """Put together what ``part`` finds for each row of every block."""
    if (group := _spread_over(rows)) is not None:
        return group.map_rows(rows, part)
    return torch.cat([part(block) for _, block in row_blocks(rows)])


def _sum_columns(rows: Tensor, products: Callable[[Tensor], Tensor]) -> Tensor | None:
    """Find products of all pairs of rows, which are sums over columns; ``None`` if the matrix is too large."""
    if (group := _spread_over(rows)) is not None:
        assert isinstance(rows, ClientMatrix)
        return _symmetric(group.sum_columns(rows, products)) if _fits(rows, group.size) else None
    plain = _dense(rows)
    if plain is None:
        return None
    if group := _divided(len(plain) * plain.numel()):
        return _symmetric(group.sum_slices(lambda columns: products(plain[:, columns]), plain.shape[1]))
    return products(plain)


def _pairs(rows: Tensor, centre: Tensor) -> Tensor:
    """Inner products of all pairs of rows less a centre, two blocks of rows at a time."""
    assert isinstance(rows, ClientMatrix)
    count = max(16, _PAIR_BYTES // max(1, rows.backend.row_bytes) // 16 * 16)
    out = torch.zeros(len(rows), len(rows), dtype=torch.float64, device=rows.device)
    group, turn = rows.backend.collectives, 0
    for begin, left in rows.blocks(count):
        for first, right in rows.blocks(count, begin):
            turn += 1
            if group is not None and not group.takes(turn):
                continue
            part = torch.zeros(len(left), len(right), dtype=torch.float64, device=rows.device)
            at = 0
            for one, two in zip(column_blocks(left, count), column_blocks(right, count), strict=True):
                middle = centre[at : at + one.shape[1]]
                part.addmm_(one.double() - middle, (two.double() - middle).T)
                at += one.shape[1]
            out[begin : begin + len(left), first : first + len(right)] = part
            out[first : first + len(right), begin : begin + len(left)] = part.T
    return _symmetric(out if group is None else group.sum(out))


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
    if isinstance(rows, ClientMatrix):
        return _map_rows(rows, norms)
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
    length = products.diagonal().clamp_min(0).sqrt_()
    length = torch.where(length > 0, length, 1.0)
    out = (products / length.unsqueeze(1)).div_(length).clamp_(-1.0, 1.0)
    return (out + out.T).div_(2).fill_diagonal_(1.0)


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
    # Of the squares: what is below may be the matrix units' rounding, and equal models must lie at distance 0.
    floor = 2.0**-20 if matrix_units.pays(rows) else 0.0
    products = _sum_columns(rows, _centred_gram)
    if products is None:
        products, floor = _pairs(rows, _centre(rows)), 0.0
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
    origins, centre = take_rows(rows, some), _centre(rows)

    def both(block: Tensor) -> Tensor:
        """Give for each row of a block its products with those to measure from, and its square."""
        product = torch.zeros(len(origins), len(block), dtype=torch.float64, device=rows.device)
        square = torch.zeros(len(block), dtype=torch.float64, device=rows.device)
        most, at = max(len(origins), len(block)), 0
        for left, right in zip(column_blocks(origins, most), column_blocks(block, most), strict=True):
            middle = centre[at : at + left.shape[1]]  # distances are small differences of large numbers otherwise
            wide = right.double() - middle
            product.addmm_(left.double() - middle, wide.T)
            square += wide.square().sum(1)
            at += left.shape[1]
        return torch.cat([product, square.unsqueeze(0)]).T

    found = _map_rows(rows, both)
    products, square = found[:, :-1].T.contiguous(), found[:, -1].contiguous()
    return (square[some].unsqueeze(1) + square - 2 * products).clamp_min(0)


def _centre(rows: Tensor) -> Tensor:
    """Give the mean row in float64."""
    out = torch.zeros(rows.shape[1:], dtype=torch.float64, device=rows.device)
    return _sum_rows(rows, out, lambda _, block: block.sum(0, dtype=torch.float64)) / len(rows)


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
    if _spread_over(rows) is not None:
        typed = weights.to(rows.dtype)
        out = torch.zeros((*typed.shape[:-1], *rows.shape[1:]), dtype=rows.dtype, device=rows.device)
        return _sum_rows(rows, out, lambda which, block: typed[..., which] @ block)
    many = weights.dim() == 2 and len(weights) >= _MANY_SUMS
    long = many and not isinstance(rows, ClientMatrix) and rows.dim() == 2 and len(rows) >= _LONG_SUM
    if long and (group := _divided(len(weights) * rows.numel())):
        return group.join_slices(lambda columns: _mix(weights, rows[:, columns], many), rows.shape[1])
    return _mix(weights, rows, many)


def _mix(weights: Tensor, rows: Tensor, many: bool) -> Tensor:
    plain = _dense(rows) if many and (rows.is_cuda or not isinstance(rows, ClientMatrix)) else None
    if plain is not None and matrix_units.pays(plain):
        return matrix_units.mixed(weights, plain)
    weights = weights.to(rows.dtype)
    if plain is not None:
        return weights @ plain
    if not isinstance(rows, ClientMatrix):
        return weights @ rows
    out: Tensor | None = None
    for begin, block in row_blocks(rows):
        part = weights[..., begin : begin + len(block)] @ block
        out = part if out is None else out.add_(part)
    return weights @ rows if out is None else out
