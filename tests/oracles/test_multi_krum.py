"""Multi-Krum, and the other robust means that FedAvg offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.algorithms import registry
from coterie.compute.batched import BatchedEngine
from coterie.compute.engine import Call
from coterie.errors import ConfigError
from coterie.models.problem import Problem
from coterie.rows import Rows
from coterie.simulation.simulation import Simulation
from tests.oracles.quadratics import Array, Quadratics
from tests.support import everyone, linear_regression, play, simulate

LOCAL = {"lr": 0.1, "local_epochs": 2, "batch_size": 0}


def of(
    problem: Quadratics, name: str = "multi_krum", attack: Callable[[Tensor, Tensor], Tensor] | None = None, **own: Any
) -> Simulation:
    """A simulation in which what clients send may be replaced."""

    def alter(rows: Rows, clients: Tensor, round_number: int) -> Rows:
        return rows if attack is None else {"w": attack(rows["w"], clients)}

    algorithm = registry.make(name, LOCAL | own)
    engine = BatchedEngine(Problem.of(linear_regression(6), "regression", dtype=torch.float64), problem.samples(), 3)
    return Simulation(algorithm, engine, alter=alter)


def trained(problem: Quadratics, w: Array) -> Array:
    own = np.tile(w, (problem.clients, 1))
    for _ in range(2):
        own = own - 0.1 * problem.gradient(own)
    return own


@pytest.mark.parametrize("attacker", range(6))
@pytest.mark.parametrize("distance", [1e2, 1e8, -1e20])
def test_the_far_outlier_is_never_selected(attacker: int, distance: float) -> None:
    problem = Quadratics.drawn(1, 6)

    def attack(rows: Tensor, clients: Tensor) -> Tensor:
        return torch.where((clients == attacker).unsqueeze(1), rows + distance, rows)

    simulation = of(problem, attack=attack)  # a fifth of six: one hostile client
    w, honest = np.zeros(6), [i for i in range(6) if i != attacker]
    for number in range(1, 4):
        simulation.play_round(everyone(simulation), number)
        w = trained(problem, w)[honest].mean(0)
        np.testing.assert_allclose(simulation.server["w"].numpy(), w, rtol=0, atol=1e-11)


def test_lowest_scores_are_averaged() -> None:
    # Krum's scores by hand: squared distances to the 7 - 2 - 2 = 3 nearest others.
    problem = Quadratics.drawn(2, 7, spread=3.0)
    simulation = of(problem, fraction=0.3)
    info = simulation.play_round(everyone(simulation), 1)
    models = trained(problem, np.zeros(6))
    away = ((models[:, None] - models[None]) ** 2).sum(-1)
    scores = np.sort(away, axis=1)[:, 1:4].sum(1)
    expected = models[np.argsort(scores)[:5]].mean(0)
    np.testing.assert_allclose(simulation.server["w"].numpy(), expected, rtol=0, atol=1e-12)
    assert info["hostile"] == 2
    assert info["guaranteed"] == 1
    fewer = of(problem, fraction=0.3, select=2)
    play(fewer, 1)
    np.testing.assert_allclose(fewer.server["w"].numpy(), models[np.argsort(scores)[:2]].mean(0), rtol=0, atol=1e-12)


def test_nobody_hostile_is_the_plain_mean() -> None:
    problem = Quadratics.drawn(3, 4)
    simulation = of(problem, fraction=0.0)
    play(simulation, 1)
    expected = trained(problem, np.zeros(6)).mean(0)  # not weighted by samples, which a hostile client may claim
    np.testing.assert_allclose(simulation.server["w"].numpy(), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize(("fraction", "count", "hostile"), [(0.2, 10, 2), (0.2, 9, 1), (0.29, 100, 29), (0.0, 5, 0)])
def test_hostile_clients_are_a_fraction_rounded_down(fraction: float, count: int, hostile: int) -> None:
    algorithm = registry.make("multi_krum", {"fraction": fraction})
    assert algorithm.hostile(count) == hostile  # type: ignore[attr-defined]


@pytest.mark.parametrize("fraction", [0.0, 0.05, 0.1, 0.15, 0.2])
def test_up_to_a_fifth_is_within_the_guarantee_for_three_clients_or_more(fraction: float) -> None:
    algorithm = registry.make("multi_krum", {"fraction": fraction})
    for count in range(3, 200):
        assert 2 * algorithm.hostile(count) + 2 < count  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("count", "fraction", "guaranteed"), [(1, 0.2, 0), (2, 0.5, 0), (3, 0.9, 0), (3, 0.2, 1), (5, 0.5, 0)]
)
def test_few_clients_and_large_fractions_do_not_end_a_run(count: int, fraction: float, guaranteed: int) -> None:
    problem = Quadratics.drawn(4, 5)
    simulation = of(problem, fraction=fraction, select=4)
    info = simulation.play_round(torch.arange(count), 1)
    assert info["guaranteed"] == guaranteed
    assert simulation.server["w"].isfinite().all()
    if count <= 3:
        # Nothing to choose by: with at most one neighbour each, or none, all are averaged.
        expected = trained(problem, np.zeros(6))[:count].mean(0)
        np.testing.assert_allclose(simulation.server["w"].numpy(), expected, rtol=0, atol=1e-13)


def test_f_follows_the_replies() -> None:
    problem = Quadratics.drawn(5, 6)

    def lost(clients: Tensor, call: Call) -> Tensor:
        return clients < 2

    simulation = simulate("multi_krum", problem.samples(), linear_regression(6), settings=LOCAL, lost=lost)
    info = simulation.play_round(everyone(simulation), 1)
    assert info["hostile"] == 0  # a fifth of four
    expected = trained(problem, np.zeros(6))[2:].mean(0)
    np.testing.assert_allclose(simulation.server["w"].numpy(), expected, rtol=0, atol=1e-13)


def test_personal_models_are_the_local_ones() -> None:
    problem = Quadratics.drawn(6, 5)
    simulation = of(problem)
    play(simulation, 1)
    personal = simulation.personal(everyone(simulation), 1)["w"].numpy()
    np.testing.assert_allclose(personal, trained(problem, np.zeros(6)), rtol=0, atol=1e-13)


# ---------------------------------------------------------------------------------------------------- FedAvg's options


def krum_scores(models: Array, f: int) -> Array:
    away = ((models[:, None] - models[None]) ** 2).sum(-1)
    return np.sort(away, axis=1)[:, 1 : len(models) - f - 1].sum(1)


AGGREGATORS: dict[str, tuple[dict[str, Any], Callable[[Array, Array], Array]]] = {
    "mean": ({}, lambda models, p: p @ models),
    "median": ({}, lambda models, p: np.median(models, axis=0)),
    "trimmed_mean": ({"byzantine": 2}, lambda models, p: np.sort(models, axis=0)[2:-2].mean(0)),
    "krum": ({"byzantine": 1}, lambda models, p: models[krum_scores(models, 1).argmin()]),
    "multi_krum": ({"byzantine": 2}, lambda models, p: models[np.argsort(krum_scores(models, 2))[:5]].mean(0)),
}


@pytest.mark.parametrize("aggregator", sorted(AGGREGATORS))
def test_fedavgs_aggregators(aggregator: str) -> None:
    problem = Quadratics.drawn(7, 7, spread=3.0)
    options, expected = AGGREGATORS[aggregator]
    simulation = of(problem, "fedavg", aggregator=aggregator, **options)
    w, p = np.zeros(6), problem.sizes / problem.sizes.sum()
    for number in (1, 2):
        simulation.play_round(everyone(simulation), number)
        w = expected(trained(problem, w), p)
        np.testing.assert_allclose(simulation.server["w"].numpy(), w, rtol=0, atol=1e-12)


@pytest.mark.parametrize("aggregator", ["median", "trimmed_mean", "krum", "multi_krum"])
def test_fedavgs_robust_aggregators_bound_what_two_of_seven_can_do(aggregator: str) -> None:
    problem = Quadratics.drawn(8, 7)

    def attack(rows: Tensor, clients: Tensor) -> Tensor:
        return torch.where((clients < 2).unsqueeze(1), rows.new_tensor(1e9), rows)

    options = {} if aggregator == "median" else {"byzantine": 2}
    simulation = of(problem, "fedavg", attack, aggregator=aggregator, **options)
    play(simulation, 1)
    honest = trained(problem, np.zeros(6))[2:]
    found = simulation.server["w"].numpy()
    assert (found >= honest.min(0) - 1e-12).all()
    assert (found <= honest.max(0) + 1e-12).all()


@pytest.mark.parametrize(
    ("aggregator", "left", "assumed", "expected"),
    [
        ("trimmed_mean", 4, 1, lambda models: np.sort(models, axis=0)[1:-1].mean(0)),
        ("trimmed_mean", 2, 0, lambda models: models.mean(0)),
        ("krum", 5, 1, lambda models: models[krum_scores(models, 1).argmin()]),
        ("krum", 3, 0, lambda models: models[krum_scores(models, 0).argmin()]),
        ("krum", 2, 0, lambda models: models.mean(0)),
        ("multi_krum", 5, 1, lambda models: models[np.argsort(krum_scores(models, 1))[:4]].mean(0)),
        ("multi_krum", 1, 0, lambda models: models.mean(0)),
    ],
)
def test_lost_replies_lower_what_fedavg_assumes_and_do_not_end_a_run(
    aggregator: str, left: int, assumed: int, expected: Callable[[Array], Array]
) -> None:
    problem = Quadratics.drawn(9, 7, spread=3.0)
    settings = LOCAL | {"aggregator": aggregator, "byzantine": 2}

    def lost(clients: Tensor, call: Call) -> Tensor:
        return (clients >= left) & (call.round == 2)

    simulation = simulate("fedavg", problem.samples(), linear_regression(6), settings=settings, lost=lost)
    info = simulation.play_round(everyone(simulation), 1)
    assert (info["hostile"], info["guaranteed"]) == (2, 1)
    w = simulation.server["w"].numpy()
    info = simulation.play_round(everyone(simulation), 2)
    assert (info["hostile"], info["guaranteed"]) == (assumed, 0)
    np.testing.assert_allclose(simulation.server["w"].numpy(), expected(trained(problem, w)[:left]), rtol=0, atol=1e-12)


def test_an_aggregator_that_does_not_exist_or_ignores_byzantine_is_refused() -> None:
    with pytest.raises(ConfigError, match="aggregator is 'krumm'"):
        registry.make("fedavg", {"aggregator": "krumm"})
    with pytest.raises(ConfigError, match="byzantine=2 has no effect"):
        registry.make("fedavg", {"byzantine": 2})
    with pytest.raises(ConfigError, match=r"fraction is 1\.0"):
        registry.make("multi_krum", {"fraction": 1.0})
