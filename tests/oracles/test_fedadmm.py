"""FedADMM: its fixed point is the global optimum, its messages are true differences, it stays bounded."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from coterie.algorithms import registry
from coterie.errors import ConfigError
from tests.oracles.regression import Recorder, gradient, points, quadratics, regress, row, some
from tests.support import classification, everyone, play, simulate, small_model

FIXED = {"local_epochs": 2, "least_epochs": 2, "momentum": 0.0, "early_rounds": None}


@pytest.mark.parametrize("begin", ["global", "own"])
def test_fixed_point_is_the_global_optimum_of_two_quadratics(begin: str) -> None:
    """Of the sum, not the mean of optima: curvatures differ, several local steps are taken, and nothing drifts."""
    best, b = points(2), np.asarray([0.5, 3.0])
    settings = FIXED | {"rho": 1.0, "lr": 0.2, "batch_size": 0, "local_epochs": 5, "least_epochs": 5, "begin": begin}
    simulation = regress("fedadmm", quadratics(best, list(b)), settings)
    play(simulation, 120)
    optimum = b @ best / b.sum()
    np.testing.assert_allclose(row(simulation.server["w"]), optimum, rtol=0, atol=1e-12)
    np.testing.assert_allclose(row(simulation.clients.rows["w"]), np.tile(optimum, (2, 1)), rtol=0, atol=1e-12)
    # Each dual has become minus its client's gradient there.
    np.testing.assert_allclose(row(simulation.clients.rows["pi"]), -b[:, None] * (optimum - best), rtol=0, atol=1e-12)
    assert np.abs(optimum - best.mean(0)).max() > 0.1


@pytest.mark.parametrize("rho", [0.01, 0.3])
def test_with_everybody_the_global_model_is_the_mean_of_augmented_models(rho: float) -> None:
    settings = {"rho": rho, "lr": 0.1, "batch_size": 4, "local_epochs": 3, "early_rounds": None}
    simulation = simulate("fedadmm", classification(), small_model(), task="multiclass", settings=settings)
    for number in range(1, 5):
        simulation.play_round(everyone(simulation), number)
        state = simulation.clients.rows
        torch.testing.assert_close(simulation.server["w"], (state["w"] + state["pi"] / rho).mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("begin", ["global", "own"])
def test_with_a_few_the_global_model_is_still_the_mean_over_all_clients(begin: str) -> None:
    """Absent clients count with what they sent last, and those that never took part with the initial model."""
    rho = 0.3
    settings = {"rho": rho, "lr": 0.1, "batch_size": 4, "local_epochs": 3, "early_rounds": None, "begin": begin}
    simulation = simulate("fedadmm", classification(), small_model(), task="multiclass", settings=settings)
    for number in range(1, 7):
        simulation.play_round(some(5, 2, number), number)
        state = simulation.clients.rows
        torch.testing.assert_close(simulation.server["w"], (state["w"] + state["pi"] / rho).mean(0), rtol=0, atol=1e-12)


@pytest.mark.parametrize("early", [None, 60])
def test_it_stays_bounded_when_six_of_sixty_take_part(early: int | None) -> None:
    """With exact inner minima and ``b = ρ``, ``w_i + π_i/ρ`` is the client's optimum once it has taken part.

    So ``w`` is a mean of optima and zeros, never longer than the longest, and in the end the optimum of the sum. Added
    whole by six of sixty, a first reply, which carries ``w − w⁰``, doubles ``w`` in every round instead.
    """
    clients = 60
    best = points(clients) + 5.0
    settings = FIXED | {"rho": 1.0, "lr": 0.5, "batch_size": 0, "early_rounds": early}
    simulation = regress("fedadmm", quadratics(best, [1.0] * clients), settings)
    reach = float(np.linalg.norm(best, axis=1).max())
    seen: set[int] = set()
    for number in range(1, 201):
        cohort = some(clients, 6, number)
        seen |= set(cohort.tolist())
        simulation.play_round(cohort, number)
        w = row(simulation.server["w"])
        assert np.linalg.norm(w) <= reach * (1 + 1e-12)
        if early is None or number <= early:
            np.testing.assert_allclose(w, best[sorted(seen)].sum(0) / clients, rtol=0, atol=1e-11)
    assert len(seen) == clients


def test_a_few_reach_the_global_optimum_of_unequal_quadratics() -> None:
    best, b = points(12), np.linspace(0.5, 3, 12)
    settings = FIXED | {"rho": 1.0, "lr": 0.2, "batch_size": 0, "local_epochs": 5, "least_epochs": 5}
    simulation = regress("fedadmm", quadratics(best, list(b)), settings)
    play(simulation, 600, lambda number: some(12, 3, number))
    np.testing.assert_allclose(row(simulation.server["w"]), b @ best / b.sum(), rtol=0, atol=1e-10)


def test_without_penalty_it_is_fedavg_with_equal_weights() -> None:
    samples = classification(sizes=[12] * 5)
    settings = {"lr": 0.1, "batch_size": 4, "local_epochs": 2}
    fedavg = simulate("fedavg", samples, small_model(), task="multiclass", settings=settings)
    fedadmm = simulate("fedadmm", samples, small_model(), task="multiclass", settings=FIXED | settings | {"rho": 0.0})
    for number in range(1, 5):
        for simulation in (fedavg, fedadmm):
            simulation.play_round(everyone(simulation), number)
        torch.testing.assert_close(fedavg.server["w"], fedadmm.server["w"], rtol=0, atol=1e-13)
    assert not bool(fedadmm.clients.rows["pi"].any())


@pytest.mark.parametrize("extra", [{}, {"begin": "own", "momentum": 0.5}, {"early_rounds": 2, "late_server_lr": 0.25}])
def test_equals_a_replay_in_numpy(extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With clients and replies missing, where the true difference is not the difference to the received model."""
    clients, rho, lr = 5, 0.3, 0.05
    best, sizes = points(clients), [6, 7, 9, 10, 12]
    settings = FIXED | {"rho": rho, "lr": lr, "batch_size": 4} | extra
    recorder = Recorder(monkeypatch)
    simulation = regress(
        "fedadmm",
        quadratics(best, [1.0] * clients, sizes),
        settings,
        engine="loop",
        lost=lambda asked, call: asked == call.round % clients,
    )
    w, own, pi = np.zeros(3), np.zeros_like(best), np.zeros_like(best)
    for number in range(1, 6):
        simulation.play_round(some(clients, 4, number), number)
        changes = []
        for i, batches in recorder.take().items():
            before, velocity = own[i] + pi[i] / rho, np.zeros(3)
            params = own[i] if settings.get("begin") == "own" else w
            for batch in batches:
                velocity = settings["momentum"] * velocity + gradient(params, batch) + pi[i] + rho * (params - w)
                params = params - lr * velocity
            own[i] = params
            pi[i] = pi[i] + rho * (params - w)
            changes.append(own[i] + pi[i] / rho - before)
        step = 0.25 if "early_rounds" in extra and number > 2 else 1.0
        w = w + step * np.sum(changes, axis=0) / clients
        for name, expected in (("w", own), ("pi", pi)):
            np.testing.assert_allclose(row(simulation.clients.rows[name]), expected, rtol=0, atol=1e-12)
        np.testing.assert_allclose(row(simulation.server["w"]), w, rtol=0, atol=1e-12)


def test_epochs_are_drawn_between_the_two_bounds_anew_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    clients = 6
    simulation = regress(
        "fedadmm",
        quadratics(points(clients), [1.0] * clients),
        {"batch_size": 0, "least_epochs": 2, "local_epochs": 5, "lr": 0.1},
        engine="loop",
    )
    seen = []
    for number in range(1, 11):
        simulation.play_round(everyone(simulation), number)
        seen.append([len(batches) for _, batches in sorted(recorder.take().items())])
    assert {count for counts in seen for count in counts} == {2, 3, 4, 5}
    assert len({tuple(counts) for counts in seen}) > 5


def test_the_servers_step_halves_after_sixty_rounds() -> None:
    algorithm = registry.make("fedadmm")
    assert (algorithm.server_lr, algorithm.late_server_lr, algorithm.early_rounds) == (1.0, 0.5, 60)  # type: ignore[attr-defined]
    moves = []
    for number in (60, 61):
        simulation = regress("fedadmm", quadratics(points(3), [1.0] * 3), FIXED | {"batch_size": 0, "early_rounds": 60})
        simulation.play_round(everyone(simulation), number)
        moves.append(row(simulation.server["w"]))
    np.testing.assert_allclose(moves[1], moves[0] / 2, rtol=1e-13)


def test_refuses_what_cannot_work() -> None:
    with pytest.raises(ConfigError, match=r"lr \* rho is 3"):
        registry.make("fedadmm", {"lr": 0.1, "rho": 30.0})
    with pytest.raises(ConfigError, match="least_epochs is 4: it may be at most local_epochs=3"):
        registry.make("fedadmm", {"least_epochs": 4, "local_epochs": 3})
