"""FedMGDA+: between normalised FedAvg and multiple gradient descent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.algorithms.base import Weights
from coterie.compute.engine import Call
from coterie.simulation.simulation import Simulation
from tests.oracles.quadratics import Array, Quadratics, shortest
from tests.support import everyone, linear_regression, play, simulate

LOCAL = {"lr": 0.1, "local_epochs": 2, "batch_size": 0}


def of(problem: Quadratics, **settings: Any) -> Simulation:
    return simulate("fedmgda", problem.samples(), linear_regression(6), settings=LOCAL | settings)


def updates(problem: Quadratics, w: Array, steps: int = 2) -> Array:
    """``D_i = w − w_i`` after full-batch steps of 0.1."""
    own = np.tile(w, (problem.clients, 1))
    for _ in range(steps):
        own = own - 0.1 * problem.gradient(own)
    return w - own


def directions(problem: Quadratics, w: Array) -> Array:
    found = updates(problem, w)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def weights_of(simulation: Simulation, number: int = 1) -> Array:
    info = simulation.play_round(everyone(simulation), number)
    weights = info["weights"]
    assert isinstance(weights, Weights)
    rows = weights.values.numpy()
    assert (rows == rows[0]).all()
    return np.asarray(rows[0])


def test_eps_zero_is_fedavg_on_normalised_updates() -> None:
    problem = Quadratics.drawn(1, 5)
    simulation = of(problem, eps=0.0, server_lr=0.3, server_lr_decay=0.8)
    play(simulation, 4)
    w, p = np.zeros(6), problem.sizes / problem.sizes.sum()
    for t in range(4):
        w = w - 0.3 * 0.8**t * p @ directions(problem, w)
    np.testing.assert_allclose(simulation.server["w"].numpy(), w, rtol=0, atol=1e-12)


def test_eps_one_is_multiple_gradient_descent() -> None:
    problem = Quadratics.drawn(2, 5, spread=3.0)
    simulation = of(problem, eps=1.0, server_lr=0.2)
    w = np.zeros(6)
    for number in range(1, 5):
        lam = weights_of(simulation, number)
        z = directions(problem, w)
        np.testing.assert_allclose(lam, shortest(z), rtol=0, atol=1e-9)
        w = w - 0.2 * shortest(z) @ z
        np.testing.assert_allclose(simulation.server["w"].numpy(), w, rtol=0, atol=1e-10)


def test_two_clients_of_equal_size_are_halved_at_any_eps() -> None:
    # Unit vectors: the middle is the shortest point of the segment between them.
    problem = Quadratics.drawn(3, 2, unequal=False)
    for eps in (0.0, 0.3, 1.0):
        np.testing.assert_allclose(weights_of(of(problem, eps=eps)), [0.5, 0.5], rtol=0, atol=1e-12)


@given(seed=st.integers(0, 10_000), eps=st.floats(0, 1), clients=st.integers(2, 6))
@settings(max_examples=15, deadline=None)
def test_weights_lie_in_the_box_on_the_simplex_and_satisfy_kkt(seed: int, eps: float, clients: int) -> None:
    problem = Quadratics.drawn(seed, clients, spread=3.0)
    lam = weights_of(of(problem, eps=eps))
    centre = problem.sizes / problem.sizes.sum()
    assert lam.sum() == pytest.approx(1.0, abs=1e-12)
    low, high = np.maximum(centre - eps, 0), np.minimum(centre + eps, 1)
    assert (lam >= low - 1e-12).all()
    assert (lam <= high + 1e-12).all()
    # KKT: weight that may still be taken from a has no larger slope than what may be given to b.
    z = directions(problem, np.zeros(6))
    slope = z @ (lam @ z)
    falling, rising = slope[lam > low + 1e-9], slope[lam < high - 1e-9]
    if len(falling) and len(rising):
        assert falling.max() <= rising.min() + 1e-9


def test_only_eps_one_serves_every_client() -> None:
    # The small client's optimum lies the other way along the first axis, but along the others they agree.
    problem = Quadratics(
        np.tile(np.eye(6), (3, 1, 1)),
        np.array([[4.0, 1, 0, 0, 0, 0], [4.0, 0, 1, 0, 0, 0], [-4.0, 1, 1, 0, 0, 0]]),
        np.full(3, 0.1),
        (5, 5, 1),
    )
    start = problem.loss(np.zeros(6))
    worst = {}
    for eps in (0.0, 1.0):
        simulation = of(problem, eps=eps, server_lr=0.01)
        play(simulation, 1)
        worst[eps] = float((problem.loss(simulation.server["w"].numpy()) - start).max())
    assert worst[1.0] < 0
    assert worst[0.0] > 0


def test_scaling_a_clients_loss_changes_nothing() -> None:
    # With one full step D_i is a multiple of the gradient, whose length normalising forgets.
    problem = Quadratics.drawn(4, 4, spread=3.0)
    scaled = Quadratics(
        problem.curvatures * np.array([1, 1, 50, 1])[:, None, None], problem.centres, problem.offsets, problem.repeats
    )
    ends = []
    for one in (problem, scaled):
        simulation = of(one, local_epochs=1, lr=1e-3)
        play(simulation, 1)
        ends.append(simulation.server["w"].numpy())
    np.testing.assert_allclose(ends[0], ends[1], rtol=0, atol=1e-10)


def test_a_client_that_does_not_move_is_left_out() -> None:
    problem = Quadratics.drawn(5, 4)
    centres = problem.centres.copy()
    centres[2] = 0.0  # it starts at its optimum
    still = Quadratics(problem.curvatures, centres, problem.offsets, problem.repeats)
    simulation = of(still, eps=0.0)
    kept = [0, 1, 3]
    info = simulation.play_round(everyone(simulation), 1)
    weights = info["weights"]
    assert isinstance(weights, Weights)
    assert weights.columns.tolist() == kept
    p = still.sizes[kept] / still.sizes[kept].sum()
    found = updates(still, np.zeros(6))[kept]
    expected = -p @ (found / np.linalg.norm(found, axis=1, keepdims=True))
    np.testing.assert_allclose(simulation.server["w"].numpy(), expected, rtol=0, atol=1e-12)


def test_nobody_moving_leaves_the_model() -> None:
    simulation = of(Quadratics.drawn(6, 3), lr=0.0)
    play(simulation, 1)
    assert not simulation.server["w"].any()


def test_shares_are_of_those_that_replied_and_personal_models_are_the_local_ones() -> None:
    problem = Quadratics.drawn(7, 4)

    def lost(clients: Tensor, call: Call) -> Tensor:
        return clients == 0

    simulation = simulate("fedmgda", problem.samples(), linear_regression(6), settings=LOCAL | {"eps": 0.0}, lost=lost)
    play(simulation, 1)
    p = problem.sizes[1:] / problem.sizes[1:].sum()
    expected = -p @ directions(problem, np.zeros(6))[1:]
    np.testing.assert_allclose(simulation.server["w"].numpy(), expected, rtol=0, atol=1e-12)
    personal = simulation.personal(everyone(simulation), 1)["w"]
    np.testing.assert_allclose(personal[1:].numpy(), -updates(problem, np.zeros(6))[1:], rtol=0, atol=1e-12)
    assert torch.equal(personal[0], torch.zeros(6, dtype=torch.float64))
