"""FedProx and FedProx-FT: FedAvg with a pull towards the received model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from coterie.algorithms import registry
from coterie.errors import ConfigError
from coterie.simulation.simulation import Simulation
from tests.oracles.regression import Recorder, gradient, points, quadratics, regress, row, some
from tests.support import classification, everyone, play, simulate, small_model

LOCAL = {"lr": 0.1, "batch_size": 4, "local_epochs": 2}
SIZES = [6, 7, 9, 10, 12]
CURVATURES = [1.0, 2.0, 0.5, 1.0, 1.5]


def classify(name: str, settings: dict[str, Any], engine: str = "batched") -> Simulation:
    simulation = simulate(name, classification(), small_model(), task="multiclass", settings=settings, engine=engine)
    play(simulation, 3, lambda number: some(5, 3, number))
    return simulation


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("extra", [{}, {"momentum": 0.5}, {"optimiser": "adam", "lr": 0.01}])
@pytest.mark.parametrize("tuned", ["", "_ft"])
def test_mu_0_is_fedavg_bit_for_bit(engine: str, extra: dict[str, Any], tuned: str) -> None:
    average = classify("fedavg" + tuned, LOCAL | extra, engine)
    proximal = classify("fedprox" + tuned, LOCAL | extra | {"mu": 0.0}, engine)
    assert torch.equal(average.server["w"], proximal.server["w"])
    assert torch.equal(average.clients.rows["w"], proximal.clients.rows["w"])
    models = [simulation.personal(everyone(simulation), 3)["w"] for simulation in (average, proximal)]
    assert torch.equal(*models)


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("extra", [{}, {"momentum": 0.5}, {"optimiser": "adam", "lr": 0.01}])
def test_the_pull_changes_the_gradient(engine: str, extra: dict[str, Any]) -> None:
    ends = [classify("fedprox", LOCAL | extra | {"mu": mu}, engine).server["w"] for mu in (0.0, 1.0)]
    assert float((ends[0] - ends[1]).abs().max()) > 1e-3


@pytest.mark.parametrize("mu", [0.1, 2.0])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_equals_a_replay_in_numpy(mu: float, momentum: float, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, lr = Recorder(monkeypatch), 0.05
    simulation = regress(
        "fedprox",
        quadratics(points(5), CURVATURES, SIZES),
        {"mu": mu, "lr": lr, "batch_size": 4, "local_epochs": 3, "momentum": momentum},
        engine="loop",
        lost=lambda asked, call: asked == call.round % 5,
    )
    w, own = np.zeros(3), np.zeros((5, 3))
    for number in range(1, 5):
        simulation.play_round(some(5, 4, number), number)
        batches = recorder.take()
        for i, mine in batches.items():
            assert len(mine) == 3 * -(-SIZES[i] // 4)
            own[i], velocity = w, np.zeros(3)
            for batch in mine:  # the pull is there at every step, towards the model as received
                velocity = momentum * velocity + gradient(own[i], batch) + mu * (own[i] - w)
                own[i] = own[i] - lr * velocity
        weights = np.array([SIZES[i] for i in batches])
        w = np.asarray(weights @ own[list(batches)] / weights.sum())
        np.testing.assert_allclose(row(simulation.server["w"]), w, rtol=0, atol=1e-13)
        np.testing.assert_allclose(row(simulation.clients.rows["w"]), own, rtol=0, atol=1e-13)


@pytest.mark.parametrize("steps", [1, 2, 7])
def test_full_batch_steps_in_closed_form(steps: int) -> None:
    """K steps shrink the distance to the minimiser ``(b c + mu w)/(b + mu)`` by ``(1 - lr (b + mu))^K``."""
    best, mu, lr, w = points(5), 1.5, 0.2, np.zeros(3)
    b = np.array(CURVATURES)[:, None]
    settings = {"mu": mu, "lr": lr, "batch_size": 0, "local_epochs": steps}
    simulation = regress("fedprox", quadratics(best, CURVATURES, SIZES), settings)
    for number in (1, 2, 3):
        simulation.play_round(everyone(simulation), number)
        target = (b * best + mu * w) / (b + mu)
        own = target + (1 - lr * (b + mu)) ** steps * (w - target)
        w = np.asarray(np.array(SIZES) @ own / sum(SIZES))
        np.testing.assert_allclose(row(simulation.clients.rows["w"]), own, rtol=0, atol=1e-13)
        np.testing.assert_allclose(row(simulation.server["w"]), w, rtol=0, atol=1e-13)


def test_mu_to_infinity_is_no_movement() -> None:
    """As a limit of the minimiser: with lr = 1/(b + mu) one full-batch step reaches it, b/(b + mu) of the way to c."""
    b, best, moved = 2.0, points(5), []
    samples = quadratics(best, [b] * 5, SIZES)
    for mu in (0.0, 1.0, 1e3, 1e6, 1e9):
        settings = {"mu": mu, "lr": 1 / (b + mu), "batch_size": 0, "local_epochs": 1}
        simulation = regress("fedprox", samples, settings)
        play(simulation, 1)
        np.testing.assert_allclose(row(simulation.clients.rows["w"]), b / (b + mu) * best, rtol=1e-12, atol=1e-15)
        moved.append(float(simulation.server["w"].norm()))
    assert moved == sorted(moved, reverse=True)
    assert moved[-1] < 1e-8 * moved[0]


def test_refuses_steps_that_diverge_whatever_the_data() -> None:
    for name in ("fedprox", "fedprox_ft"):
        with pytest.raises(ConfigError, match=r"lr \* mu is 5"):
            registry.make(name, {"lr": 0.1, "mu": 50.0})
        registry.make(name, {"lr": 0.001, "mu": 50.0})


def test_fine_tuning_leaves_fedproxs_global_model_as_it_is_and_does_not_pull(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder, lr = Recorder(monkeypatch), 0.05
    samples = quadratics(points(5), CURVATURES, SIZES)
    settings = {"mu": 2.0, "lr": lr, "batch_size": 4, "local_epochs": 2}
    plain = regress("fedprox", samples, settings, engine="loop")
    tuned = regress("fedprox_ft", samples, settings | {"fine_tune_epochs": 3}, engine="loop")
    for simulation in (plain, tuned):
        play(simulation, 2, lambda number: some(5, 3, number))
    assert torch.equal(plain.server["w"], tuned.server["w"])
    recorder.take()
    personal = row(tuned.personal(everyone(tuned), 2)["w"])
    for i, batches in recorder.take().items():
        assert len(batches) == 3 * -(-SIZES[i] // 4)
        w = row(tuned.server["w"])
        for batch in batches:
            w = w - lr * gradient(w, batch)
        np.testing.assert_allclose(personal[i], w, rtol=0, atol=1e-13)


def test_no_fine_tuning_is_fedproxs_global_model() -> None:
    tuned = classify("fedprox_ft", LOCAL | {"mu": 0.5, "fine_tune_epochs": 0})
    personal = tuned.personal(everyone(tuned), 3)["w"]
    assert torch.equal(personal, classify("fedprox", LOCAL | {"mu": 0.5}).server["w"].expand(5, -1))


@pytest.mark.parametrize("name", ["fedprox", "fedprox_ft"])
def test_bytes_are_one_model_each_way(name: str) -> None:
    simulation = classify(name, LOCAL | {"mu": 0.5})
    n = simulation.engine.net.layout.size
    assert (simulation.traffic.down, simulation.traffic.up) == (3 * 3 * 8 * n,) * 2
