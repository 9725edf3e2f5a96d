"""Local: every client alone, on its own samples, with nothing sent."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from coterie.simulation.simulation import Simulation
from tests.oracles.regression import Recorder, gradient, points, quadratics, regress, row, some
from tests.support import classification, everyone, play, samples_of, simulate, small_model

LOCAL = {"lr": 0.1, "batch_size": 4, "local_epochs": 2}


@pytest.mark.parametrize("extra", [{}, {"momentum": 0.5, "lr_decay": 0.7, "weight_decay": 0.1}])
def test_equals_a_replay_in_numpy(extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    clients, sizes, lr = 5, [6, 7, 9, 10, 12], 0.05
    recorder = Recorder(monkeypatch)
    simulation = regress(
        "local",
        quadratics(points(clients), [1.0, 2.0, 0.5, 1.0, 3.0], sizes),
        {"lr": lr, "batch_size": 4, "local_epochs": 2} | extra,
        engine="loop",
    )
    v = np.zeros((clients, 3))
    for number in range(1, 4):
        online = some(clients, 3, number)
        simulation.play_round(online, number)
        seen = recorder.take()
        assert sorted(seen) == online.tolist()  # only those that are online train
        for i, batches in seen.items():
            assert len(batches) == 2 * -(-sizes[i] // 4)
            velocity, rate = np.zeros(3), lr * extra.get("lr_decay", 1.0) ** (number - 1)
            for batch in batches:
                total = gradient(v[i], batch) + extra.get("weight_decay", 0.0) * v[i]
                velocity = extra.get("momentum", 0.0) * velocity + total
                v[i] = v[i] - rate * velocity
        np.testing.assert_allclose(row(simulation.clients.rows["w"]), v, rtol=0, atol=1e-13)


def test_goes_to_each_clients_own_optimum() -> None:
    best = points(4)
    simulation = regress(
        "local", quadratics(best, [1.0, 2.0, 0.5, 1.5]), {"lr": 0.5, "batch_size": 0, "local_epochs": 10}
    )
    play(simulation, 20)
    np.testing.assert_allclose(row(simulation.clients.rows["w"]), best, rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_equals_fedavg_with_one_client(engine: str) -> None:
    def alone(name: str) -> Simulation:
        samples = classification(1, sizes=[11])
        simulation = simulate(name, samples, small_model(), task="multiclass", settings=LOCAL, engine=engine)
        play(simulation, 3)
        return simulation

    local, fedavg = alone("local"), alone("fedavg")
    assert torch.equal(local.clients.rows["w"][0], fedavg.server["w"])
    assert torch.equal(local.clients.rows["w"], fedavg.clients.rows["w"])


def test_is_unaffected_by_the_others_data() -> None:
    """Neither by what the others have, nor by how much, nor by whether they take part."""
    draw = torch.linspace(-1, 1, 20 * 3, dtype=torch.float64).view(20, 3)
    mine = (draw.sin()[:9], draw.cos()[:9].sum(1))

    def played(others: list[int], scale: float, online: list[int]) -> torch.Tensor:
        parts = [mine, *((scale * draw[:count], draw[:count].sum(1)) for count in others)]
        simulation = regress("local", samples_of(parts), LOCAL, engine="loop")
        for number in (1, 2, 3):
            simulation.play_round(torch.tensor(online), number)
        return simulation.clients.rows["w"][0]

    first = played([5, 7], 1.0, [0, 1, 2])
    assert float(first.abs().max()) > 0.01
    for other in (played([5, 7], -2.0, [0, 1, 2]), played([20, 3], 0.5, [0, 1, 2]), played([5, 7, 8], 1.0, [0, 3])):
        assert torch.equal(first, other)


def test_sends_nothing_and_has_a_personal_model_only() -> None:
    simulation = simulate("local", classification(), small_model(), task="multiclass", settings=LOCAL)
    play(simulation, 2)
    assert (simulation.traffic.down, simulation.traffic.up) == (0, 0)
    assert not simulation.server
    assert simulation.algorithm.has_personal and not simulation.algorithm.has_global
    assert simulation.algorithm.global_model(simulation.server) is None
    assert torch.equal(simulation.personal(everyone(simulation), 2)["w"], simulation.clients.rows["w"])
