"""APFL: its equations replayed from old values, the derivative by α against autograd, and its ends FedAvg and Local."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from coterie.algorithms import registry
from coterie.errors import ConfigError
from coterie.simulation.simulation import Simulation
from tests.oracles.regression import Recorder, gradient, points, quadratics, regress, row, some
from tests.support import classification, everyone, play, simulate, small_model

LOCAL = {"lr": 0.1, "batch_size": 4, "local_epochs": 2}


def played(name: str, settings: dict[str, Any], rounds: int = 4) -> Simulation:
    simulation = simulate(name, classification(), small_model(), task="multiclass", settings=settings)
    play(simulation, rounds, lambda number: some(5, 3, number))
    return simulation


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("decay", [0.0, 0.02])
def test_alpha_moves_by_the_derivative_that_autograd_gives(engine: str, decay: float) -> None:
    """On one full batch at what the round began with, for models ``v_i`` as far from ``w`` as ``w`` is from zero."""
    lr, alpha = 0.05, 0.4
    settings = {"lr": lr, "batch_size": 0, "local_epochs": 1, "alpha": alpha, "alpha_decay": decay}
    module = small_model()
    simulation = simulate("apfl", classification(), module, task="multiclass", engine=engine, settings=settings)
    start = simulation.engine.problem.start
    v = start * torch.linspace(-1.5, 1.5, 5, dtype=torch.float64).unsqueeze(1)
    simulation.clients.rows["v"] = v.clone()
    layout, samples = simulation.engine.net.layout, simulation.engine.samples

    def loss(params: torch.Tensor, client: int) -> torch.Tensor:
        index = samples.splits["train"][client]
        return cross_entropy(functional_call(module, layout.views(params), (samples.x[index],)), samples.y[index])

    play(simulation, 1)
    for client in range(5):
        weight = torch.tensor(alpha, dtype=torch.float64, requires_grad=True)
        own = v[client].clone().requires_grad_()
        by_alpha, by_own = torch.autograd.grad(loss(weight * own + (1 - weight) * start, client), (weight, own))
        expected = (alpha - lr * (by_alpha + decay * alpha)).clamp(0, 1)
        torch.testing.assert_close(simulation.clients.rows["alpha"][client, 0], expected, rtol=0, atol=1e-14)
        # The gradient by v within the mixture is α ∇f(v̄): the factor is in the method's step.
        torch.testing.assert_close(simulation.clients.rows["v"][client], v[client] - lr * by_own, rtol=0, atol=1e-13)
    moved = simulation.clients.rows["alpha"][:, 0] - alpha
    assert float(moved.abs().max()) > 1e-3 and len(set(moved.tolist())) == 5


def test_the_global_model_is_fedavgs() -> None:
    assert torch.equal(played("apfl", LOCAL).server["w"], played("fedavg", LOCAL).server["w"])


def test_with_alpha_zero_it_is_fedavg() -> None:
    apfl, fedavg = played("apfl", LOCAL | {"alpha": 0.0, "adaptive": False}), played("fedavg", LOCAL)
    personal = apfl.personal(everyone(apfl), 4)["w"]
    assert torch.equal(personal, fedavg.server["w"].expand(5, -1))
    assert torch.equal(apfl.clients.rows["v"], apfl.engine.problem.start.expand(5, -1))


def test_with_alpha_one_it_is_local() -> None:
    apfl, local = played("apfl", LOCAL | {"alpha": 1.0, "adaptive": False}), played("local", LOCAL)
    torch.testing.assert_close(apfl.personal(everyone(apfl), 4)["w"], local.clients.rows["w"], rtol=0, atol=1e-14)


def test_personal_models_mix_with_the_global_model_of_now() -> None:
    """Also those of clients that were absent when it changed."""
    simulation = played("apfl", LOCAL, rounds=1)
    absent = [client for client in range(5) if client not in some(5, 3, 1).tolist()]
    state = simulation.clients.rows
    expected = state["alpha"] * state["v"] + (1 - state["alpha"]) * simulation.server["w"]
    personal = simulation.personal(everyone(simulation), 1)["w"]
    torch.testing.assert_close(personal, expected, rtol=0, atol=1e-15)
    assert float((personal[absent] - simulation.engine.problem.start).abs().max()) > 1e-3


class Steps:
    """The steps of ``torch.optim``'s SGD and Adam in NumPy, from a state that is empty at the start of a round."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.adam, self.lr = settings.get("optimiser") == "adam", settings["lr"]
        self.momentum, self.count = settings.get("momentum", 0.0), 0
        self.first, self.second = np.zeros(3), np.zeros(3)

    def step(self, gradient: np.ndarray) -> np.ndarray:
        self.count += 1
        if not self.adam:
            self.first = self.momentum * self.first + gradient
            return self.lr * self.first
        self.first = 0.9 * self.first + 0.1 * gradient
        self.second = 0.999 * self.second + 0.001 * gradient**2
        mean, square = self.first / (1 - 0.9**self.count), self.second / (1 - 0.999**self.count)
        return self.lr * mean / (np.sqrt(square) + 1e-8)


@pytest.mark.parametrize(
    "extra",
    [{}, {"momentum": 0.5}, {"alpha_decay": 0.5, "alpha": 0.1}, {"alpha": 0.98}, {"optimiser": "adam", "lr": 0.05}],
)
def test_equals_a_replay_in_numpy(extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    clients = 5
    best, sizes = 4 * points(clients), [6, 7, 9, 10, 12]
    settings = {"lr": 0.1, "batch_size": 4, "local_epochs": 2} | extra
    lr = settings["lr"]
    recorder = Recorder(monkeypatch)
    simulation = regress(
        "apfl",
        quadratics(best, [1.0] * clients, sizes),
        settings,
        engine="loop",
        lost=lambda asked, call: asked == call.round % clients,
    )
    decay = settings.get("alpha_decay", 0.0)
    w, v, alpha = np.zeros(3), np.zeros_like(best), np.full(clients, settings.get("alpha", 0.5))
    clipped = False
    for number in range(1, 7):
        simulation.play_round(some(clients, 4, number), number)
        copies, weights = [], []
        for i, batches in recorder.take().items():
            copy, shared, own = w, Steps(settings), Steps(settings)
            for step, batch in enumerate(batches):
                # Both gradients are taken before anything moves.
                mixed = gradient(alpha[i] * v[i] + (1 - alpha[i]) * copy, batch)
                plain, apart = gradient(copy, batch), v[i] - copy
                copy = copy - shared.step(plain)
                v[i] = v[i] - own.step(alpha[i] * mixed)
                if step == 0:
                    raw = alpha[i] - lr * (apart @ mixed + decay * alpha[i])
                    alpha[i] = min(max(raw, 0.0), 1.0)
                    clipped |= raw != alpha[i]
            copies.append(copy)
            weights.append(sizes[i])
        w = np.asarray(weights) @ np.asarray(copies) / sum(weights)
        np.testing.assert_allclose(row(simulation.clients.rows["v"]), v, rtol=0, atol=1e-12)
        np.testing.assert_allclose(row(simulation.clients.rows["alpha"])[:, 0], alpha, rtol=0, atol=1e-12)
        np.testing.assert_allclose(row(simulation.server["w"]), w, rtol=0, atol=1e-12)
    assert clipped or extra.get("alpha") != 0.98


def test_the_first_round_leaves_alpha_where_it_is() -> None:
    """Everybody begins with ``v_i = w``, where the mixture does not depend on ``α``.

    Were ``w_i`` stepped first, ``v_i − w_i`` would be ``η ∇f(w)`` and ``α`` would fall by ``η² ⟨∇f(w), ∇f(v̄)⟩``.
    """
    best = 4 * points(5)
    settings = {"lr": 0.1, "batch_size": 0, "local_epochs": 3, "alpha": 0.5}
    simulation = regress("apfl", quadratics(best, [1.0] * 5), settings)
    play(simulation, 1)
    assert bool((simulation.clients.rows["alpha"] == 0.5).all())
    # From zero with f = |θ − best|²/2: w_i after three steps is (1 − 0.9³) best; v̄ contracts along with both.
    w, v = np.zeros_like(best), np.zeros_like(best)
    for _ in range(3):
        mixed = (v + w) / 2
        w, v = w - 0.1 * (w - best), v - 0.1 * 0.5 * (mixed - best)
    np.testing.assert_allclose(row(simulation.clients.rows["v"]), v, rtol=0, atol=1e-13)
    np.testing.assert_allclose(row(simulation.server["w"]), (1 - 0.9**3) * best.mean(0), rtol=0, atol=1e-13)


def test_alpha_stays_when_it_is_not_to_be_learnt() -> None:
    simulation = played("apfl", LOCAL | {"adaptive": False, "alpha": 0.3})
    assert bool((simulation.clients.rows["alpha"] == 0.3).all())


def test_refuses_a_weight_outside_its_range() -> None:
    with pytest.raises(ConfigError, match=r"alpha is 1\.5"):
        registry.make("apfl", {"alpha": 1.5})
