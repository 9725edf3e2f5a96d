"""pFedMe: the Moreau envelope's gradient, its fixed point on linear regression, and a replay in NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from coterie.algorithms import registry
from coterie.errors import ConfigError
from tests.oracles.regression import Recorder, gradient, points, quadratics, regress, row, some
from tests.support import classification, everyone, play, simulate, small_model


def test_its_step_is_the_gradient_of_the_moreau_envelope() -> None:
    """With exact inner minima ``w_i = w − η ∇F_i(w)``, where ``∇F_i(w) = λ (w − θ_i(w)) = λ b/(b + λ) (w − θ̂_i)``."""
    b, lam, eta, best = 2.0, 3.0, 0.1, points(4)
    settings = {"lam": lam, "eta": eta, "lr": 1 / (b + lam), "batch_size": 0, "local_rounds": 1, "inner_steps": 1}
    simulation = regress("pfedme", quadratics(best, [b] * 4), settings)
    w = np.zeros(3)
    for number in range(1, 4):
        simulation.play_round(everyone(simulation), number)
        theta = (b * best + lam * w) / (b + lam)
        np.testing.assert_allclose(row(simulation.clients.rows["theta"]), theta, rtol=0, atol=1e-13)
        np.testing.assert_allclose(lam * (w - theta), lam * b / (b + lam) * (w - best), atol=1e-13)
        w = (w - eta * lam * b / (b + lam) * (w - best)).mean(0)
        np.testing.assert_allclose(row(simulation.server["w"]), w, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("beta", "lam"), [(1.0, 2.0), (0.7, 2.0), (1.0, 0.5)])
def test_fixed_point_of_linear_regression_is_flames(beta: float, lam: float) -> None:
    """``w = Σ k_i θ̂_i / Σ k_i``, ``k_i = b_i/(b_i + λ)``: where the mean of the envelopes' gradients is zero.

    Personal models are warm-started, so at the fixed point few inner steps are as good as an exact minimum.
    """
    best, b = points(6), np.linspace(0.5, 3, 6)
    settings = {"lam": lam, "eta": 1 / lam, "lr": 1 / (b.max() + lam), "beta": beta}
    settings |= {"batch_size": 0, "local_rounds": 1, "inner_steps": 3}
    simulation = regress("pfedme", quadratics(best, list(b)), settings)
    play(simulation, 120)
    k = b / (b + lam)
    w = k @ best / k.sum()
    np.testing.assert_allclose(row(simulation.server["w"]), w, rtol=0, atol=1e-12)
    theta = k[:, None] * best + (1 - k[:, None]) * w
    np.testing.assert_allclose(row(simulation.clients.rows["theta"]), theta, rtol=0, atol=1e-12)


def test_without_beta_the_global_model_stays() -> None:
    settings = {"beta": 0.0, "batch_size": 4}
    simulation = simulate("pfedme", classification(), small_model(), task="multiclass", settings=settings)
    play(simulation, 2)
    assert torch.equal(simulation.server["w"], simulation.engine.problem.start)
    assert float((simulation.clients.rows["theta"] - simulation.engine.problem.start).abs().max()) > 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        {"local_rounds": 5, "begin": "own"},
        {"local_rounds": 4, "begin": "global", "momentum": 0.5, "weight_decay": 0.001},
        {"local_epochs": 2, "beta": 0.7},
        {"local_epochs": 2, "moves": "round", "momentum": 0.5},
        {"local_rounds": 3, "moves": "round", "begin": "global"},
    ],
)
def test_equals_a_replay_in_numpy(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """K inner steps on each minibatch, then one of ``w_i``, or one at the end; an equal mean of the replies."""
    clients, lam, lr, eta, steps = 5, 3.0, 0.1, 0.05, 3
    best, sizes = points(clients), [6, 7, 9, 10, 12]
    common = {"lam": lam, "lr": lr, "eta": eta, "inner_steps": steps, "batch_size": 4}
    recorder = Recorder(monkeypatch)
    simulation = regress(
        "pfedme",
        quadratics(best, [1.0] * clients, sizes),
        common | settings,
        engine="loop",
        lost=lambda asked, call: asked == call.round % clients,
    )
    momentum, decay, beta = (settings.get(name, 0.0) for name in ("momentum", "weight_decay", "beta"))
    beta = beta or 1.0
    w, theta = np.zeros(3), np.zeros_like(best)
    for number in range(1, 5):
        simulation.play_round(some(clients, 4, number), number)
        copies = []
        for i, batches in recorder.take().items():
            expected = settings.get("local_rounds") or 2 * -(-sizes[i] // 4)
            assert len(batches) == expected
            own, velocity = w.copy(), np.zeros(3)
            if settings.get("begin") == "global":
                theta[i] = w
            for batch in batches:
                for _ in range(steps):
                    slope = gradient(theta[i], batch) + lam * (theta[i] - own) + decay * theta[i]
                    velocity = momentum * velocity + slope
                    theta[i] = theta[i] - lr * velocity
                if settings.get("moves") != "round":
                    own = own - eta * lam * (own - theta[i])
            if settings.get("moves") == "round":
                own = own - eta * lam * (own - theta[i])
            copies.append(own)
        w = (1 - beta) * w + beta * np.mean(copies, axis=0)
        np.testing.assert_allclose(row(simulation.clients.rows["theta"]), theta, rtol=0, atol=1e-13)
        np.testing.assert_allclose(row(simulation.server["w"]), w, rtol=0, atol=1e-13)


def test_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match=r"lr \* lam is 3"):
        registry.make("pfedme", {"lr": 0.2, "lam": 15.0})
    with pytest.raises(ConfigError, match=r"eta \* lam is 3"):
        registry.make("pfedme", {"eta": 0.2, "lam": 15.0})
    with pytest.raises(ConfigError, match="inner_steps is 0"):
        registry.make("pfedme", {"inner_steps": 0})
