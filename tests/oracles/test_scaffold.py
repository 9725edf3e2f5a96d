"""SCAFFOLD: control variates make local steps those of everybody's loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.compute.engine import Call
from coterie.errors import ConfigError
from coterie.randomness import stream
from coterie.simulation.simulation import Simulation
from tests.oracles.quadratics import Array, Quadratics
from tests.support import classification, linear_regression, play, simulate, small_model

LOCAL = {"lr": 0.2, "local_epochs": 3, "batch_size": 0}


def of(problem: Quadratics, engine: str = "batched", name: str = "scaffold", **settings: Any) -> Simulation:
    return simulate(name, problem.samples(), linear_regression(6), settings=LOCAL | settings, engine=engine)


def three_of(clients: int) -> Any:
    return lambda number: torch.tensor(sorted(stream(4, "cohort", number).choice(clients, 3, replace=False).tolist()))


def by_hand(problem: Quadratics, rounds: int, cohort: Any, sign: float = 1.0, eta_g: float = 1.0) -> dict[str, Array]:
    """The equations on quadratics: three full-batch steps of 0.2 each; ``sign=-1`` is the well-known mistake."""
    m, n = problem.centres.shape
    x, c, own = np.zeros(n), np.zeros(n), np.zeros((m, n))
    for t in range(1, rounds + 1):
        online = cohort(t).tolist()
        y = np.tile(x, (m, 1))
        for _ in range(3):
            y = y - 0.2 * (problem.gradient(y) + sign * (c - own))
        new = own - c + (x - y) / (3 * 0.2)
        change = np.mean([new[i] - own[i] for i in online], axis=0)
        x = x + eta_g * np.mean([y[i] - x for i in online], axis=0)
        c = c + len(online) / m * change
        own[online] = new[online]
    return {"x": x, "c": c, "own": own}


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_fixed_point_is_the_global_optimum_of_two_quadratics(engine: str) -> None:
    problem = Quadratics.drawn(3, 2, unequal=False)
    optimum = problem.optimum()
    simulation = of(problem, engine)
    play(simulation, 80)
    np.testing.assert_allclose(simulation.server["w"].numpy(), optimum, rtol=0, atol=1e-9)
    # There, c_i is the client's own gradient, and their mean vanishes.
    own = simulation.clients.rows["c"].numpy()
    np.testing.assert_allclose(own, problem.gradient(optimum), rtol=0, atol=1e-8)
    np.testing.assert_allclose(simulation.server["c"].numpy(), 0, rtol=0, atol=1e-8)


def test_neither_fedavg_nor_the_reversed_sign_ends_there() -> None:
    problem = Quadratics.drawn(3, 2, unequal=False)
    average = of(problem, name="fedavg")
    play(average, 80)
    assert np.abs(average.server["w"].numpy() - problem.optimum()).max() > 1e-2
    reversed_sign = by_hand(problem, 80, lambda t: torch.arange(2), sign=-1.0)["x"]
    assert not np.abs(reversed_sign - problem.optimum()).max() < 1e-2
    right = by_hand(problem, 80, lambda t: torch.arange(2))["x"]
    np.testing.assert_allclose(right, problem.optimum(), rtol=0, atol=1e-9)


def test_fixed_point_is_the_global_optimum_under_partial_participation() -> None:
    problem = Quadratics.drawn(5, 5)
    simulation = of(problem)
    play(simulation, 150, three_of(5))
    np.testing.assert_allclose(simulation.server["w"].numpy(), problem.optimum(), rtol=0, atol=1e-6)


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("eta_g", [1.0, 0.7])
def test_rounds_are_those_of_the_equations(engine: str, eta_g: float) -> None:
    problem = Quadratics.drawn(6, 5)
    simulation = of(problem, engine, server_lr=eta_g)
    play(simulation, 7, three_of(5))
    expected = by_hand(problem, 7, three_of(5), eta_g=eta_g)
    np.testing.assert_allclose(simulation.server["w"].numpy(), expected["x"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(simulation.server["c"].numpy(), expected["c"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(simulation.clients.rows["c"].numpy(), expected["own"], rtol=0, atol=1e-12)


def test_c_is_always_the_mean_of_the_clients_control_variates() -> None:
    def lost(clients: Tensor, call: Call) -> Tensor:
        return clients == int(stream(2, "lost", call.round).integers(5))

    settings = {"lr": 0.1, "lr_decay": 0.9, "local_epochs": 2, "batch_size": 4, "weight_decay": 0.01}
    simulation = simulate("scaffold", classification(), small_model(), task="multiclass", settings=settings, lost=lost)
    for number in range(1, 9):
        simulation.play_round(three_of(5)(number), number)
        mean = simulation.clients.rows["c"].mean(0)
        torch.testing.assert_close(simulation.server["c"], mean, rtol=0, atol=1e-13)
    assert float(mean.abs().max()) > 1e-3


def test_first_round_from_zero_control_variates_is_fedavg() -> None:
    settings = {"lr": 0.1, "local_epochs": 2, "batch_size": 4}
    ends = []
    for name in ("scaffold", "fedavg"):
        # Equal sizes: SCAFFOLD's mean is not weighted.
        samples = classification(sizes=[9] * 5)
        simulation = simulate(name, samples, small_model(), task="multiclass", settings=settings)
        play(simulation, 1)
        ends.append((simulation.server["w"], simulation.clients.rows["w"]))
    for one, two in zip(*ends, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-14)


def test_one_full_step_makes_the_control_variate_the_gradient() -> None:
    problem = Quadratics.drawn(7, 3)
    simulation = of(problem, local_epochs=1)
    play(simulation, 4)
    before = simulation.server["w"].numpy()
    play(simulation, 1, first=5)
    np.testing.assert_allclose(simulation.clients.rows["c"].numpy(), problem.gradient(before), rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", [{"momentum": 0.5}, {"optimiser": "adam"}, {"lr": 0.0}])
def test_steps_that_are_not_plain_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        of(Quadratics.drawn(1, 2), **settings)
