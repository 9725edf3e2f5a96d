"""How much each client attends to each other client's model: FedACS, FedAMP and HeurFedAMP.

- FedACS: row-normalised cosines of the models above a quantile of all cosines;
- FedAMP: ``xi_ij = (alpha/sigma) exp(-|w_i - w_j|^2 / sigma)``, and what is left of 1 for the client itself;
- HeurFedAMP: a fixed self weight, and a softmax of ``sigma cos(w_i, w_j)`` over the others.

All weights are float64 matrices whose row ``i`` is over the models that client ``i`` mixes, and sum to one by row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coterie.errors import ConfigError
from coterie.rows import cosines, distances_from, gram, norms, squared_distances, take_rows
from coterie.rows.host_copies import on_host, to_device


def quantile(values: Tensor, level: float) -> Tensor:
    """Quantile with linear interpolation between order statistics, as NumPy's default, for any number of entries.

    ``torch.quantile`` refuses more than 2**24 entries, which is the cosine matrix of 4,097 clients.

    Parameters
    ----------
    values
        Any shape, at least one entry.
    level
        Between 0 and 1.

    Returns
    -------
    Tensor
        A scalar of the values' type, equal to ``numpy.quantile`` to the last bit.

    Examples
    --------
    >>> quantile(torch.tensor([3.0, 0.0, 1.0]), 0.75).item()
    2.0
    """
    # Sorted, not selected: torch.kthvalue takes quadratic time on values that are in order already.
    ordered = values.reshape(-1).sort().values
    position = level * (ordered.numel() - 1)
    below = math.floor(position)
    share = position - below
    low, high = ordered[below], ordered[min(below + 1, ordered.numel() - 1)]
    # From the nearer end, so that the result is monotone in the level and exact at both ends.
    return low + (high - low) * share if share < 0.5 else high - (high - low) * (1 - share)


def select_by_quantile(cosines: Tensor, p: float, offdiag: bool = False) -> Tensor:
    """Select for each client itself and those whose cosine is positive and strictly above the quantile.

    Parameters
    ----------
    cosines
        A symmetric matrix ``[clients, clients]`` with ones on its diagonal.
    p
        The level of the quantile, at most 1; at 0 or below every positive cosine is selected.
    offdiag
        Whether the quantile is over pairs of different clients only, so that ``p`` is the share of pairs rejected,
        instead of over all entries.

    Returns
    -------
    Tensor
        A boolean matrix ``[clients, clients]``, true on the diagonal.

    Raises
    ------
    ConfigError
        If ``p`` is above 1 or not a number.
    """
    if not p <= 1.0:
        raise ConfigError(f"p must be at most 1, but is {p}")
    clients = cosines.shape[0]
    selected = cosines > 0
    if p > 0 and clients > 1:
        among = cosines
        if offdiag:
            among = cosines[~torch.eye(clients, dtype=torch.bool, device=cosines.device)]
        selected &= cosines > quantile(among, p)
    # The threshold may be 1 itself: by the strict inequality alone a client would lose its own model, and everything.
    return selected.fill_diagonal_(True)


def fedacs_weights(
    models: Tensor,
    p: float,
    *,
    offdiag: bool = False,
    apart: Tensor | None = None,
    factors: Tensor | None = None,
) -> Tensor:
    """FedACS: cosines of the selected models, normalised by row.

    Parameters
    ----------
    models
        A matrix ``[clients, parameters]``, the participants' models.
    p
        The pick ratio: cosines at or below this quantile are not selected.
    offdiag
        Whether the quantile is over pairs of different clients only.
    apart
        Clients whose models are so old or so young that by the quantile of all pairs they would be like nobody: they
        select others whose cosine is positive and at or above the quantile of their own row, over those whose factor
        is not 0.
    factors
        Of each model for each client ``[clients, clients]``, in [0, 1]: a factor on its weight. A client for which
        nothing is left keeps its weights without.

    Returns
    -------
    Tensor
        A float64 matrix ``[clients, clients]``, not negative; without ``factors`` positive on its diagonal.

    Examples
    --------
    >>> fedacs_weights(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), 0.0)
    tensor([[1., 0.],
            [0., 1.]], dtype=torch.float64)
    """
    similarity = cosines(models)
    selected = select_by_quantile(similarity, p, offdiag)
    if apart is not None and len(apart):
        spoken = torch.ones_like(selected) if factors is None else factors > 0
        selected[apart] = _select_in_rows(similarity[apart], apart, p, spoken[apart])
    chosen = torch.where(selected, similarity, 0.0)
    if factors is not None:
        left = chosen * factors
        chosen = torch.where(left.sum(1, keepdim=True) > 0, left, chosen)
    return chosen / chosen.sum(1, keepdim=True)


def _select_in_rows(cosines: Tensor, clients: Tensor, p: float, spoken: Tensor) -> Tensor:
    """Select for each client itself and those as similar to it as the quantile of its own row, or more."""
    place = torch.arange(len(clients), device=cosines.device)
    others = spoken.clone()
    others[place, clients] = False
    selected = (cosines > 0) & others
    if p > 0 and bool(others.any()):
        # Rows may differ by one in how many others there are: what is none comes last.
        ordered = torch.where(others, cosines, torch.inf).sort(1).values
        last = (others.sum(1) - 1).clamp_min(0)
        position = p * last.double()
        below = position.floor().long()
        low, high = (ordered.gather(1, at.unsqueeze(1)) for at in (below, torch.minimum(below + 1, last)))
        share = (position - below).unsqueeze(1)
        selected &= cosines >= torch.where(share > 0, low + (high - low) * share, low)
    selected[place, clients] = True
    return selected


def median_squared_distance(models: Tensor, *, distances: Tensor | None = None) -> Tensor:
    """Median squared distance between different clients' models: FedAMP's natural ``sigma``.

    Clients that have not trained yet hold the same model. Where so many pairs coincide that the median is zero, it is
    taken over the pairs that do not, for a ``sigma`` of zero would stop all attention; where all models coincide it is
    1, since every ``sigma`` then gives the same weights.

    Parameters
    ----------
    models
        A matrix ``[clients, parameters]``.
    distances
        The squared distances of all pairs, if they are known already.

    Returns
    -------
    Tensor
        A positive float64 scalar.
    """
    known = squared_distances(models) if distances is None else distances.double()
    first, second = torch.triu_indices(len(known), len(known), 1, device=known.device)
    pairs = known[first, second]
    if pairs.numel() == 0:
        return torch.ones((), dtype=torch.float64, device=known.device)
    # Distances are differences of float64 products of centred models: equal models may seem to lie this far apart.
    rounding = 1e-14 * pairs.max() + 1e-30 * norms(models).max().square()
    apart = pairs[pairs > rounding]
    if apart.numel() == 0:
        return torch.ones((), dtype=torch.float64, device=known.device)
    median = quantile(pairs, 0.5)
    return median if median > rounding else quantile(apart, 0.5)


def fedamp_weights(
    models: Tensor,
    alpha_over_sigma: float,
    sigma: float | Tensor,
    guard: bool = True,
    xi_min: float = 0.0,
    *,
    rows: Tensor | None = None,
    distances: Tensor | None = None,
) -> tuple[Tensor, int]:
    """FedAMP: ``xi_ij = (alpha/sigma) exp(-|w_i - w_j|^2 / sigma)`` for others, ``1 - sum`` for the client itself.

    Parameters
    ----------
    models
        A matrix ``[clients, parameters]``.
    alpha_over_sigma
        The weight of an identical model, the paper's ``alpha_k / sigma``.
    sigma
        The squared distance at which attention has fallen by a factor ``e``.
    guard
        Whether a row whose attention to others exceeds ``1 - xi_min`` is scaled down to it; without, its self weight
        is negative.
    xi_min
        The least self weight under the guard.
    rows
        The clients whose weights are wanted; ``None`` for all, in order.
    distances
        The squared distances from those clients to all models, if they are known already.

    Returns
    -------
    xi : Tensor
        A float64 matrix ``[rows, clients]``.
    guarded : int
        How many rows the guard scaled down.

    Raises
    ------
    ConfigError
        If a value is out of its range.
    """
    width = float(sigma)
    if not (math.isfinite(alpha_over_sigma) and alpha_over_sigma >= 0):
        raise ConfigError(f"alpha_over_sigma must be a finite number of at least 0, but is {alpha_over_sigma}")
    if not (math.isfinite(width) and width > 0):
        raise ConfigError(f"sigma must be a finite number above 0, but is {width}")
    if not 0 <= xi_min <= 1:
        raise ConfigError(f"xi_min must lie in [0, 1], but is {xi_min}")
    if distances is None:
        known = squared_distances(models) if rows is None else distances_from(models, rows)
    else:
        known = distances.double()
    xi = alpha_over_sigma * torch.exp(-known / width)
    place, itself = _own_places(xi, rows)
    xi[place, itself] = 0.0
    others = xi.sum(1)
    own = 1 - others
    over = others > 1 - xi_min if guard else torch.zeros_like(others, dtype=torch.bool)
    xi = torch.where(over.unsqueeze(1), xi * ((1 - xi_min) / others).unsqueeze(1), xi)
    xi[place, itself] = torch.where(over, xi_min, own)
    return xi, int(over.sum())


def heurfedamp_weights(
    models: Tensor,
    sigma: float,
    self_weight: float | Tensor,
    *,
    rows: Tensor | None = None,
    speakers: Tensor | None = None,
) -> Tensor:
    """HeurFedAMP: a given self weight, the rest by a softmax of ``sigma cos(w_i, w_j)`` over the others.

    Parameters
    ----------
    models
        A matrix ``[clients, parameters]``.
    sigma
        How sharply attention prefers the most similar models; 0 is uniform.
    self_weight
        ``xi_ii`` in [0, 1], one for all or one a client (of ``models``, not of ``rows``).
    rows
        The clients whose weights are wanted; ``None`` for all, in order.
    speakers
        The clients that others listen to; ``None`` for all.

    Returns
    -------
    Tensor
        A float64 matrix ``[rows, clients]``; a client to whom no other speaks has weight 1.

    Raises
    ------
    ConfigError
        If a value is out of its range.
    """
    if not (math.isfinite(sigma) and sigma >= 0):
        raise ConfigError(f"sigma must be a finite number of at least 0, but is {sigma}")
    clients = models.shape[0]
    known = on_host(torch.as_tensor(self_weight, dtype=torch.float64))  # where no GPU has to be waited for
    if known.dim() > 1 or (known.dim() == 1 and known.shape[0] != clients):
        raise ConfigError(
            f"self_weight must be one number or one a client ({clients}), but has shape {list(known.shape)}"
        )
    if not bool(((known >= 0) & (known <= 1)).all()):
        raise ConfigError(f"self_weight must lie in [0, 1], but is {known.tolist()}")
    own = to_device(known, models.device)
    similarity = cosines(models) if rows is None else _cosines_of(models, rows)
    place, itself = _own_places(similarity, rows)
    heard = torch.ones_like(similarity, dtype=torch.bool)
    if speakers is not None:
        heard = torch.zeros_like(heard).index_fill(1, speakers, True)
    heard[place, itself] = False
    # Shifted by the row's largest before sigma multiplies it: sigma may be large enough to overflow an exponential.
    best = similarity.masked_fill(~heard, -torch.inf).amax(1, keepdim=True)
    attention = torch.where(heard, torch.exp(sigma * (similarity - best)), 0.0)
    own = torch.where(heard.any(1), own.expand(clients)[itself], 1.0)
    xi = attention * ((1 - own) / attention.sum(1).clamp_min(1)).unsqueeze(1)
    xi[place, itself] = own
    return xi


def _own_places(weights: Tensor, rows: Tensor | None) -> tuple[Tensor, Tensor]:
    """Row and column of every client's own entry."""
    place = torch.arange(weights.shape[0], device=weights.device)
    return place, place if rows is None else rows.to(weights.device)


def _cosines_of(models: Tensor, rows: Tensor) -> Tensor:
    length = norms(models)
    length = torch.where(length > 0, length, torch.ones_like(length))
    return (gram(take_rows(models, rows), models) / length[rows].unsqueeze(1) / length).clamp(-1.0, 1.0)
