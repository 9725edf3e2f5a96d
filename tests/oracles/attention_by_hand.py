"""FedAMP's and HeurFedAMP's rounds in NumPy, written from their equations with plain loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from tests.oracles.regression import Array, gradient

Batches = dict[int, list[tuple[Array, Array]]]
Attend = Callable[[Array, int, Sequence[int]], Array]
"""From all models, a client and those that speak, to that client's weights over all clients."""


def distance(one: Array, two: Array) -> float:
    return float(((one - two) ** 2).sum())


def median_distance(w: Array, speakers: Sequence[int]) -> float:
    """Median squared distance over pairs; 1 where all models are equal."""
    pairs = [distance(w[i], w[j]) for i in speakers for j in speakers if i < j]
    if not pairs or max(pairs) == 0:
        return 1.0
    middle = float(np.median(pairs))
    return middle if middle > 0 else float(np.median([pair for pair in pairs if pair > 0]))


def fedamp(kappa: float, sigma: float, xi_min: float | None = 0.0) -> Attend:
    """``xi_ij = kappa exp(-|w_i - w_j|²/sigma)``, self weight what is left; ``xi_min=None`` is without the guard."""

    def attend(w: Array, i: int, speakers: Sequence[int]) -> Array:
        xi = np.zeros(len(w))
        for j in speakers:
            if j != i:
                xi[j] = kappa * np.exp(-distance(w[i], w[j]) / sigma)
        if xi_min is not None and xi.sum() > 1 - xi_min:
            xi *= (1 - xi_min) / xi.sum()
            xi[i] = xi_min
        else:
            xi[i] = 1 - xi.sum()
        return xi

    return attend


def heurfedamp(sigma: float, own: Sequence[float]) -> Attend:
    """A given self weight, and a softmax of ``sigma cos(w_i, w_j)`` over the others."""

    def attend(w: Array, i: int, speakers: Sequence[int]) -> Array:
        others = [j for j in speakers if j != i]
        xi = np.zeros(len(w))
        if not others:
            xi[i] = 1.0
            return xi
        score = np.array([sigma * w[i] @ w[j] / np.linalg.norm(w[i]) / np.linalg.norm(w[j]) for j in others])
        weight = np.exp(score - score.max())
        xi[others] = (1 - own[i]) * weight / weight.sum()
        xi[i] = own[i]
        return xi

    return attend


@dataclass
class ByHand:
    """All clients' models as the server and the clients hold them, and the cloud models last sent."""

    w: Array
    speakers: Sequence[int]
    lr: float
    prox: float
    cloud_start: bool = False
    u: Array = field(init=False)

    def __post_init__(self) -> None:
        self.u = self.w.copy()

    def play(self, asked: Sequence[int], batches: Batches, attend: Attend) -> Array:
        """One round; gives the weights of those asked. Clients without batches did not answer."""
        xi = np.array([attend(self.w, i, self.speakers) for i in asked])
        cloud = xi @ self.w
        for i, u in zip(asked, cloud, strict=True):
            self.u[i] = u
            if i not in batches:
                continue
            w = u.copy() if self.cloud_start else self.w[i].copy()
            for batch in batches[i]:
                w = w - self.lr * (gradient(w, batch) + self.prox * (w - u))
            self.w[i] = w
        return xi
