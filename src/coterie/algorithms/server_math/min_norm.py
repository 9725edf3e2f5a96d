"""The point of least norm in the convex hull of vectors, from their Gram matrix.

For vectors ``q_1 … q_k`` with Gram matrix ``G`` these give weights that minimise ``|sum_k x_k q_k|^2 = x' G x`` over
``sum x = 1`` and bounds. Only the ``k x k`` matrix is needed, so a million parameters cost one matrix product.

The optimality conditions hold to rounding, relative to the largest squared norm (about 1e-14 on the simplex, 1e-12 in
a box), for Gram matrices of any rank: with duplicated, opposite, zero and nearly dependent vectors, and with the origin
in the hull. Quadratic programming packages that factorise ``G`` refuse such matrices unless a ridge is added.
"""

from __future__ import annotations

import functools
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import lapack
from scipy.optimize import nnls
from threadpoolctl import ThreadpoolController
from torch import Tensor

from coterie.errors import AlgorithmError, ConfigError

_Vector = NDArray[np.float64]

_OPTIMAL = 1e-12  # a column's gain below this, relative to the largest squared norm, is rounding
_SETTLED = 1e-14  # slopes of free columns that agree to this are as equal as a product with G can tell
_RIDGE = 1e-13  # keeps the factorisation regular; a step it shortens is refined, one it does not reach ends at a bound


def min_norm_point(gram: Tensor) -> Tensor:
    """Weights on the simplex that minimise the norm of the weighted sum.

    Minimising ``x'Gx`` over the simplex is minimising ``y'Gy + (1'y - 1)^2`` over ``y >= 0`` up to the length of ``y``:
    a non-negative least squares problem in a square root of ``G``, for which Lawson's and Hanson's active set method
    ends at the exact solution.

    Parameters
    ----------
    gram
        Inner products ``[k, k]`` of the vectors, symmetric.

    Returns
    -------
    Tensor
        Float64 weights ``[k]``, not negative, of sum one.

    Examples
    --------
    >>> min_norm_point(torch.diag(torch.tensor([1.0, 3.0])))
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    matrix = _scaled(gram)
    size = len(matrix)
    # Threads only wait for each other over so small a matrix: with 16 of them a round of FedPG took 13 to 50 ms, with
    # one 9. And what is computed does not depend on their number.
    with _thread_pools().limit(limits=1):
        values, vectors = np.linalg.eigh(matrix)
        root = (vectors * np.sqrt(np.maximum(values, 0.0))).T
        try:
            # The default limit, three times the columns, is sometimes short for degenerate ones.
            point = nnls(np.vstack([root, np.ones(size)]), np.append(np.zeros(size), 1.0), maxiter=30 * size)[0]
        except RuntimeError:
            point = _active_set(matrix, np.zeros(size), np.ones(size))
    return torch.from_numpy(point / point.sum()).to(gram.device)


def min_norm_point_in_box(gram: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    """Weights of sum one within bounds that minimise the norm of the weighted sum.

    Parameters
    ----------
    gram
        Inner products ``[k, k]`` of the vectors, symmetric.
    lower
        Least weights ``[k]``.
    upper
        Largest weights ``[k]``.

    Returns
    -------
    Tensor
        Float64 weights ``[k]`` within the bounds, of sum one.

    Raises
    ------
    ConfigError
        If no weights of sum one lie within the bounds.

    Examples
    --------
    >>> bounds = torch.zeros(2), torch.tensor([0.6, 1.0])
    >>> min_norm_point_in_box(torch.diag(torch.tensor([1.0, 3.0])), *bounds)
    tensor([0.6000, 0.4000], dtype=torch.float64)
    """
    low, high = (_host(bound) for bound in (lower, upper))
    if (crossed := np.flatnonzero(~(low <= high))).size:
        at = crossed[0]
        raise ConfigError(f"the lower bound {low[at]:.6g} of column {at} is above its upper bound {high[at]:.6g}")
    if low.sum() > 1 + 1e-6:
        raise ConfigError(f"the lower bounds sum to {low.sum():.6g}, but must leave room for a sum of 1")
    if high.sum() < 1 - 1e-6:
        raise ConfigError(f"the upper bounds sum to {high.sum():.6g}, but must allow a sum of 1")
    return torch.from_numpy(_active_set(_scaled(gram), low, high)).to(gram.device)


@functools.cache
def _thread_pools() -> ThreadpoolController:
    return ThreadpoolController()


def _host(values: Tensor) -> _Vector:
    return cast("_Vector", values.detach().to("cpu", torch.float64).numpy())


def _scaled(gram: Tensor) -> _Vector:
    """Return the Gram matrix with largest diagonal entry 1, exactly symmetric."""
    matrix = _host(gram)
    if not np.isfinite(matrix).all():
        raise AlgorithmError("the gradients' Gram matrix is not finite: some client's gradient is NaN or infinite")
    largest = matrix.diagonal().max()
    return (matrix + matrix.T) / (2 * largest) if largest > 0 else np.zeros_like(matrix)


def _active_set(gram: _Vector, lower: _Vector, upper: _Vector) -> _Vector:
    """Minimise ``x'Gx`` over ``sum x = 1`` and a box, for a positive semidefinite ``G`` with largest entry 1.

    The classical primal method. All columns start free and strictly inside. Each iteration takes the Newton step of
    the free columns along ``sum = 1``; columns that reach a bound on the way are fixed there. Where the step goes all
    the way, the free slopes agree, and the fixed column that would gain most is freed. Each iteration lowers the
    objective, so none repeats; a column with no curvature (a duplicate) simply walks until it meets a bound.
    """
    room = upper - lower
    spread = room.sum()
    point = lower + room * (np.clip(1 - lower.sum(), 0.0, spread) / spread) if spread > 0 else lower.copy()
    movable = room > 0
    free = movable.copy()
    refined = 0
    for _ in range(100 * (len(gram) + 1)):
        slope = gram @ point
        index = np.flatnonzero(free)
        if index.size == 0:
            pair = _exchange(slope, movable & (point <= lower), movable & (point > lower))
            if pair is None:
                return point
            free[pair] = True
            continue
        step = _newton_step(gram[np.ix_(index, index)], slope[index])
        reach = np.full(index.size, np.inf)
        np.divide(np.where(step < 0, lower[index], upper[index]) - point[index], step, out=reach, where=step != 0)
        length = min(1.0, float(reach.min()))
        point[index] = np.clip(point[index] + length * step, lower[index], upper[index])
        if length < 1.0:
            met = index[reach <= length]
            point[met] = np.where(step[reach <= length] < 0, lower[met], upper[met])
            free[met] = False
            refined = 0
            continue
        slope = gram @ point
        level = slope[index].mean()
        if np.abs(slope[index] - level).max() > _SETTLED and refined < 3:
            refined += 1
            continue
        refined = 0
        gain = np.where(free | ~movable, 0.0, np.where(point <= lower, level - slope, slope - level))
        best = int(gain.argmax())
        if gain[best] <= _OPTIMAL:
            return point
        free[best] = True
    raise AlgorithmError(f"the min-norm point of {len(gram)} gradients was not found: their Gram matrix is damaged")


def _newton_step(curvature: _Vector, slope: _Vector) -> _Vector:
    """Return the step of sum zero to the least value of a quadratic."""
    # Adding a constant to the matrix changes nothing on steps of sum zero, and makes it regular across them.
    ridge = _RIDGE
    while True:
        matrix = curvature + 1.0
        matrix[np.diag_indices_from(matrix)] += ridge
        factor, failed = lapack.dpotrf(matrix, lower=1)
        if not failed:
            break
        ridge *= 10.0
    both = np.stack([slope - slope.mean(), np.ones_like(slope)], axis=1)
    toward, across = lapack.dpotrs(factor, both, lower=1)[0].T
    step = across * (toward.sum() / across.sum()) - toward
    return cast("_Vector", step - step.mean())


def _exchange(slope: _Vector, may_rise: NDArray[np.bool_], may_fall: NDArray[np.bool_]) -> list[int] | None:
    """Find the two fixed columns between which moving weight gains most, if any does."""
    if not may_rise.any() or not may_fall.any():
        return None
    rising = int(np.where(may_rise, slope, np.inf).argmin())
    falling = int(np.where(may_fall, slope, -np.inf).argmax())
    return [rising, falling] if slope[falling] - slope[rising] > _OPTIMAL else None
