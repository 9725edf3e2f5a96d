"""Ditto: a global model that is FedAvg's, and personal models between Local's and it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from coterie.algorithms import registry
from coterie.errors import ConfigError
from coterie.simulation.simulation import Simulation
from tests.oracles.regression import Recorder, gradient, points, quadratics, regress, row, some
from tests.support import classification, play, simulate, small_model

LOCAL = {"lr": 0.1, "batch_size": 4, "local_epochs": 2}


def played(name: str, settings: dict[str, Any], rounds: int = 4) -> Simulation:
    simulation = simulate(name, classification(), small_model(), task="multiclass", settings=settings)
    play(simulation, rounds, lambda number: some(5, 3, number))
    return simulation


@pytest.mark.parametrize("lam", [0.0, 1.0, 7.0])
def test_the_global_model_is_fedavgs_whatever_lambda(lam: float) -> None:
    fedavg = played("fedavg", LOCAL)
    ditto = played("ditto", LOCAL | {"lam": lam, "personal_epochs": 1, "personal_lr": 0.2})
    assert torch.equal(fedavg.server["w"], ditto.server["w"])


def test_one_local_step_on_all_samples_is_fedsgd() -> None:
    """``w ← w − η Σ_i p_i ∇f_i(w)``, however many epochs the personal model trains."""
    settings = {"lr": 0.1, "batch_size": 0}
    ditto = played("ditto", settings | {"local_epochs": 3, "local_steps": 1})
    torch.testing.assert_close(ditto.server["w"], played("fedavg", settings | {"local_epochs": 1}).server["w"])
    three = played("ditto", settings | {"local_epochs": 1, "local_steps": 3})
    torch.testing.assert_close(three.server["w"], played("fedavg", settings | {"local_epochs": 3}).server["w"])
    assert not torch.allclose(ditto.clients.rows["v"], three.clients.rows["v"])


def test_without_pull_personal_models_are_local() -> None:
    # On full batches, as the personal model sees other shuffles than Local's.
    settings = LOCAL | {"batch_size": 0}
    torch.testing.assert_close(
        played("ditto", settings | {"lam": 0.0}).clients.rows["v"],
        played("local", settings).clients.rows["w"],
        rtol=0,
        atol=1e-14,
    )


def test_the_pull_changes_personal_models() -> None:
    ends = [played("ditto", LOCAL | {"lam": lam}).clients.rows["v"] for lam in (0.0, 1.0)]
    assert float((ends[0] - ends[1]).abs().max()) > 1e-2


@pytest.mark.parametrize("lam", [0.5, 2.0, 200.0])
def test_fixed_point_on_quadratics(lam: float) -> None:
    """``w`` at the minimum of the mean loss; ``v_i = (b θ̂_i + λ w)/(b + λ)``, which goes to ``w`` as λ grows."""
    b, best, sizes = 2.0, points(5), [6, 8, 10, 12, 14]
    settings = {"lr": 0.3, "personal_lr": 1 / (b + lam), "lam": lam, "batch_size": 0, "local_epochs": 3}
    simulation = regress("ditto", quadratics(best, [b] * 5, sizes), settings)
    play(simulation, 40)
    w = np.asarray(sizes) @ best / sum(sizes)
    np.testing.assert_allclose(row(simulation.server["w"]), w, rtol=0, atol=1e-12)
    v = (b * best + lam * w) / (b + lam)
    np.testing.assert_allclose(row(simulation.clients.rows["v"]), v, rtol=0, atol=1e-12)
    assert np.abs(v - w).max() < 4 * b / lam


@pytest.mark.parametrize("extra", [{}, {"personal_epochs": 3, "personal_lr": 0.02, "momentum": 0.5}])
def test_equals_a_replay_in_numpy(extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    clients, lam, lr = 5, 1.5, 0.05
    best, sizes = points(clients), [6, 7, 9, 10, 12]
    recorder = Recorder(monkeypatch)
    simulation = regress(
        "ditto",
        quadratics(best, [1.0] * clients, sizes),
        {"lam": lam, "lr": lr, "batch_size": 4, "local_epochs": 2} | extra,
        engine="loop",
        lost=lambda asked, call: asked == call.round % clients,
    )
    momentum, own_lr = extra.get("momentum", 0.0), extra.get("personal_lr", lr)
    w, v = np.zeros(3), np.zeros_like(best)
    for number in range(1, 5):
        simulation.play_round(some(clients, 4, number), number)
        copies, weights = [], []
        for i, batches in recorder.take().items():
            first = 2 * -(-sizes[i] // 4)
            assert len(batches) == first + extra.get("personal_epochs", 2) * -(-sizes[i] // 4)
            copy, velocity = w.copy(), np.zeros(3)
            for batch in batches[:first]:
                velocity = momentum * velocity + gradient(copy, batch)
                copy = copy - lr * velocity
            velocity = np.zeros(3)
            for batch in batches[first:]:
                velocity = momentum * velocity + gradient(v[i], batch) + lam * (v[i] - w)
                v[i] = v[i] - own_lr * velocity
            copies.append(copy)
            weights.append(sizes[i])
        w = np.asarray(weights) @ np.asarray(copies) / sum(weights)
        np.testing.assert_allclose(row(simulation.clients.rows["v"]), v, rtol=0, atol=1e-13)
        np.testing.assert_allclose(row(simulation.server["w"]), w, rtol=0, atol=1e-13)


def test_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match=r"^lr \* lam is 5"):
        registry.make("ditto", {"lr": 0.1, "lam": 50.0})
    with pytest.raises(ConfigError, match=r"personal_lr \* lam is 5"):
        registry.make("ditto", {"lr": 0.001, "personal_lr": 0.1, "lam": 50.0})
    registry.make("ditto", {"lr": 0.1, "personal_lr": 0.001, "lam": 50.0})
