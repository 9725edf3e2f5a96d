"""FLAME: Lemma 3, the fixed points of federated linear regression in closed form, and its limits."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.algorithms import registry
from coterie.compute.samples import Samples
from coterie.errors import ConfigError
from coterie.simulation.simulation import Simulation
from tests.oracles.regression import Array, Recorder, gradient, points, quadratics, regress, row, some
from tests.support import classification, everyone, play, simulate, small_model

M = 10
EXACT = {"batch_size": 0, "local_epochs": 1}


def shared(simulation: Simulation) -> Tensor:
    """``w`` after the last aggregation."""
    model = simulation.algorithm.global_model(simulation.server)
    assert model is not None
    return model["w"]


def in_float32(samples: Samples) -> Samples:
    single = {"x": samples.x.float(), "class_counts": samples.class_counts.float(), "dtype": torch.float32}
    return dataclasses.replace(samples, **single)


def lemma_3_residual(simulation: Simulation) -> float:
    """``max |π_i − λ α_i (θ_i − w_i)|`` over all clients, relative to the size of its terms."""
    lam, state = simulation.algorithm.lam, simulation.clients.rows  # type: ignore[attr-defined]
    pull = lam * state["alpha"]
    residual = state["pi"] - pull * (state["theta"] - state["w"])
    return float((residual.abs() / (pull * (state["theta"].abs() + state["w"].abs())).amax(1, keepdim=True)).max())


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"centre": "global", "momentum": 0.5, "weight_decay": 0.01},
        {"alpha": "size", "rho": 0.7, "lam": 3.0},
        {"optimiser": "adam", "lr": 0.01},
    ],
)
def test_i_lemma_3_holds_at_the_start_and_after_every_update(engine: str, settings: dict[str, Any]) -> None:
    settings = {"lr": 0.1, "batch_size": 4, "local_epochs": 2} | settings
    simulation = simulate("flame", classification(), small_model(), task="multiclass", engine=engine, settings=settings)
    assert lemma_3_residual(simulation) == 0
    for number in range(1, 7):
        simulation.play_round(some(5, 3, number), number)
        assert lemma_3_residual(simulation) < 1e-13
    assert float(simulation.clients.rows["pi"].abs().max()) > 1e-3


def test_i_lemma_3_holds_in_float32() -> None:
    samples = in_float32(classification())
    simulation = simulate("flame", samples, small_model(), task="multiclass", dtype=torch.float32)
    for number in range(1, 21):
        simulation.play_round(some(5, 3, number), number)
        assert lemma_3_residual(simulation) < 1e-6


def test_ii_duals_and_residuals_cancel_after_every_server_step() -> None:
    rho = 0.3
    settings = {"lr": 0.1, "batch_size": 4, "local_epochs": 2, "rho": rho, "alpha": "size"}
    simulation = simulate("flame", classification(), small_model(), task="multiclass", settings=settings)
    for number in range(1, 7):
        simulation.play_round(some(5, 3, number), number)
        state = simulation.clients.rows
        total = (state["pi"] + rho * (state["w"] - shared(simulation))).sum(0)
        assert float(total.abs().max()) < 1e-13


@pytest.mark.parametrize("centre", ["own", "global"])
@pytest.mark.parametrize(("lam", "rho", "rounds"), [(1, 0.1, 150), (1, 0.5, 400), (5, 0.1, 150), (1, 0.02, 250)])
def test_iii_fixed_point_of_linear_regression(lam: float, rho: float, rounds: int, centre: str) -> None:
    b, best = 2.0, points(M)
    settings = EXACT | {"lam": lam, "rho": rho, "lr": 1 / (b + lam), "centre": centre}
    simulation = regress("flame", quadratics(best, [b] * M), settings)
    play(simulation, rounds)
    assert_at(simulation, best.mean(0), (b * best + lam * best.mean(0)) / (b + lam))


@pytest.mark.parametrize("centre", ["own", "global"])
def test_iii_fixed_point_with_3_of_10_clients_a_round(centre: str) -> None:
    b, lam, best = 2.0, 1.0, points(M)
    settings = EXACT | {"lam": lam, "rho": 0.1, "lr": 1 / (b + lam), "centre": centre}
    simulation = regress("flame", quadratics(best, [b] * M), settings)
    play(simulation, 500, lambda number: some(M, 3, number))
    assert_at(simulation, best.mean(0), (b * best + lam * best.mean(0)) / (b + lam))


def assert_at(simulation: Simulation, w: Array, theta: Array, tolerance: float = 1e-12) -> None:
    """At the fixed point, and (ii) at convergence: consensus, duals that sum to zero, ``w = Σ α_i θ_i``."""
    state = {name: row(value) for name, value in simulation.clients.rows.items()}
    np.testing.assert_allclose(row(shared(simulation)), w, rtol=0, atol=tolerance)
    np.testing.assert_allclose(state["theta"], theta, rtol=0, atol=tolerance)
    np.testing.assert_allclose(state["w"], np.broadcast_to(w, theta.shape), rtol=0, atol=tolerance)
    np.testing.assert_allclose(state["pi"].sum(0), 0, rtol=0, atol=tolerance)
    np.testing.assert_allclose((state["alpha"] * state["theta"]).sum(0), w, rtol=0, atol=tolerance)


# Unequal curvatures: no one learning rate is exact for all, but the fixed point does not depend on it. The problem
# min Σ α_i (f_i(θ_i) + λ/2 |θ_i − w|²) has w = Σ α_i k_i θ̂_i / Σ α_i k_i with k_i = b_i/(b_i + λ).
@pytest.mark.parametrize(
    ("curvatures", "alpha", "cohort"),
    [
        pytest.param(np.linspace(0.5, 3, M), "uniform", M, id="unequal-b"),
        pytest.param(np.full(M, 2.0), "size", M, id="unequal-alpha"),
        pytest.param(np.linspace(0.5, 3, M), "size", M, id="both"),
        pytest.param(np.linspace(0.5, 3, M), "size", 3, id="both-3-of-10"),
    ],
)
def test_iv_fixed_point_with_unequal_clients(curvatures: Array, alpha: str, cohort: int) -> None:
    lam, best, sizes = 1.0, points(M), list(range(6, 6 + 2 * M, 2))
    settings = EXACT | {"lam": lam, "lr": 1 / (curvatures.max() + lam), "alpha": alpha, "local_epochs": 2}
    simulation = regress("flame", quadratics(best, list(curvatures), sizes), settings)
    play(simulation, 200 if cohort == M else 500, lambda number: some(M, cohort, number))
    weight = np.asarray(sizes) / sum(sizes) if alpha == "size" else np.full(M, 1 / M)
    k = curvatures / (curvatures + lam)
    w = (weight * k) @ best / (weight @ k)
    if alpha == "size" and len(set(curvatures)) == 1:  # although the server's mean is unweighted
        np.testing.assert_allclose(w, weight @ best, atol=1e-14)
    assert_at(simulation, w, k[:, None] * best + (1 - k[:, None]) * w, 1e-11)


@pytest.mark.parametrize(("lam", "rho"), [(1.0, 0.3), (4.0, 0.1)])
def test_v_one_round_from_zeros(lam: float, rho: float) -> None:
    b, best = 2.0, points(M)
    settings = EXACT | {"lam": lam, "rho": rho, "lr": 1 / (b + lam)}
    simulation = regress("flame", quadratics(best, [b] * M), settings)
    play(simulation, 1)
    pull = lam / M
    q = 2 * pull / (pull + rho) * b / (b + lam)
    np.testing.assert_allclose(row(simulation.server["u"]), q * best, rtol=1e-13)
    np.testing.assert_allclose(row(shared(simulation)), q * best.mean(0), rtol=1e-13)
    assert q < 1 or rho <= pull


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"batch_size": 0, "local_epochs": 1}, {"local_rounds": 1, "inner_steps": 1}),
        ({"batch_size": 0, "local_epochs": 3}, {"local_rounds": 1, "inner_steps": 3}),
        # Its copy moves as often as FLAME's, however many minibatches a round has.
        ({"batch_size": 4, "local_epochs": 1, "momentum": 0.5}, {"inner_steps": 1, "moves": "round"}),
        ({"batch_size": 4, "local_epochs": 3, "weight_decay": 0.01}, {"inner_steps": 1, "moves": "round"}),
    ],
)
def test_vi_without_duals_it_is_pfedme(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    lam, rho, clients = 2.0, 0.3, 5
    alpha = 1 / clients
    common = ours | {"lr": 0.1, "lam": lam}
    flame = common | {"rho": rho, "dual": False, "centre": "global"}
    pfedme = common | {"eta": alpha / (lam * alpha + rho), "beta": 1.0} | theirs
    one = simulate("flame", classification(clients), small_model(), task="multiclass", settings=flame)
    two = simulate("pfedme", classification(clients), small_model(), task="multiclass", settings=pfedme)
    for number in range(1, 7):
        for simulation in (one, two):
            simulation.play_round(everyone(simulation), number)
        for left, right in (
            (shared(one), shared(two)),
            (one.clients.rows["theta"], two.clients.rows["theta"]),
        ):
            torch.testing.assert_close(left, right, rtol=0, atol=1e-14)
    assert not bool(one.clients.rows["pi"].any())
    assert float((shared(one) - one.engine.problem.start).abs().max()) > 1e-2


def test_vi_with_duals_it_is_not_pfedme() -> None:
    settings = {"lr": 0.1, "batch_size": 0, "lam": 2.0, "rho": 0.3, "local_epochs": 2, "centre": "global"}
    ends = []
    for dual in (True, False):
        simulation = simulate(
            "flame", classification(), small_model(), task="multiclass", settings=settings | {"dual": dual}
        )
        play(simulation, 2)
        ends.append(shared(simulation))
    assert float((ends[0] - ends[1]).abs().max()) > 1e-2


def test_vii_without_pull_clients_reach_their_own_optima() -> None:
    best = points(M)
    settings = EXACT | {"lam": 1e-6, "rho": 0.1, "lr": 0.4, "local_epochs": 5}
    simulation = regress("flame", quadratics(best, [2.0] * M), settings)
    play(simulation, 10)
    np.testing.assert_allclose(row(simulation.clients.rows["theta"]), best, atol=1e-5)


def test_vii_with_no_pull_at_all_clients_are_local() -> None:
    common = {"lr": 0.1, "batch_size": 4, "local_epochs": 2}
    one = simulate(
        "flame", classification(), small_model(), task="multiclass", settings=common | {"lam": 0.0, "rho": 0.1}
    )
    two = simulate("local", classification(), small_model(), task="multiclass", settings=common)
    for simulation in (one, two):
        play(simulation, 3)
    assert torch.equal(one.clients.rows["theta"], two.clients.rows["w"])


@pytest.mark.parametrize("lam", [1.0, 100.0, 1e4])
def test_vii_fixed_points_approach_the_global_optimum(lam: float) -> None:
    """Fixed points only: the iterates freeze as λ grows, so the method is put at the fixed point and must stay."""
    best, b = points(M), np.linspace(0.5, 3, M)
    k = b / (b + lam)
    w = k @ best / k.sum()
    theta = k[:, None] * best + (1 - k[:, None]) * w
    settings = EXACT | {"lam": lam, "lr": 1 / (b.max() + lam)}
    simulation = regress("flame", quadratics(best, list(b)), settings)
    pi = lam / M * (theta - w)
    rho = lam / M
    state = simulation.clients.rows
    simulation.clients.rows = state | {
        "theta": torch.from_numpy(theta),
        "w": torch.from_numpy(w).expand(M, -1).clone(),
        "pi": torch.from_numpy(pi),
    }
    u = torch.from_numpy(w + pi / rho)
    simulation.server |= {"u": u, "sum": u.sum(0)}
    play(simulation, 3)
    assert_at(simulation, w, theta, 1e-11)
    # ERM: Σ b_i (w − θ̂_i) = 0. Its distance is O(1/λ), as k_i = (b_i/λ)(1 − b_i/λ + …).
    erm = b @ best / b.sum()
    assert np.abs(w - erm).max() < 2 * b.max() / lam


def test_viii_one_client_alone_reaches_its_optimum() -> None:
    best = points(1)
    simulation = regress("flame", quadratics(best, [2.0]), EXACT | {"lr": 1 / 3.0, "lam": 1.0})
    play(simulation, 200)
    for value in (shared(simulation), simulation.clients.rows["theta"][0]):
        np.testing.assert_allclose(row(value), best[0], atol=1e-12)


@pytest.mark.parametrize("centre", ["own", "global"])
def test_equals_a_replay_in_numpy(centre: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole method on the minibatches that the engine drew, with clients and replies missing."""
    clients, lam, rho, lr, momentum, decay = 5, 1.5, 0.4, 0.05, 0.5, 0.01
    best, sizes = points(clients), [6, 7, 9, 10, 12]
    settings = {
        **{"lam": lam, "rho": rho, "lr": lr, "momentum": momentum, "weight_decay": decay},
        **{"centre": centre, "alpha": "size", "batch_size": 4, "local_epochs": 2},
    }
    recorder = Recorder(monkeypatch)
    simulation = regress(
        "flame",
        quadratics(best, [1.0] * clients, sizes),
        settings,
        engine="loop",
        lost=lambda asked, call: asked == call.round % clients,
    )
    alpha = np.asarray(sizes) / sum(sizes)
    theta, own, pi, u = (np.zeros_like(best) for _ in range(4))
    for number in range(1, 6):
        simulation.play_round(some(clients, 4, number), number)
        w = u.mean(0)
        for i, batches in recorder.take().items():
            velocity = np.zeros(best.shape[1])
            anchor = own[i].copy() if centre == "own" else w
            for batch in batches:
                slope = gradient(theta[i], batch) + lam * (theta[i] - anchor) + decay * theta[i]
                velocity = momentum * velocity + slope
                theta[i] -= lr * velocity
            own[i] = (lam * alpha[i] * theta[i] + rho * w - pi[i]) / (lam * alpha[i] + rho)
            pi[i] += rho * (own[i] - w)
            u[i] = own[i] + pi[i] / rho
        for name, expected in {"theta": theta, "w": own, "pi": pi}.items():
            np.testing.assert_allclose(row(simulation.clients.rows[name]), expected, rtol=0, atol=1e-13)
        np.testing.assert_allclose(row(shared(simulation)), u.mean(0), rtol=0, atol=1e-13)


def test_the_sum_of_messages_does_not_drift() -> None:
    settings = {"lr": 0.05, "batch_size": 0, "local_epochs": 1}
    simulation = simulate(
        "flame", in_float32(classification(8)), small_model(), task="multiclass", dtype=torch.float32, settings=settings
    )

    def drift() -> float:
        return float((simulation.server["sum"] - simulation.server["u"].double().sum(0)).abs().max())

    for number in range(90, 99):
        simulation.play_round(some(8, 3, number), number)
        assert drift() < 1e-12
    simulation.server |= {"sum": simulation.server["sum"] + 1.0}
    simulation.play_round(some(8, 3, 99), 99)
    assert drift() > 0.9  # by differences: what was wrong stays wrong
    simulation.play_round(some(8, 3, 100), 100)
    assert drift() < 1e-12  # taken anew


def test_clients_that_never_train_do_not_count_until_they_join() -> None:
    clients = 5
    members = torch.tensor([0, 1, 3, 4])
    simulation = regress("flame", quadratics(points(clients), [2.0] * clients), EXACT | {"lr": 0.3})
    held_out = Simulation(simulation.algorithm, simulation.engine, members=members)
    np.testing.assert_allclose(row(held_out.clients.rows["alpha"]), 1 / 4)
    np.testing.assert_allclose(row(held_out.clients.rows["rho"]), 1 / 4)
    for number in (1, 2):
        held_out.play_round(members, number)
        torch.testing.assert_close(shared(held_out), held_out.server["u"][members].mean(0), rtol=0, atol=1e-15)
    held_out.play_round(torch.tensor([2]), 3)
    torch.testing.assert_close(shared(held_out), held_out.server["u"].mean(0), rtol=0, atol=1e-15)


def test_the_penalty_is_that_of_the_papers_tables() -> None:
    for clients, lam, rho in ((10, 1.0, 0.1), (50, 1.0, 0.02), (100, 3.0, 0.03)):
        best = points(clients)
        simulation = regress("flame", quadratics(best, [1.0] * clients), {"lam": lam})
        np.testing.assert_allclose(row(simulation.clients.rows["rho"]), rho, rtol=1e-12)


def test_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match=r"lr \* lam is 2.5"):
        registry.make("flame", {"lr": 0.5, "lam": 5.0})
    with pytest.raises(ConfigError, match="rho"):
        registry.make("flame", {"lam": 0.0})
    with pytest.raises(ConfigError, match="rho is 0"):
        registry.make("flame", {"rho": 0.0})
    with pytest.raises(ConfigError, match="centre"):
        registry.make("flame", {"centre": "elsewhere"})
