"""Lp-Proj-2 with and without duals: the projection, Lemma 3 in the subspace, fixed points, and P = I."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.algorithms import lp_proj, registry
from coterie.algorithms.base import Message
from coterie.algorithms.lp_proj import projection_matrix
from coterie.compute.engine import Call, take
from coterie.errors import ConfigError
from coterie.simulation.simulation import Simulation
from tests.oracles.regression import Recorder, gradient, points, quadratics, regress, row, some
from tests.support import classification, everyone, linear_regression, play, samples_of, simulate, small_model

BOTH = ["admm_lp_proj", "lp_proj"]
CPU = torch.device("cpu")
SEED = 3  # that of the simulations
LOCAL = {"lr": 0.1, "batch_size": 4, "local_epochs": 2}


def identity(seed: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    assert rows == columns
    return torch.eye(rows, dtype=dtype, device=device)


def model_size() -> int:
    return sum(value.numel() for value in small_model().parameters())


def classify(name: str, settings: dict[str, Any], **options: Any) -> Simulation:
    return simulate(name, classification(), small_model(), task="multiclass", settings=settings, **options)


def test_rows_of_the_projection_are_gaussian_directions_of_length_one() -> None:
    matrix = projection_matrix(1, 4, 40_000, torch.float64, CPU)
    np.testing.assert_allclose(row(matrix.norm(dim=1)), 1, atol=1e-14)
    entries = row(matrix) * np.sqrt(40_000)
    # Standard errors at this size: mean 1/400, variance √2/400, fourth moment √96/400; allow five.
    assert abs(entries.mean()) < 5 / 400
    assert abs((entries**2).mean() - 1) < 1e-12
    assert abs((entries**4).mean() - 3) < 5 * np.sqrt(96) / 400
    products = row(matrix @ matrix.T) - np.eye(4)
    assert np.abs(products).max() < 5 / np.sqrt(40_000)


def test_the_projection_is_a_function_of_the_seed_alone() -> None:
    one = projection_matrix(7, 3, 50, torch.float64, CPU)
    assert torch.equal(one, projection_matrix(7, 3, 50, torch.float64, CPU))
    assert torch.equal(one.float(), projection_matrix(7, 3, 50, torch.float32, CPU))
    assert torch.equal(one[:2], projection_matrix(7, 2, 50, torch.float64, CPU))
    assert float((one - projection_matrix(8, 3, 50, torch.float64, CPU)).abs().max()) > 0.1


@pytest.mark.parametrize("name", BOTH)
def test_a_node_that_knows_only_settings_and_seed_computes_the_same(name: str) -> None:
    """A client in another process: its own algorithm object, its own engine, one row."""
    settings = LOCAL | {"d_sub": 4}
    simulation, node = (classify(name, settings) for _ in range(2))
    play(simulation, 2)
    before = simulation.clients.gather(torch.tensor([1]))
    w = simulation.algorithm.mean(simulation.server)  # type: ignore[attr-defined]
    _, reply = node.engine.run(
        node.algorithm.tasks()["train"], torch.tensor([1]), before, Message(shared={"w": w}).rows(1), Call(3)
    )
    play(simulation, 1, first=3)
    torch.testing.assert_close(reply["u"], simulation.server["u"][1:2], rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", BOTH)
def test_messages_have_d_sub_floats_and_working_rows_no_copy_of_the_projection(name: str) -> None:
    simulation = classify(name, LOCAL | {"d_sub": 4})
    play(simulation, 1)
    assert simulation.traffic.down == simulation.traffic.up == 5 * 4 * 8
    assert simulation.algorithm.global_model(simulation.server) is None
    context = simulation.engine.client_context(everyone(simulation), Call(1))
    message = Message(shared={"w": torch.zeros(4, dtype=torch.float64)}).rows(5)
    work = simulation.tasks["train"].start(context, simulation.clients.rows, message)
    assert {tuple(value.shape[1:]) for value in work.values()} <= {(model_size(),), (4,), (1,)}


@pytest.mark.parametrize("name", BOTH)
def test_nothing_of_the_size_of_a_model_squared_is_formed(name: str) -> None:
    features = 60_000  # PᵀP would have 3.6e9 entries
    x = torch.linspace(-1, 1, features, dtype=torch.float64).view(1, -1) / features
    samples = samples_of([(x, torch.ones(1)), (-x, torch.ones(1))])
    settings = {"lr": 0.1, "batch_size": 0, "local_epochs": 1}
    simulation = simulate(name, samples, linear_regression(features), settings=settings)
    play(simulation, 1)
    assert simulation.server["u"].shape == (2, 10)


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("settings", [{}, {"centre": "global", "momentum": 0.5}, {"alpha": "size", "rho": 0.7}])
def test_lemma_3_in_the_subspace(engine: str, settings: dict[str, Any]) -> None:
    simulation = classify("admm_lp_proj", LOCAL | {"d_sub": 4, "lam": 2.0} | settings, engine=engine)
    matrix = projection_matrix(SEED, 4, model_size(), torch.float64, CPU)
    for number in range(5):
        if number:
            simulation.play_round(some(5, 3, number), number)
        state = simulation.clients.rows
        expected = 2.0 * state["alpha"] * (state["theta"] @ matrix.T - state["w"])
        torch.testing.assert_close(state["pi"], expected, rtol=0, atol=1e-13)
    assert float(state["pi"].abs().max()) > 1e-4


@pytest.mark.parametrize("settings", [{}, {"centre": "global"}, {"alpha": "size", "momentum": 0.5, "rho": 0.4}])
def test_with_the_identity_it_is_flame(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lp_proj, "projection_matrix", identity)
    flame = classify("flame", LOCAL | settings)
    projected = classify("admm_lp_proj", LOCAL | settings | {"d_sub": model_size()})
    for number in range(1, 5):
        for simulation in (flame, projected):
            simulation.play_round(some(5, 3, number), number)
        for name in ("theta", "w", "pi"):
            torch.testing.assert_close(flame.clients.rows[name], projected.clients.rows[name], rtol=0, atol=1e-12)
        torch.testing.assert_close(flame.server["u"], projected.server["u"], rtol=0, atol=1e-12)


def test_plain_with_the_identity_is_pfedme_with_one_local_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lp_proj, "projection_matrix", identity)
    common = {"lr": 0.1, "batch_size": 0, "lam": 2.0, "eta": 0.3}
    plain = classify("lp_proj", common | {"local_epochs": 3, "d_sub": model_size()})
    pfedme = classify("pfedme", common | {"local_rounds": 1, "inner_steps": 3})
    for number in range(1, 5):
        for simulation in (plain, pfedme):
            simulation.play_round(everyone(simulation), number)
        torch.testing.assert_close(plain.clients.rows["theta"], pfedme.clients.rows["theta"], rtol=0, atol=1e-13)
        w = plain.algorithm.mean(plain.server)  # type: ignore[attr-defined]
        torch.testing.assert_close(w, pfedme.server["w"], rtol=0, atol=1e-13)


def test_plain_is_the_dual_method_without_duals() -> None:
    lam, rho, alpha = 2.0, 0.3, 1 / 5
    common = LOCAL | {"lam": lam, "d_sub": 4}
    plain = classify("lp_proj", common | {"eta": alpha / (lam * alpha + rho)})
    clamped = classify("admm_lp_proj", common | {"rho": rho, "dual": False, "centre": "global"})
    for number in range(1, 5):
        for simulation in (plain, clamped):
            simulation.play_round(some(5, 3, number), number)
        torch.testing.assert_close(plain.clients.rows["theta"], clamped.clients.rows["theta"], rtol=0, atol=1e-13)
        torch.testing.assert_close(plain.server["u"], clamped.server["u"], rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", BOTH)
def test_fixed_point_on_quadratics(name: str) -> None:
    """``min Σ f_i(θ_i) + λ/2 |P θ_i − w|²`` solved as one linear system."""
    clients, features, d_sub, b, lam = 4, 5, 2, 2.0, 1.0
    best = points(clients, features)
    settings = {"lr": 0.3, "batch_size": 0, "local_epochs": 3, "lam": lam, "d_sub": d_sub}
    simulation = regress(name, quadratics(best, [b] * clients), settings)
    play(simulation, 150)
    p = row(projection_matrix(SEED, d_sub, features, torch.float64, CPU))
    # b (θ_i − θ̂_i) + λ Pᵀ (P θ_i − w) = 0 and w = mean P θ_i; by linearity the mean θ solves it with mean θ̂.
    system = b * np.eye(features) + lam * p.T @ p
    middle = np.linalg.inv(system - lam * p.T @ p) @ (b * best.mean(0))
    w = p @ middle
    theta = np.linalg.solve(system, (b * best + lam * (p.T @ w)).T).T
    np.testing.assert_allclose(row(simulation.clients.rows["theta"]), theta, rtol=0, atol=1e-12)
    mean = simulation.algorithm.mean(simulation.server)  # type: ignore[attr-defined]
    np.testing.assert_allclose(row(mean), w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", BOTH)
def test_equals_a_replay_in_numpy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clients, d_sub, lam, lr, eta, rho = 4, 2, 1.5, 0.05, 0.3, 0.4
    best, sizes = points(clients), [6, 7, 9, 10]
    settings = {"lam": lam, "lr": lr, "d_sub": d_sub, "batch_size": 4, "local_epochs": 2}
    settings |= {"eta": eta} if name == "lp_proj" else {"rho": rho}
    recorder = Recorder(monkeypatch)
    simulation = regress(name, quadratics(best, [1.0] * clients, sizes), settings, engine="loop")
    p = row(projection_matrix(SEED, d_sub, best.shape[1], torch.float64, CPU))
    theta = np.zeros_like(best)
    own, pi, u = (np.zeros((clients, d_sub)) for _ in range(3))
    for number in range(1, 5):
        simulation.play_round(some(clients, 3, number), number)
        w = u.mean(0)
        for i, batches in recorder.take().items():
            centre = w if name == "lp_proj" else own[i].copy()
            for batch in batches:
                theta[i] -= lr * (gradient(theta[i], batch) + lam * p.T @ (p @ theta[i] - centre))
            if name == "lp_proj":
                u[i] = w - eta * lam * (w - p @ theta[i])
            else:
                pull = lam / clients
                own[i] = (pull * p @ theta[i] + rho * w - pi[i]) / (pull + rho)
                pi[i] += rho * (own[i] - w)
                u[i] = own[i] + pi[i] / rho
        np.testing.assert_allclose(row(simulation.clients.rows["theta"]), theta, rtol=0, atol=1e-13)
        np.testing.assert_allclose(row(simulation.server["u"]), u, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", BOTH)
def test_the_start_is_the_image_of_the_initial_model(name: str) -> None:
    simulation = classify(name, LOCAL | {"d_sub": 4})
    matrix = projection_matrix(SEED, 4, model_size(), torch.float64, CPU)
    image = matrix @ simulation.engine.problem.start
    for value in take(simulation.server, slice(0, 5))["u"]:
        torch.testing.assert_close(value, image, rtol=0, atol=1e-14)


@pytest.mark.parametrize("name", BOTH)
def test_refuses_what_cannot_work(name: str) -> None:
    with pytest.raises(ConfigError, match=r"lr \* lam"):
        registry.make(name, {"lr": 0.5, "lam": 5.0})
    with pytest.raises(ConfigError, match=f"d_sub is {model_size() + 1}: the model has {model_size()}"):
        classify(name, {"d_sub": model_size() + 1})


def test_plain_refuses_a_step_that_overshoots() -> None:
    with pytest.raises(ConfigError, match=r"eta \* lam is 3"):
        registry.make("lp_proj", {"lam": 2.0, "eta": 1.5})


def test_a_matrix_that_memory_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = 4 * model_size() * 8
    monkeypatch.setattr(lp_proj, "free_memory", lambda: 2 * needed)
    classify("lp_proj", LOCAL | {"d_sub": 4})
    monkeypatch.setattr(lp_proj, "free_memory", lambda: 2 * needed - 1)
    with pytest.raises(
        ConfigError, match=r"d_sub is 4: its matrix has .* GiB for a model of \d+ parameters, more than 0.5"
    ):
        classify("lp_proj", LOCAL | {"d_sub": 4})
