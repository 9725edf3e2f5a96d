"""FedPG's and S-FedPG's equations in NumPy on quadratics, written from the specification."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from tests.oracles.quadratics import Array, Quadratics, shortest


def unfairness(losses: Array) -> float:
    """``F = −cos(L, 1)``."""
    return float(-losses.sum() / (np.linalg.norm(losses) * np.sqrt(len(losses))))


def fairness_gradient(losses: Array, gradients: Array) -> Array:
    length, one = np.linalg.norm(losses), np.sqrt(len(losses))
    h = (losses.sum() * losses / (one * length**2) - 1 / one) / length
    return np.asarray(h @ gradients)


@dataclass
class Played:
    """What one round computed."""

    online: list[int]
    absent: list[int]
    omega: Array
    gradients: Array
    stale: Array
    losses: Array
    fair: Array
    raw: Array
    d: Array
    gamma: Array
    eta: float


@dataclass
class ByHand:
    """The state of the method; ``play`` advances it by a round."""

    problem: Quadratics
    lr: float
    decay: float = 0.999
    gamma: float = 0.0
    mean: bool = False
    fair: bool = True
    drift: bool = True
    history: bool = True
    gamma_over_history: bool = False
    search: tuple[int, float] | None = None
    omega: Array = field(init=False)
    personal: Array = field(init=False)
    last: dict[int, tuple[int, Array]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        m, n = self.problem.centres.shape
        self.omega, self.personal = np.zeros(n), np.zeros((m, n))

    def play(self, t: int, online: list[int]) -> Played:
        omega, eta = self.omega, self.lr * self.decay ** (t - 1)
        gradients, losses = self.problem.gradient(omega)[online], self.problem.loss(omega)[online]
        tau = len(self.last) // len(online)
        absent = [j for j, (r, _) in sorted(self.last.items()) if j not in online and t - r <= tau and self.history]
        stale = np.array([self.last[j][1] for j in absent]).reshape(len(absent), len(omega))
        fair = fairness_gradient(losses, gradients)
        columns = [*gradients, *stale] + ([fair] if self.fair and len(online) > 1 else [])
        mu = np.mean([np.linalg.norm(g) for g in gradients])
        q = np.array([mu * g / np.linalg.norm(g) for g in columns])
        raw = -gradients.mean(0) if self.mean else -shortest(q) @ q
        d = raw if self.mean else raw * np.linalg.norm(gradients.mean(0)) / np.linalg.norm(raw)
        gamma = np.array([self._drift(i, gradients, stale, d) for i in range(len(online))])
        if self.search is not None:
            eta = self._search(omega, online, losses, gradients, fair, d, raw, eta)
        used = np.maximum(gamma, self.gamma)[:, None]
        self.personal[online] = omega + eta * (d + used * (-gradients - d))
        self.omega = omega + eta * d
        for i, g in zip(online, gradients, strict=True):
            self.last[i] = (t, g)
        return Played(online, absent, omega, gradients, stale, losses, fair, raw, d, gamma, eta)

    def _drift(self, i: int, gradients: Array, stale: Array, d: Array) -> float:
        if not self.drift:
            return 0.0
        others = [g for j, g in enumerate(gradients) if j != i] + ([*stale] if self.gamma_over_history else [])
        bounds = [1.0]
        for g in others:
            a, c = g @ d, g @ gradients[i]
            # The largest gamma in [0, 1] with a - gamma (c + a) <= 0; a mean direction may have a >= 0.
            if a < 0 and c < 0:
                bounds.append(abs(a) / (abs(a) + abs(c)))
            elif a >= 0 and c + a < 0:
                bounds.append(0.0)
        return min(bounds)

    def _search(
        self,
        omega: Array,
        online: list[int],
        losses: Array,
        gradients: Array,
        fair: Array,
        d: Array,
        raw: Array,
        eta: float,
    ) -> float:
        assert self.search is not None
        s, beta = self.search
        sigma = np.linalg.norm(d) / np.linalg.norm(raw)
        step = 2.0**s * eta
        while True:
            new = self.problem.loss(omega + step * d)[online]
            fits = bool((new <= losses + beta * step * gradients @ d).all())
            if self.fair and not self.mean and len(online) > 1:
                fits &= unfairness(new) <= unfairness(losses) + beta * step * fair @ d
            if fits or step / 2 < 2.0**-s * eta / sigma:
                return step
            step /= 2
