"""Aggregators any method with a global model can use: the mean, and means that survive clients who send anything.

The robust ones take no weights: how much data a client has is the client's own claim, and a client that may send any
model may claim any number. A row with an entry that is not finite counts as infinitely far from all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from coterie.errors import ConfigError, UnknownName
from coterie.rows import column_blocks, mix
from coterie.rows.host_copies import on_host


def mean(rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """Weighted mean of rows.

    Parameters
    ----------
    rows
        A matrix ``[clients, parameters]``.
    weights
        One a client, not negative, of any positive sum; ``None`` for equal weights.

    Returns
    -------
    Tensor
        ``[parameters]``, of the rows' type.

    Raises
    ------
    ConfigError
        If there are no rows, or the weights are not one a row, are negative, or sum to zero.
    """
    clients = _count(rows)
    wide = torch.ones(clients, dtype=torch.float64) if weights is None else weights.double()
    known = on_host(wide).numpy()
    if known.shape != (clients,) or not (known >= 0).all() or not known.sum() > 0:
        raise ConfigError(
            f"weights must be {clients} numbers of at least 0 with a positive sum, but are {wide.tolist()}"
        )
    return mix((wide / wide.sum()).to(rows.device), rows)


def krum_scores(rows: Tensor, f: int, *, strict: bool = True) -> Tensor:
    """Krum's score of each row: the sum of squared distances to its ``clients - f - 2`` nearest others.

    Parameters
    ----------
    rows
        A matrix ``[clients, parameters]``.
    f
        How many of the clients may be hostile.
    strict
        Whether to insist on ``2 f + 2 < clients``, without which Krum guarantees nothing.

    Returns
    -------
    Tensor
        Float64 scores ``[clients]``; infinite for a row that is not finite.

    Raises
    ------
    ConfigError
        If ``f`` is negative or too large for the number of rows.
    """
    clients = _count(rows)
    if f < 0:
        raise ConfigError(f"f must be at least 0, but is {f}")
    if strict and 2 * f + 2 >= clients:
        raise ConfigError(f"f must satisfy 2 f + 2 < {clients}, the number of rows, but f = {f}")
    neighbours = clients - f - 2
    if neighbours < 1:
        raise ConfigError(f"f must leave at least one neighbour among {clients} rows (f <= {clients - 3}), but f = {f}")
    away = _distances(rows).fill_diagonal_(torch.inf)
    return away.sort(1).values[:, :neighbours].sum(1)


def krum(rows: Tensor, f: int, *, strict: bool = True) -> Tensor:
    """Krum (Blanchard et al., 2017): the one row with the lowest score.

    Parameters
    ----------
    rows
        A matrix ``[clients, parameters]``.
    f
        How many of the clients may be hostile.
    strict
        Whether to insist on ``2 f + 2 < clients``.

    Returns
    -------
    Tensor
        ``[parameters]``, a copy of one row; of equal scores the first client's.
    """
    return rows[krum_scores(rows, f, strict=strict).argsort(stable=True)[0]].clone()


def multi_krum(rows: Tensor, f: int, *, select: int | None = None, strict: bool = True) -> Tensor:
    """Multi-Krum (Blanchard et al., 2017): the mean of the rows with the lowest scores.

    Parameters
    ----------
    rows
        A matrix ``[clients, parameters]``.
    f
        How many of the clients may be hostile.
    select
        How many rows to average; ``None`` for ``clients - f``.
    strict
        Whether to insist on ``2 f + 2 < clients``.

    Returns
    -------
    Tensor
        ``[parameters]``; with ``f`` 0 and all selected, the mean, of however few rows.

    Raises
    ------
    ConfigError
        If ``f`` is negative or too large for the number of rows, or ``select`` is not a number of rows.
    """
    clients = _count(rows)
    chosen = clients - f if select is None else select
    if f == 0 and chosen == clients:
        return mean(rows)
    scores = krum_scores(rows, f, strict=strict)
    if not 1 <= chosen <= clients:
        raise ConfigError(f"select must be between 1 and {clients}, but is {chosen}")
    return mean(rows[scores.argsort(stable=True)[:chosen].sort().values])


def coordinate_median(rows: Tensor) -> Tensor:
    """Median of each coordinate; of an even number of rows, the middle of the two in the middle.

    Parameters
    ----------
    rows
        A matrix ``[clients, parameters]``.

    Returns
    -------
    Tensor
        ``[parameters]``, of the rows' type.
    """
    return _mean_of_middle(rows, (_count(rows) - 1) // 2)


def trimmed_mean(rows: Tensor, f: int) -> Tensor:
    """Mean of each coordinate without its ``f`` smallest and ``f`` largest values.

    Parameters
    ----------
    rows
        A matrix ``[clients, parameters]``.
    f
        How many of the clients may be hostile.

    Returns
    -------
    Tensor
        ``[parameters]``, of the rows' type.

    Raises
    ------
    ConfigError
        If ``f`` is negative or leaves no value.
    """
    clients = _count(rows)
    if not 0 <= 2 * f < clients:
        raise ConfigError(f"f must satisfy 2 f < {clients}, the number of rows, and be at least 0, but f = {f}")
    return _mean_of_middle(rows, f)


def tolerated(name: str, clients: int) -> int:
    """Return how many hostile clients among ``clients`` an aggregator tolerates.

    Parameters
    ----------
    name
        The aggregator.
    clients
        How many clients there are.

    Returns
    -------
    int
        The largest ``f`` that it takes; 0 for the mean, and where Krum has too few rows to choose by.

    Raises
    ------
    UnknownName
        If there is no such aggregator.
    """
    if name not in AGGREGATORS:
        raise UnknownName("aggregator", name, AGGREGATORS)
    least = {"mean": clients, "krum": 3, "multi_krum": 3}.get(name, 1)  # clients that it needs besides 2 f
    return max(0, (clients - least) // 2)


AGGREGATORS: dict[str, tuple[Callable[..., Tensor], frozenset[str], frozenset[str]]] = {
    "mean": (mean, frozenset(), frozenset()),
    "krum": (lambda rows, _, **options: krum(rows, **options), frozenset({"f"}), frozenset({"strict"})),
    "multi_krum": (
        lambda rows, _, **options: multi_krum(rows, **options),
        frozenset({"f"}),
        frozenset({"select", "strict"}),
    ),
    "median": (lambda rows, _: coordinate_median(rows), frozenset(), frozenset()),
    "trimmed_mean": (lambda rows, _, **options: trimmed_mean(rows, **options), frozenset({"f"}), frozenset()),
}
"""For each name: the aggregator of rows and weights, the options it needs, and those it may be given."""


def aggregate(name: str, rows: Tensor, weights: Tensor | None = None, **options: Any) -> Tensor:
    """Aggregate rows by the aggregator of that name.

    Parameters
    ----------
    name
        ``"mean"``, ``"krum"``, ``"multi_krum"``, ``"median"`` or ``"trimmed_mean"``.
    rows
        A matrix ``[clients, parameters]``.
    weights
        One a client, or ``None`` for equal weights; only the mean looks at them.
    **options
        The aggregator's own: ``f`` for all but the mean and the median.

    Returns
    -------
    Tensor
        ``[parameters]``, of the rows' type.

    Raises
    ------
    UnknownName
        If there is no such aggregator.
    ConfigError
        If an option is missing or not one of the aggregator's.

    Examples
    --------
    >>> aggregate("trimmed_mean", torch.tensor([[0.0], [1.0], [50.0]]), f=1)
    tensor([1.])
    """
    if name not in AGGREGATORS:
        raise UnknownName("aggregator", name, AGGREGATORS)
    function, needed, allowed = AGGREGATORS[name]
    for option in sorted(options.keys() - needed - allowed):
        known = ", ".join(sorted(needed | allowed)) or "none"
        raise ConfigError(f"aggregator {name!r} takes no option {option!r} (its options: {known})")
    for option in sorted(needed - options.keys()):
        raise ConfigError(f"aggregator {name!r} needs the option {option!r}")
    return function(rows, weights, **options)


def _count(rows: Tensor) -> int:
    if rows.shape[0] == 0:
        raise ConfigError("there are no rows to aggregate, but at least one is needed")
    return rows.shape[0]


def _mean_of_middle(rows: Tensor, trim: int) -> Tensor:
    kept = rows.shape[0] - 2 * trim
    # Sorting puts NaN above infinity, so that a row of NaN is trimmed like any other extreme.
    blocks = [block.sort(0).values.narrow(0, trim, kept).double().mean(0) for block in column_blocks(rows)]
    return torch.cat(blocks).to(rows.dtype)


def _distances(rows: Tensor) -> Tensor:
    """Squared distances of all pairs of rows, honest ones as exact as if hostile ones were not there.

    Differences of large numbers lose the small ones, so rows are centred first; on their median, for one hostile row
    can put the mean anywhere.
    """
    clients = rows.shape[0]
    total = torch.zeros(clients, clients, dtype=torch.float64, device=rows.device)
    for block in column_blocks(rows):
        wide = block.double()
        wide = wide - wide.nanmedian(0).values
        total.addmm_(wide, wide.T)
    products = (total + total.T) / 2
    square = products.diagonal()
    away = (square.unsqueeze(1) + square - 2 * products).clamp_min(0)
    return torch.where(away.isfinite(), away, torch.inf)
