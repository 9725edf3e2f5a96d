"""FedSGD is gradient descent on the pooled data."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from coterie.compute.engine import Call
from coterie.randomness import stream
from tests.oracles.quadratics import Quadratics
from tests.support import classification, everyone, linear_regression, play, samples_of, simulate, small_model


def three_of_five(number: int) -> Tensor:
    return torch.tensor(sorted(stream(8, "cohort", number).choice(5, size=3, replace=False).tolist()))


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_equals_centralised_gradient_descent_on_pooled_data(engine: str) -> None:
    # 600 samples are taken in three parts of 256, 256 and 88: their shares must add up to the client's mean.
    draw = stream(1, "regression")
    x, y = draw.normal(size=(640, 4)), draw.normal(size=640)
    cuts = (0, 7, 40, 640)
    parts = [(torch.from_numpy(x[a:b]), torch.from_numpy(y[a:b])) for a, b in pairwise(cuts)]
    settings = {"lr": 0.3, "lr_decay": 0.9}
    simulation = simulate("fedsgd", samples_of(parts), linear_regression(4), settings=settings, engine=engine)
    play(simulation, 6)
    w = np.zeros(4)
    for t in range(6):
        w = w - 0.3 * 0.9**t * x.T @ (x @ w - y) / 640
    np.testing.assert_allclose(simulation.server["w"].numpy(), w, rtol=0, atol=1e-13)


def test_equals_fedavg_with_one_epoch_of_one_batch() -> None:
    ends = []
    for name, settings in (("fedsgd", {"lr": 0.4}), ("fedavg", {"lr": 0.4, "local_epochs": 1, "batch_size": 0})):
        simulation = simulate(name, classification(), small_model(), task="multiclass", settings=settings)
        play(simulation, 5, three_of_five)
        ends.append(simulation.server["w"])
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-13)


def test_shares_are_of_those_that_replied() -> None:
    problem = Quadratics.drawn(2, 4)

    def lost(clients: Tensor, call: Call) -> Tensor:
        return clients == 1

    simulation = simulate("fedsgd", problem.samples(), linear_regression(6), settings={"lr": 0.2}, lost=lost)
    play(simulation, 1)
    kept = np.array([0, 2, 3])
    p = problem.sizes[kept] / problem.sizes[kept].sum()
    expected = -0.2 * p @ problem.gradient(np.zeros(6))[kept]
    np.testing.assert_allclose(simulation.server["w"].numpy(), expected, rtol=0, atol=1e-13)


def test_every_client_is_evaluated_with_the_global_model() -> None:
    simulation = simulate("fedsgd", classification(), small_model(), task="multiclass")
    play(simulation, 1, three_of_five)
    assert not simulation.algorithm.has_personal
    rows = simulation.personal(everyone(simulation), 1)["w"]
    assert torch.equal(rows, simulation.server["w"].expand(5, -1))
    assert not simulation.clients.rows  # clients remember nothing
