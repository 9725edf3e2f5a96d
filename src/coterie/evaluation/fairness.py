"""How evenly a method serves its clients."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.errors import ConfigError


@dataclass(frozen=True)
class Fairness:
    """How evenly clients are served.

    Parameters
    ----------
    clients
        How many clients were counted: those asked for whose score is defined.
    mean
        Unweighted mean of their scores.
    std
        Standard deviation of their scores over clients (ddof 0).
    worst_decile
        Mean score of the worst tenth of them, at least one.
    worst_client
        The worst score.
    loss_variance
        Variance of their mean losses (ddof 0); this is what papers plot.
    loss_variance_sample
        The same with ddof 1.
    """

    clients: int
    mean: float
    std: float
    worst_decile: float
    worst_client: float
    loss_variance: float
    loss_variance_sample: float


def variance(values: Tensor, ddof: int = 0) -> float:
    """Variance over clients in float64, NaN where there are not more than ``ddof`` clients."""
    wide = values.double()
    if len(wide) <= ddof:
        return math.nan
    return float((wide - wide.mean()).square().sum() / (len(wide) - ddof))


def worst_decile(scores: Tensor, higher_is_better: bool = True) -> float:
    """Mean score of the worst tenth of the clients, rounded down but at least one; NaN without clients."""
    if not len(scores):
        return math.nan
    ordered = torch.sort(scores.double(), descending=not higher_is_better).values
    return float(ordered[: max(1, len(ordered) // 10)].mean())


def fairness(scores: Tensor, losses: Tensor, benign: Tensor | None = None, higher_is_better: bool = True) -> Fairness:
    """Measure how evenly clients are served.

    Parameters
    ----------
    scores
        The primary metric of each client, ``[clients]``; a client whose score is NaN (undefined) is left out.
    losses
        The **mean** test loss of each client, ``[clients]``. A sum over batches would measure sizes.
    benign
        Booleans ``[clients]`` that mark the honest clients, or ``None`` for all.
    higher_is_better
        Whether a higher score is better.

    Returns
    -------
    Fairness
        What was found; a loss that is NaN for a counted client shows as NaN.

    Raises
    ------
    ConfigError
        If the arguments are not one number a client each.
    """
    shapes = [tuple(value.shape) for value in (scores, losses, benign) if value is not None]
    if len(set(shapes)) != 1 or len(shapes[0]) != 1:
        raise ConfigError(f"fairness needs one score, loss and mark for each client, not shapes {shapes}")
    counted = ~scores.isnan() if benign is None else benign.bool() & ~scores.isnan()
    score, loss = scores[counted].double(), losses[counted]
    worst = math.nan
    if len(score):
        worst = float(score.min() if higher_is_better else score.max())
    return Fairness(
        clients=len(score),
        mean=float(score.mean()) if len(score) else math.nan,
        std=math.sqrt(variance(score)),
        worst_decile=worst_decile(score, higher_is_better),
        worst_client=worst,
        loss_variance=variance(loss),
        loss_variance_sample=variance(loss, ddof=1),
    )
