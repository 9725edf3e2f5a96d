"""S-FedPG's line search: which steps to try, and which are accepted.

Steps halve from ``2^s eta`` down to ``2^-s eta / sigma``, with ``sigma`` how much rescaling stretched the direction.
(The paper multiplies by it; for ``sigma > 4^s`` that floor lies above the first step and nothing is ever tried.) A step
is accepted if every client's loss and the fairness objective fall by ``beta`` times what their slopes promise.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coterie.algorithms.server_math.fairness import unfairness
from coterie.errors import ConfigError


def trial_steps(eta: float, s: int, sigma_resc: float) -> Tensor:
    """List the steps to try, largest first.

    Parameters
    ----------
    eta
        The round's learning rate.
    s
        How many times it is doubled for the first step.
    sigma_resc
        Length of the direction over its length before rescaling.

    Returns
    -------
    Tensor
        Float64 steps, each half the one before; at least one, and at most ``2 s + 1 + ceil(log2 sigma_resc)`` where
        that is more.

    Raises
    ------
    ConfigError
        If a value is out of its range.

    Examples
    --------
    >>> trial_steps(0.5, 1, 2.0)
    tensor([1.0000, 0.5000, 0.2500, 0.1250], dtype=torch.float64)
    """
    if not (math.isfinite(eta) and eta > 0):
        raise ConfigError(f"eta must be a finite number above 0, but is {eta}")
    if s < 0:
        raise ConfigError(f"s must be at least 0, but is {s}")
    if not (math.isfinite(sigma_resc) and sigma_resc > 0):
        raise ConfigError(f"sigma_resc must be a finite number above 0, but is {sigma_resc}")
    floor = math.ldexp(eta, -s) / sigma_resc
    steps = [math.ldexp(eta, s)]
    while steps[-1] / 2 >= floor:
        steps.append(steps[-1] / 2)
    return torch.tensor(steps, dtype=torch.float64)


def armijo_accepts(
    losses: Tensor,
    trial_losses: Tensor,
    steps: Tensor,
    slopes: Tensor,
    fair_slope: float | None,
    *,
    beta: float = 1e-4,
    protected: Tensor | None = None,
) -> Tensor:
    """Return which steps lower every loss, and the fairness objective, in proportion to their slopes.

    Parameters
    ----------
    losses
        Losses ``[clients]`` where the search starts.
    trial_losses
        Losses ``[steps, clients]`` after each step.
    steps
        The steps ``[steps]``.
    slopes
        ``g_i . d`` of each client ``[clients]``.
    fair_slope
        ``g_F . d``, or ``None`` where the direction was made without the fairness gradient: with equal losses any step
        raises that objective, and none would be accepted.
    beta
        The share of the promised decrease that is asked for.
    protected
        A mask ``[clients]`` of those whose losses must fall; ``None`` for all. A client at its own optimum, left out of
        the direction, would reject every step.

    Returns
    -------
    Tensor
        A boolean a step; a loss that is not finite is never accepted.
    """
    start, tried, size = losses.double(), trial_losses.double(), steps.to(trial_losses.device, torch.float64)
    enough = tried <= start + beta * size.unsqueeze(1) * slopes.double()
    accepted = (enough if protected is None else enough | ~protected).all(1) & tried.isfinite().all(1)
    if fair_slope is None:
        return accepted
    return accepted & (unfairness(tried) - unfairness(start) <= beta * size * fair_slope)


def first_accepted(accepted: Tensor) -> tuple[int, bool]:
    """Choose among tried steps: the first accepted, or the last tried if none was.

    Parameters
    ----------
    accepted
        A boolean a step, in the order in which they are tried.

    Returns
    -------
    at : int
        Which step.
    success : bool
        Whether it was accepted.
    """
    places = accepted.nonzero()
    return (int(places[0]), True) if len(places) else (len(accepted) - 1, False)
