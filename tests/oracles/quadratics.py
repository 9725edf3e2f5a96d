"""Federations whose losses are given quadratics, their gradients in NumPy, and the shortest point of a hull."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.compute.samples import Samples
from coterie.randomness import stream
from tests.support import samples_of

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Quadratics:
    """Client i has ``f_i(w) = (w − c_i)' A_i (w − c_i) / 2 + b_i``, and ``features · repeats_i + 1`` samples.

    As a linear regression: rows ``X`` with ``X'X / N = A_i`` and ``y = X c_i``, and one sample that no model reaches.
    """

    curvatures: Array
    centres: Array
    offsets: Array
    repeats: tuple[int, ...]

    @classmethod
    def drawn(cls, seed: int, clients: int, features: int = 6, unequal: bool = True, spread: float = 1.0) -> Quadratics:
        draw = stream(seed, "quadratics")
        roots = draw.normal(size=(clients, features, features))
        curvatures = roots @ roots.transpose(0, 2, 1) / features + 0.5 * np.eye(features)
        centres = 2 * draw.normal(size=features) + spread * draw.normal(size=(clients, features))
        offsets = draw.uniform(0.05, 0.5, size=clients)
        repeats = tuple(1 + (3 * i) % 4 for i in range(clients)) if unequal else (2,) * clients
        return cls(curvatures, centres, offsets, repeats)

    @property
    def clients(self) -> int:
        return len(self.centres)

    @property
    def sizes(self) -> Array:
        return np.array([self.centres.shape[1] * repeat + 1 for repeat in self.repeats], dtype=np.float64)

    def samples(self) -> Samples:
        train = []
        for curvature, centre, offset, repeat in zip(
            self.curvatures, self.centres, self.offsets, self.repeats, strict=True
        ):
            features = len(centre)
            count = features * repeat + 1
            x = np.concatenate([np.sqrt(count / repeat) * np.linalg.cholesky(curvature).T] * repeat)
            y = np.append(x @ centre, np.sqrt(2 * count * offset))
            train.append((torch.from_numpy(np.append(x, np.zeros((1, features)), 0)), torch.from_numpy(y)))
        return samples_of(train)

    def loss(self, w: Array) -> Array:
        """All clients' losses at one model, or at a model each."""
        away = w - self.centres
        return np.einsum("ia,iab,ib->i", away, self.curvatures, away) / 2 + self.offsets

    def gradient(self, w: Array) -> Array:
        """All clients' gradients at one model, or at a model each."""
        return np.einsum("iab,ib->ia", self.curvatures, w - self.centres)

    def optimum(self) -> Array:
        """The minimiser of the clients' mean loss, each counting the same."""
        return np.linalg.solve(self.curvatures.sum(0), np.einsum("iab,ib->a", self.curvatures, self.centres))


def shortest(columns: Array) -> Array:
    """Weights of the shortest point of a hull, by trying every support.

    On the right one the products with the point are all equal, and none of the others is less; a support whose columns
    depend on each other is never needed, unless the origin lies in the hull.
    """
    best, weights = np.inf, np.zeros(len(columns))
    for size in range(1, len(columns) + 1):
        for some in combinations(range(len(columns)), size):
            gram = columns[list(some)] @ columns[list(some)].T
            if np.linalg.cond(gram) > 1e10:
                continue
            lam = np.linalg.solve(gram, np.ones(size))
            lam /= lam.sum()
            if (lam >= 0).all() and lam @ gram @ lam < best:
                best, weights = lam @ gram @ lam, np.zeros(len(columns))
                weights[list(some)] = lam
    return weights
