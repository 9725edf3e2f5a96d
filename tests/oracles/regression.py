"""Federated linear regression whose losses are exact quadratics, and what a replay in NumPy needs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie import randomness
from coterie.compute.loop import LoopEngine
from coterie.compute.samples import Samples
from coterie.simulation.simulation import Simulation
from tests.support import linear_regression, samples_of, simulate

Array = NDArray[np.float64]


def quadratics(
    optima: Array, curvatures: Sequence[float], sizes: Sequence[int] | None = None, seed: int = 4
) -> Samples:
    """Clients with ``X_iᵀ X_i = N_i b_i I``, so that ``∇f_i(θ) = b_i (θ − optimum_i)`` on a full batch.

    The targets have a residual orthogonal to the features: no client's loss is zero at its optimum.
    """
    draw = randomness.stream(seed, "test quadratics")
    clients, features = optima.shape
    parts = []
    for client in range(clients):
        count = (sizes or [2 * features] * clients)[client]
        whole = np.linalg.qr(draw.normal(size=(count, count)))[0]
        x = np.sqrt(count * curvatures[client]) * whole[:, :features]
        y = x @ optima[client] + whole[:, features:] @ draw.normal(size=count - features)
        parts.append((torch.from_numpy(x), torch.from_numpy(y)))
    return samples_of(parts)


def points(clients: int, features: int = 3, seed: int = 5) -> Array:
    """Some optima."""
    return randomness.stream(seed, "test optima").normal(size=(clients, features))


def regress(algorithm: str, samples: Samples, settings: dict[str, Any], **options: Any) -> Simulation:
    """A simulation of linear regression, started at zero."""
    return simulate(algorithm, samples, linear_regression(samples.x.shape[1]), settings=settings, **options)


def some(clients: int, count: int, round_number: int) -> Tensor:
    """``count`` of ``clients`` clients, drawn anew each round."""
    drawn = randomness.stream(6, "test cohort", round_number).choice(clients, size=count, replace=False)
    return torch.tensor(sorted(drawn.tolist()))


def gradient(params: Array, batch: tuple[Array, Array]) -> Array:
    """Of ``(1/2n) |X params − y|²``."""
    x, y = batch
    return np.asarray(x.T @ (x @ params - y) / len(y))


class Recorder:
    """Writes down the minibatches that the loop engine draws for each client, for a replay."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: dict[int, list[tuple[Array, Array]]] = defaultdict(list)
        original = LoopEngine._batch

        def watched(engine: LoopEngine, index: Tensor, context: Any, *others: Any) -> Any:
            batch = original(engine, index, context, *others)
            self.seen[int(context.clients)].append((batch.x[0].numpy(), batch.y[0].numpy()))
            return batch

        monkeypatch.setattr(LoopEngine, "_batch", watched)

    def take(self) -> dict[int, list[tuple[Array, Array]]]:
        """Give what was seen since the last time, by client."""
        seen, self.seen = self.seen, defaultdict(list)
        return dict(seen)


def row(value: Tensor) -> Array:
    return np.asarray(value.numpy(), dtype=np.float64)
