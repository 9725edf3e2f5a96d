"""FedPG's common descent direction and drift factors, from Gram matrices.

With ``q_k`` the gradients of online clients, of recently absent clients, and of the fairness objective
``F = -cos(L, 1)``, all rescaled to the length ``mu``, the direction is ``d = -sum_k lambda_k q_k`` with the
weights ``lambda`` on the simplex that make it shortest: then ``q_k . d <= -|d|^2 < 0`` for every column, so that every
one of these objectives falls along ``d``.

Only inner products are needed, in float64 and in blocks of columns; nothing of size parameters times parameters exists.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from coterie.algorithms.server_math.fairness import fairness_coefficients
from coterie.algorithms.server_math.line_search import armijo_accepts, trial_steps
from coterie.algorithms.server_math.min_norm import min_norm_point
from coterie.errors import AlgorithmError
from coterie.rows import column_blocks, gram, norms
from coterie.rows.host_copies import to_device

__all__ = [
    "CommonDescent",
    "armijo_accepts",
    "common_descent",
    "drift_factors",
    "fairness_coefficients",
    "rescale",
    "trial_steps",
]

_SMALLEST = 1e-6  # a client whose gradient is shorter has nothing to descend, and no direction worth keeping
_COLLAPSED = 1e-4  # of mu: a direction this short is blamed on the fairness gradient, if it is longer without
_STATIONARY = 1e-8  # of mu: what a float64 Gram matrix can tell from zero
_NO_FAIR_GRADIENT = 1e-10  # of the longest gradient over |L|, which bounds the fairness gradient's natural scale


Fate = Literal["kept", "off", "zero", "collapsed"]
"""What became of the fairness gradient as a column."""


@dataclass(frozen=True)
class CommonDescent:
    """A direction along which every column's objective falls, and how it came about.

    Parameters
    ----------
    direction
        ``[parameters]``, as long as the mean online gradient; zero where ``stationary``.
    raw
        The same before rescaling, ``-sum_k lambda_k q_k``.
    scale
        Length of ``direction`` over that of ``raw``; 1 where nothing was rescaled.
    online_weights
        ``lambda`` of online clients, zero for those left out.
    history_weights
        ``lambda`` of absent clients, zero for those left out.
    fair_weight
        ``lambda`` of the fairness gradient, zero if left out.
    mu
        The common length of the columns.
    online_kept
        Which online clients' gradients are columns.
    history_kept
        Which absent clients' gradients are columns.
    fair
        Whether the fairness gradient is a column: ``"kept"``; or why not: ``"off"`` (not asked for), ``"zero"`` (equal
        losses, or one client), ``"collapsed"`` (only without it is there a direction).
    stationary
        Whether there is no common descent direction that float64 can tell from zero.
    slopes
        ``g_i . direction`` of every online client.
    fair_slope
        ``g_F . direction``, or ``None`` where the fairness gradient is no column.
    """

    direction: Tensor
    raw: Tensor
    scale: float
    online_weights: Tensor
    history_weights: Tensor
    fair_weight: float
    mu: float
    online_kept: Tensor
    history_kept: Tensor
    fair: Fate
    stationary: bool
    slopes: Tensor
    fair_slope: float | None


def rescale(gradients: Tensor, norm: float | None = None, *, smallest: float = _SMALLEST) -> tuple[Tensor, float]:
    """Return the factors that bring rows to one length.

    Parameters
    ----------
    gradients
        A matrix ``[clients, parameters]``.
    norm
        The common length; ``None`` for the mean length of the rows that are kept.
    smallest
        Rows shorter than this are dropped; so are zero rows.

    Returns
    -------
    factors : Tensor
        Float64 ``[clients]``: what to multiply each row by, zero for those dropped.
    norm : float
        The common length, zero if it was to be a mean and no row is kept.
    """
    return _factors(norms(gradients), norm, smallest)


def _factors(lengths: Tensor, norm: float | None, smallest: float) -> tuple[Tensor, float]:
    kept = (lengths >= smallest) & (lengths > 0)
    common = norm if norm is not None else (float(lengths[kept].mean()) if bool(kept.any()) else 0.0)
    return torch.where(kept, common / lengths, 0.0), common


def common_descent(
    gradients: Tensor,
    losses: Tensor,
    history: Tensor | None = None,
    *,
    products: Tensor | None = None,
    fair: bool = True,
    mean_direction: bool = False,
) -> CommonDescent:
    """Find the direction along which all online and absent clients' losses fall, and become more equal.

    Gradients shorter than 1e-6 are left out. So is the fairness gradient where it vanishes, or where it alone makes the
    direction collapse: with dependent gradients it can close the hull around the origin.

    Parameters
    ----------
    gradients
        Gradients of the online clients' losses ``[online, parameters]``.
    losses
        Their losses ``[online]``.
    history
        Last gradients of the absent clients that still count ``[absent, parameters]``.
    products
        Inner products of all these gradients, the online ones first, where they are known: ``[k, k]`` in float64.
    fair
        Whether the fairness gradient is a column (off: ablation M2).
    mean_direction
        Whether to descend along the mean of the online gradients instead (ablation M1).

    Returns
    -------
    CommonDescent
        The direction, of the gradients' type, and its particulars.

    Raises
    ------
    AlgorithmError
        If there are no gradients, not one loss each, or a number is not finite.
    """
    online = gradients.shape[0]
    if online == 0 or losses.shape != (online,):
        raise AlgorithmError(
            f"{online} gradients but {losses.numel()} losses: a common descent needs one loss a gradient"
        )
    # What has a number for each column is computed on the host: on a GPU a launch takes longer than the work.
    device, losses = gradients.device, losses.cpu()
    fair_row = gradients.new_zeros(0, gradients.shape[1])
    if fair and not mean_direction:
        # From the gradients as they are: of the rescaled ones, the sum is not the gradient of F.
        fair_row = _combine((gradients,), to_device(fairness_coefficients(losses), device)).unsqueeze(0)
    parts = _widened((gradients, gradients[:0] if history is None else history, fair_row))
    products = (_joint_gram(parts) if products is None else _bordered(products, parts)).cpu()
    if not bool(products.isfinite().all()) or not bool(losses.isfinite().all()):
        raise AlgorithmError("a common descent needs finite gradients and losses, but some are not finite")

    sizes = [len(part) for part in parts]
    lengths = products.diagonal().clamp_min(0).sqrt().split(sizes)
    online_factors, mu = _factors(lengths[0], None, _SMALLEST)
    history_factors, _ = _factors(lengths[1], mu, _SMALLEST)
    negligible = _NO_FAIR_GRADIENT * float(lengths[0].max()) / max(float(losses.double().norm()), 1e-300)
    fair_factor, _ = _factors(lengths[2], mu, negligible)
    factors = torch.cat([online_factors, history_factors, fair_factor])

    mean = torch.full_like(lengths[0], 1 / online)
    fate: Fate = "off"
    if mean_direction:
        weights = shares = torch.cat([mean, torch.zeros_like(lengths[1])])
        used = torch.cat([online_factors > 0, history_factors < 0])
    else:
        weights, used, fate = _weigh(products, factors, mu, fair)
        shares = weights * factors
    raw = -_combine(parts, to_device(shares, device))
    norm = raw.norm()
    ratio = torch.ones_like(norm)
    if not mean_direction:
        ratio = torch.where(norm == 0, ratio, _combine(parts[:1], to_device(mean, device)).norm() / norm)
    direction = (raw * ratio).to(gradients.dtype)
    found = [*(_products(part, direction) for part in parts), torch.stack([norm, ratio, direction.double().norm()])]
    slopes, rest = torch.cat(found).cpu().split([sum(sizes), 3])  # all at once: to read from a GPU is to wait for it
    length, scale, reach = rest.tolist()
    # Near a Pareto stationary point rounding can cost a column its descent: no step is better than a broken promise.
    rounding = 1e-15 * torch.cat(lengths) * reach
    descends = mean_direction or bool((slopes < -rounding)[used].all())
    stationary = length == 0 or length < _STATIONARY * mu or not descends
    if stationary:
        direction, scale, slopes = torch.zeros_like(direction), 1.0, torch.zeros_like(slopes)
    both = online + sizes[1]
    return CommonDescent(
        direction=direction,
        raw=raw.to(gradients.dtype),
        scale=scale,
        online_weights=to_device(weights[:online], device),
        history_weights=to_device(weights[online:both], device),
        fair_weight=float(weights[both:].sum()),
        mu=mu,
        online_kept=to_device(used[:online], device),
        history_kept=to_device(used[online:both], device),
        fair=fate,
        stationary=stationary,
        slopes=to_device(slopes[:online], device),
        fair_slope=float(slopes[both]) if fate == "kept" else None,
    )


def drift_factors(
    gradients: Tensor,
    direction: Tensor,
    *,
    products: Tensor | None = None,
    history: Tensor | None = None,
    constraining: Tensor | None = None,
) -> Tensor:
    """How far each client may drift from the common direction towards its own gradient without harm to the others.

    Client ``i`` descends along ``d_i = d + gamma_i (-g_i - d)``, with the largest ``gamma_i`` in [0, 1] for which
    ``g_j . d_i <= 0`` for all ``j != i``: with ``a_j = g_j . d < 0`` and ``c_ij = g_j . g_i``, the least of 1 and
    ``|a_j| / (|a_j| + |c_ij|)`` over those with ``c_ij < 0``. Where ``d`` does not serve client ``j`` (``a_j >= 0``, as
    a mean direction allows) it asks that ``d_i`` be no worse to it than ``d``.

    Parameters
    ----------
    gradients
        Gradients of the online clients ``[online, parameters]``, not rescaled.
    direction
        The common direction ``[parameters]``, rescaled.
    products
        Inner products of all gradients, the online ones first, where they are known: ``[k, k]`` in float64.
    history
        Gradients of absent clients that constrain too ``[absent, parameters]``; usually none.
    constraining
        A mask ``[online]`` of the clients that constrain the others; ``None`` for all. A client whose gradient
        vanishes was left out of the direction, and would pin the others to it.

    Returns
    -------
    Tensor
        Float64 ``gamma`` ``[online]`` in [0, 1].
    """
    online = len(gradients)
    inner = gram(gradients) if products is None else products[:online, :online]
    served = _products(gradients, direction)
    binds = ~torch.eye(len(inner), dtype=torch.bool, device=inner.device)
    if constraining is not None:
        binds &= constraining.to(inner.device)
    if history is not None:
        inner = torch.cat([inner, gram(gradients, history) if products is None else products[:online, online:]], 1)
        served = torch.cat([served, _products(history, direction)])
        binds = torch.cat([binds, binds.new_ones(len(binds), len(history))], 1)
    slope = served.clamp_max(0).abs()  # |a_j|, or 0 where d does not serve j
    limit = torch.where(served < 0, inner < 0, inner + served < 0)
    gamma = torch.where(binds & limit, slope / (slope + inner.abs()), 1.0)
    return gamma.amin(1)


def _widened(parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Give matrices in float64 once and for all, where one block of columns is all of them."""
    blocks = column_blocks(parts[0], sum(map(len, parts)))
    return tuple(part.double() for part in parts) if next(blocks).shape == parts[0].shape else parts


def _joint_gram(parts: tuple[Tensor, ...]) -> Tensor:
    """Inner products of all rows of some matrices, which are joined a block of columns at a time."""
    count = sum(map(len, parts))
    total = torch.zeros(count, count, dtype=torch.float64, device=parts[0].device)
    for blocks in zip(*(column_blocks(part, count) for part in parts), strict=True):
        wide = torch.cat([block.double() for block in blocks])
        total.addmm_(wide, wide.T)
    return (total + total.T) / 2


def _bordered(products: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
    """Add to the inner products of all rows but the fairness gradient's those with it, if there is one."""
    fair_row = parts[-1]
    if not len(fair_row):
        return products
    border = torch.cat([_products(part, fair_row[0]) for part in parts])
    return torch.cat([torch.cat([products, border[:-1].unsqueeze(0)]), border.unsqueeze(1)], 1)


def _products(rows: Tensor, vector: Tensor) -> Tensor:
    """Inner products of rows with a vector, in float64."""
    total = torch.zeros(len(rows), dtype=torch.float64, device=rows.device)
    at = 0
    for block in column_blocks(rows):
        total += block.double() @ vector[at : at + block.shape[1]].double()
        at += block.shape[1]
    return total


def _weigh(products: Tensor, factors: Tensor, mu: float, fair: bool) -> tuple[Tensor, Tensor, Fate]:
    """Weights of the min-norm point, which columns it was sought among, and what became of the fairness gradient."""
    scaled = products * factors.unsqueeze(1) * factors
    used = factors > 0
    weights, length = _shortest(scaled, used)
    if not fair:
        return weights, used, "off"
    if not bool(used[-1]):
        return weights, used, "zero"
    if length < _COLLAPSED * mu:
        others = used.clone()
        others[-1] = False
        without, longer = _shortest(scaled, others)
        if longer >= _COLLAPSED * mu:
            return without, others, "collapsed"
    return weights, used, "kept"


def _shortest(scaled: Tensor, used: Tensor) -> tuple[Tensor, float]:
    index = used.nonzero().squeeze(1)
    weights = torch.zeros(len(scaled), dtype=torch.float64, device=scaled.device)
    if len(index) == 0:
        return weights, 0.0
    columns = scaled[index][:, index]
    point = min_norm_point(columns)
    weights[index] = point
    return weights, math.sqrt(max(0.0, float(point @ columns @ point)))


def _combine(parts: tuple[Tensor, ...], weights: Tensor) -> Tensor:
    """Weighted sum of the rows of some matrices, in float64."""
    total = torch.zeros(parts[0].shape[1], dtype=torch.float64, device=parts[0].device)
    for part, share in zip(parts, weights.split([len(part) for part in parts]), strict=True):
        at = 0
        for block in column_blocks(part):
            total[at : at + block.shape[1]] += share @ block.double()
            at += block.shape[1]
    return total
