"""FedAMP: attention by distance, and a pull towards the cloud model that counts."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.algorithms import registry
from coterie.algorithms.base import Weights
from coterie.compute.samples import Samples
from coterie.errors import ConfigError
from coterie.models.problem import Problem
from coterie.simulation.simulation import Simulation
from tests.oracles.attention_by_hand import ByHand, fedamp, median_distance
from tests.oracles.regression import Array, Recorder, points, quadratics, regress, row, some
from tests.support import ENGINES, classification, everyone, linear_regression, play, simulate, small_model

LOCAL = {"lr": 0.1, "batch_size": 4, "local_epochs": 2}
SIZES = [6, 7, 9, 10, 12]
CURVATURES = [1.0, 2.0, 0.5, 1.0, 1.5]
OFF = ~torch.eye(5, dtype=torch.bool)


def exactly(b: float, prox: float) -> dict[str, Any]:
    """Settings with which one full-batch step ends at the minimiser ``(b c + prox u)/(b + prox)``."""
    return {"prox": prox, "lr": 1 / (b + prox), "batch_size": 0, "local_epochs": 1}


def classify(name: str, settings: dict[str, Any], engine: str = "batched") -> Simulation:
    simulation = simulate(name, classification(), small_model(), task="multiclass", settings=settings, engine=engine)
    play(simulation, 3, lambda number: some(5, 3, number))
    return simulation


def spread(simulation: Simulation, models: Array) -> None:
    """Let the clients, and the server's copies of them, stand at given models."""
    simulation.server["w"] = torch.from_numpy(models.copy())
    simulation.clients.rows["w"] = torch.from_numpy(models.copy())


def with_members(
    samples: Samples, members: list[int] | None, settings: dict[str, Any], name: str = "fedamp", engine: str = "loop"
) -> Simulation:
    problem = Problem.of(linear_regression(samples.x.shape[1]), "regression", dtype=torch.float64)
    return Simulation(
        registry.make(name, settings),
        ENGINES[engine](problem, samples, 3),
        members=None if members is None else torch.tensor(members),
    )


def weights_of(info: dict[str, Any]) -> Weights:
    weights = info["weights"]
    assert isinstance(weights, Weights)
    return weights


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"begin": "cloud"},
        {"sigma": 0.7, "kappa": 0.15},
        {"kappa": 0.9, "guard": False},
        {"kappa": 0.5, "xi_min": 0.3},
    ],
)
def test_rounds_equal_an_independent_implementation(extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of five clients a round, minibatches, and one client that may not answer."""
    recorder, lr, prox = Recorder(monkeypatch), 0.05, 1.0
    simulation = regress(
        "fedamp",
        quadratics(points(5), CURVATURES, SIZES),
        {"lr": lr, "batch_size": 4, "local_epochs": 2} | extra,
        engine="loop",
        lost=lambda asked, call: asked == call.round % 5,
    )
    hand = ByHand(np.zeros((5, 3)), range(5), lr, prox, extra.get("begin") == "cloud")
    kappa, xi_min = extra.get("kappa", 2 / 5), extra.get("xi_min", 0.0) if extra.get("guard", True) else None
    counts = []
    for number in range(1, 6):
        asked = some(5, 4, number)
        sigma = extra.get("sigma") or median_distance(hand.w, range(5))
        free = [fedamp(kappa, sigma, None)(hand.w, i, range(5))[i] for i in asked.tolist()]
        counts.append(0 if xi_min is None else sum(own < xi_min for own in free))
        info = simulation.play_round(asked, number)
        xi = hand.play(asked.tolist(), recorder.take(), fedamp(kappa, sigma, xi_min))
        weights = weights_of(info)
        assert weights.rows.tolist() == asked.tolist() and weights.columns.tolist() == list(range(5))
        np.testing.assert_allclose(row(weights.values), xi, rtol=0, atol=1e-12)
        assert float(info["guarded"]) == counts[-1]  # type: ignore[arg-type]
        assert float(simulation.server["sigma"]) == pytest.approx(sigma, rel=1e-11)
        np.testing.assert_allclose(row(simulation.clients.rows["w"]), hand.w, rtol=0, atol=1e-12)
        np.testing.assert_allclose(row(simulation.server["w"]), hand.w, rtol=0, atol=1e-12)
        np.testing.assert_allclose(row(simulation.server["u"]), hand.u, rtol=0, atol=1e-12)
        personal = simulation.personal(everyone(simulation), number)["w"]
        np.testing.assert_allclose(row(personal), hand.w, rtol=0, atol=1e-12)
        cloud = simulation.algorithm.other_models(simulation.server)["cloud"]["w"]
        assert torch.equal(cloud, simulation.server["u"])
    if xi_min is not None and "sigma" not in extra:
        assert 0 < sum(counts) < 4 * 5  # both kinds of rows were there


@pytest.mark.parametrize("begin", ["own", "cloud"])
def test_many_steps_reach_the_local_solution(begin: str) -> None:
    """``(b c + prox u)/(b + prox)``, wherever training starts."""
    best, prox, b = points(5), 1.5, np.array(CURVATURES)[:, None]
    settings = {"prox": prox, "lr": 0.2, "batch_size": 0, "local_epochs": 90, "begin": begin}
    simulation = regress("fedamp", quadratics(best, CURVATURES, SIZES), settings)
    w = np.zeros((5, 3))
    for number in (1, 2, 3):
        attend = fedamp(2 / 5, median_distance(w, range(5)))
        u = np.array([attend(w, i, range(5)) for i in range(5)]) @ w
        w = (b * best + prox * u) / (b + prox)
        simulation.play_round(everyone(simulation), number)
        # The slowest client's distance shrinks by 1 - 0.2 (0.5 + 1.5) = 0.6 a step.
        np.testing.assert_allclose(row(simulation.clients.rows["w"]), w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("sigma", [0.5, 8.0])
def test_the_cloud_models_are_half_a_gradient_step_on_the_attention(sigma: float) -> None:
    """``U = W - (alpha/2) grad A(W)``, A the sum over pairs of ``1 - exp(-|w_i - w_j|²/sigma)``: by autograd."""
    kappa = 0.3
    settings = exactly(1.0, 1.0) | {"sigma": sigma, "kappa": kappa, "guard": False}
    simulation = regress("fedamp", quadratics(points(5), [1.0] * 5), settings)
    spread(simulation, points(5, seed=8))
    w = simulation.server["w"].clone().requires_grad_()
    i, j = torch.triu_indices(5, 5, 1)
    (slope,) = torch.autograd.grad((1 - torch.exp(-(w[i] - w[j]).square().sum(1) / sigma)).sum(), w)
    simulation.play_round(everyone(simulation), 1)
    alpha = kappa * sigma
    torch.testing.assert_close(simulation.server["u"], w.detach() - alpha / 2 * slope, rtol=0, atol=1e-13)
    assert float(slope.abs().max()) > 0.01


def test_without_the_guard_weights_are_symmetric_and_sum_to_one() -> None:
    simulation = regress("fedamp", quadratics(points(5), CURVATURES, SIZES), LOCAL | {"guard": False, "kappa": 0.7})
    for number in (1, 2, 3):
        values = weights_of(simulation.play_round(everyone(simulation), number)).values
        torch.testing.assert_close(values, values.T, rtol=0, atol=1e-14)
        torch.testing.assert_close(values.sum(1), torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-14)
        # Not negative if and only if the attention to others sums to at most 1.
        others = torch.where(OFF, values, 0).sum(1)
        assert torch.equal((values >= 0).all(1), others <= 1)
        if number == 1:  # identical models
            torch.testing.assert_close(values[OFF], torch.full_like(values[OFF], 0.7), rtol=1e-14, atol=0)
            assert bool((values.diagonal() < 0).all())


def test_kappa_is_2_over_the_number_of_clients_unless_given() -> None:
    for clients in (2, 3, 5):
        samples = quadratics(points(clients), [1.0] * clients)
        simulation = regress("fedamp", samples, LOCAL | {"guard": False})
        values = weights_of(simulation.play_round(everyone(simulation), 1)).values  # all models are equal
        off = ~torch.eye(clients, dtype=torch.bool)
        torch.testing.assert_close(values[off], torch.full_like(values[off], 2 / clients), rtol=1e-14, atol=0)


@pytest.mark.parametrize(("kappa", "xi_min", "guarded"), [(0.2, 0.0, 0), (0.3, 0.0, 5), (0.2, 0.25, 5), (None, 0.0, 5)])
def test_the_guard_counts_its_rows(kappa: float | None, xi_min: float, guarded: int) -> None:
    """Of five equal models each attends to others with 4 kappa in all."""
    settings = LOCAL | {"kappa": kappa, "xi_min": xi_min}
    simulation = regress("fedamp", quadratics(points(5), CURVATURES, SIZES), settings)
    info = simulation.play_round(everyone(simulation), 1)
    values = weights_of(info).values
    assert float(info["guarded"]) == guarded  # type: ignore[arg-type]
    own = xi_min if guarded else 1 - 4 * (kappa or 2 / 5)
    torch.testing.assert_close(values.diagonal(), torch.full((5,), own, dtype=torch.float64), rtol=0, atol=1e-15)
    torch.testing.assert_close(values[OFF], torch.full((20,), (1 - own) / 4, dtype=torch.float64), rtol=0, atol=1e-15)


def test_sigma_is_taken_again_each_round_and_kept_in_the_servers_state() -> None:
    simulation = regress("fedamp", quadratics(points(5), CURVATURES, SIZES), LOCAL)
    taken = []
    for number in range(1, 5):
        before = row(simulation.server["w"]).copy()
        simulation.play_round(some(5, 3, number), number)
        taken.append(float(simulation.server["sigma"]))
        assert taken[-1] == pytest.approx(median_distance(before, range(5)), rel=1e-11)
    assert len(set(taken)) == 4
    fixed = regress("fedamp", quadratics(points(5), CURVATURES, SIZES), LOCAL | {"sigma": 2.5})
    play(fixed, 3)
    assert float(fixed.server["sigma"]) == 2.5


def test_absent_clients_last_models_still_speak() -> None:
    samples = quadratics(points(5), CURVATURES, SIZES)
    ends = []
    for shift in (0.0, 0.5):
        simulation = regress("fedamp", samples, LOCAL | {"sigma": 2.0})
        simulation.play_round(torch.tensor([0, 1, 2, 3]), 1)
        last = simulation.server["w"].clone()
        assert torch.equal(last, simulation.clients.rows["w"])
        last[3] += shift  # had the absent client sent something else in round 1, the others would hear something else
        simulation.server["w"] = last
        info = simulation.play_round(torch.tensor([0, 1, 2]), 2)
        values = weights_of(info).values
        assert float(values[:, 3:].min()) > 0  # nor has client 4 ever trained
        torch.testing.assert_close(simulation.server["u"][:3], values @ last, rtol=0, atol=1e-14)
        assert torch.equal(simulation.server["w"][3:], last[3:])
        ends.append(simulation.clients.rows["w"][:3].clone())
    assert float((ends[0] - ends[1]).abs().amax(1).min()) > 1e-3


def test_every_round_lowers_the_objective_and_ends_where_it_is_stationary() -> None:
    """On convex F_i, with exact local solutions, small alpha and fixed sigma.

    The printed update drops a factor 2 of the gradient, so that a round is a proximal gradient step on ``sum F_i +
    (lambda/2) sum_{i<j} A``, with half the paper's weight on A, and that is what cannot rise.
    """
    b, sigma, kappa, best = 1.3, 4.0, 0.02, points(5)
    alpha, prox = kappa * sigma, 2.0
    strength = prox * alpha  # lambda
    simulation = regress("fedamp", quadratics(best, [b] * 5), exactly(b, prox) | {"sigma": sigma, "kappa": kappa})
    spread(simulation, points(5, seed=8))

    def objective(w: Tensor) -> Tensor:
        attention = (1 - torch.exp(-torch.pdist(w).square() / sigma)).sum()
        return b / 2 * (w - torch.from_numpy(best)).square().sum() + strength / 2 * attention

    values = [float(objective(simulation.server["w"]))]
    for number in range(1, 81):
        info = simulation.play_round(everyone(simulation), number)
        assert float(info["guarded"]) == 0  # type: ignore[arg-type]
        values.append(float(objective(simulation.server["w"])))
    assert all(after <= before + 1e-13 for before, after in pairwise(values))
    assert values[1] < values[0] - 0.1
    w = simulation.server["w"].clone().requires_grad_()
    (slope,) = torch.autograd.grad(objective(w), w)
    torch.testing.assert_close(slope, torch.zeros_like(slope), rtol=0, atol=1e-11)
    assert float((w.detach() - torch.from_numpy(best)).abs().max()) > 1e-3  # and that is not each one's own optimum


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("extra", [{}, {"momentum": 0.5}, {"optimiser": "adam", "lr": 0.01}])
def test_the_pull_has_a_gradient_and_without_it_the_method_is_local(engine: str, extra: dict[str, Any]) -> None:
    local = classify("local", LOCAL | extra, engine).clients.rows["w"]
    without = classify("fedamp", LOCAL | extra | {"prox": 0.0}, engine).clients.rows["w"]
    pulled = classify("fedamp", LOCAL | extra, engine).clients.rows["w"]
    assert torch.equal(local, without)
    trained = torch.unique(torch.cat([some(5, 3, number) for number in (1, 2, 3)]))
    assert float((local - pulled).abs().amax(1)[trained].min()) > 1e-3


@pytest.mark.parametrize("silent", [{"kappa": 0.0}, {"sigma": 1e-9, "kappa": 0.2}])
def test_no_attention_is_local_with_proximal_damping(silent: dict[str, float]) -> None:
    """``alpha -> 0``, or distances that are infinite for sigma: ``u_i = w_i``, and each pulls back to its own start."""
    best, prox, lr, steps = points(5), 2.0, 0.1, 3
    b, w = np.array(CURVATURES)[:, None], points(5, seed=8)
    settings = {"prox": prox, "lr": lr, "batch_size": 0, "local_epochs": steps} | silent
    simulation = regress("fedamp", quadratics(best, CURVATURES, SIZES), settings)
    spread(simulation, w)
    for number in (1, 2, 3):
        info = simulation.play_round(everyone(simulation), number)
        assert torch.equal(weights_of(info).values, torch.eye(5, dtype=torch.float64))
        target = (b * best + prox * w) / (b + prox)
        w = target + (1 - lr * (b + prox)) ** steps * (w - target)
        np.testing.assert_allclose(row(simulation.clients.rows["w"]), w, rtol=0, atol=1e-13)


def test_prox_to_infinity_gives_the_cloud_model() -> None:
    """As a limit of the minimiser, b/(b + prox) of the way from u to c."""
    b, start, best, gaps = 2.0, points(5, seed=8), points(5), []
    samples = quadratics(best, [b] * 5)
    for prox in (1.0, 1e3, 1e6, 1e9):
        simulation = regress("fedamp", samples, exactly(b, prox))
        spread(simulation, start)
        play(simulation, 1)
        u = row(simulation.server["u"])
        gap = row(simulation.clients.rows["w"]) - u
        np.testing.assert_allclose(gap, b / (b + prox) * (best - u), rtol=0, atol=1e-14)
        gaps.append(float(np.abs(gap).max()))
    assert gaps[-1] < 1e-8 * gaps[0]
    with pytest.raises(ConfigError, match=r"lr \* prox is 5"):
        registry.make("fedamp", {"lr": 0.1, "prox": 50.0})


def test_all_start_from_one_model_unless_told_otherwise() -> None:
    own = torch.from_numpy(points(5, seed=8))
    for common, start in ((True, torch.zeros(5, 3).double()), (False, own)):
        problem = Problem.of(linear_regression(3), "regression", dtype=torch.float64)
        engine = ENGINES["batched"](problem, quadratics(points(5), [1.0] * 5), 3)
        method = registry.make("fedamp", LOCAL | {"common_start": common})
        simulation = Simulation(method, engine, fresh=lambda client: own[client].clone())
        assert torch.equal(simulation.server["w"], start)
        assert torch.equal(simulation.clients.rows["w"], start)


def test_bytes_are_one_model_each_way() -> None:
    simulation = classify("fedamp", LOCAL)
    n = simulation.engine.net.layout.size
    assert (simulation.traffic.down, simulation.traffic.up) == (3 * 3 * 8 * n,) * 2


def test_only_members_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients 1 and 4 never train: they neither speak nor count for kappa and sigma."""
    recorder, members = Recorder(monkeypatch), [0, 2, 3]
    simulation = with_members(quadratics(points(5), CURVATURES, SIZES), members, LOCAL | {"lr": 0.05})
    hand = ByHand(np.zeros((5, 3)), members, 0.05, 1.0)
    for number in range(1, 5):
        asked = members if number % 2 else [0, 3]
        sigma = median_distance(hand.w, members)
        info = simulation.play_round(torch.tensor(asked), number)
        xi = hand.play(asked, recorder.take(), fedamp(2 / 3, sigma))
        values = torch.zeros(len(asked), 5, dtype=torch.float64)
        weights = weights_of(info)
        values[:, weights.columns] = weights.values
        np.testing.assert_allclose(row(values), xi, rtol=0, atol=1e-12)
        assert float(simulation.server["sigma"]) == pytest.approx(sigma, rel=1e-11)
        np.testing.assert_allclose(row(simulation.clients.rows["w"]), hand.w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_newcomer_listens_to_the_members_and_to_itself(engine: str) -> None:
    """Held-out clients that join together hear the members, each for itself, and leave everything as it was."""
    best, members, b, prox = points(5), [0, 2, 3], 1.0, 1.0
    samples = quadratics(best, [b] * 5, SIZES)
    simulation = with_members(samples, members, exactly(b, prox) | {"newcomers": "initial"}, engine=engine)
    for number in (1, 2, 3):
        simulation.play_round(torch.tensor(members), number)
    w, before = row(simulation.server["w"]).copy(), simulation.server["w"].clone()
    adapted = row(simulation.adapt(torch.tensor([1, 4]), 3, 2)["w"])
    for _ in range(2):
        attend = fedamp(2 / 3, median_distance(w, members))
        u = np.array([attend(w, i, members) for i in (1, 4)]) @ w
        w[[1, 4]] = (b * best[[1, 4]] + prox * u) / (b + prox)
    np.testing.assert_allclose(adapted, w[[1, 4]], rtol=0, atol=1e-12)
    assert torch.equal(simulation.server["w"], before)


@pytest.mark.parametrize("name", ["fedamp", "heurfedamp"])
def test_members_that_are_everybody_change_nothing(name: str) -> None:
    ends = []
    for members in (None, list(range(5))):
        simulation = with_members(quadratics(points(5), CURVATURES, SIZES), members, LOCAL, name)
        play(simulation, 3, lambda number: some(5, 4, number))
        ends.append(simulation.clients.rows["w"])
    assert torch.equal(*ends)
