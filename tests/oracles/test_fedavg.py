"""FedAvg and FedAvg-FT: the size-weighted mean of locally trained copies, and that mean fine-tuned."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from coterie.simulation.simulation import Simulation
from tests.oracles.regression import Array, Recorder, gradient, points, quadratics, regress, row, some
from tests.support import classification, everyone, play, samples_of, simulate, small_model

LOCAL = {"lr": 0.1, "batch_size": 4, "local_epochs": 2}
SIZES = [6, 7, 9, 10, 12]
CURVATURES = [1.0, 2.0, 0.5, 1.0, 1.5]


def sgd(start: Array, batches: list[tuple[Array, Array]], lr: float, momentum: float = 0.0) -> Array:
    w, velocity = start.copy(), np.zeros_like(start)
    for batch in batches:
        velocity = momentum * velocity + gradient(w, batch)
        w = w - lr * velocity
    return w


def classify(name: str, settings: dict[str, Any], rounds: int = 3, **options: Any) -> Simulation:
    simulation = simulate(name, classification(), small_model(), task="multiclass", settings=settings, **options)
    play(simulation, rounds, lambda number: some(5, 3, number))
    return simulation


@pytest.mark.parametrize("extra", [{}, {"momentum": 0.5, "lr_decay": 0.7}])
def test_equals_a_replay_in_numpy(extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of five clients a round, one of which may not answer: p is over those that did, each round."""
    recorder = Recorder(monkeypatch)
    simulation = regress(
        "fedavg",
        quadratics(points(5), CURVATURES, SIZES),
        {"lr": 0.05, "batch_size": 4, "local_epochs": 2} | extra,
        engine="loop",
        lost=lambda asked, call: asked == call.round % 5,
    )
    w, own, seen = np.zeros(3), np.zeros((5, 3)), set()
    for number in range(1, 6):
        simulation.play_round(some(5, 4, number), number)
        batches = recorder.take()
        seen.add(tuple(sorted(batches)))
        for i, mine in batches.items():
            assert len(mine) == 2 * -(-SIZES[i] // 4)
            rate = 0.05 * extra.get("lr_decay", 1.0) ** (number - 1)
            own[i] = sgd(w, mine, rate, extra.get("momentum", 0.0))
        p = np.array([SIZES[i] for i in batches], dtype=np.float64)
        p /= p.sum()
        w = np.asarray(p @ own[list(batches)])
        np.testing.assert_allclose(row(simulation.server["w"]), w, rtol=0, atol=1e-13)
        # A client's personal model is its copy before the server's mean, from its last participation.
        np.testing.assert_allclose(row(simulation.clients.rows["w"]), own, rtol=0, atol=1e-13)
        personal = simulation.personal(everyone(simulation), number)["w"]
        np.testing.assert_allclose(row(personal), own, rtol=0, atol=1e-13)
    assert len(seen) > 2  # the weights did change from round to round


def test_p_is_recomputed_each_round_over_those_that_replied() -> None:
    """With lr = 1/b one full-batch step ends at the client's optimum, so that w is the mean with weights p."""
    best = points(5)
    simulation = regress(
        "fedavg",
        quadratics(best, [2.0] * 5, SIZES),
        {"lr": 0.5, "batch_size": 0, "local_epochs": 1},
        lost=lambda asked, call: (asked == 4) & (call.round == 3),
    )
    for number, (asked, answered) in enumerate([([0, 1], [0, 1]), ([2, 3, 4],) * 2, ([1, 3, 4], [1, 3])], start=1):
        simulation.play_round(torch.tensor(asked), number)
        p = np.array([SIZES[i] for i in answered]) / sum(SIZES[i] for i in answered)
        np.testing.assert_allclose(row(simulation.server["w"]), p @ best[answered], rtol=0, atol=1e-13)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_identical_data_and_batches_make_all_models_equal(engine: str) -> None:
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(8, 3).sin()
    samples = samples_of([(x, x.sum(1).cos())] * 4)
    simulation = regress("fedavg", samples, {"lr": 0.2, "batch_size": 0, "local_epochs": 3}, engine=engine)
    for number in (1, 2):
        simulation.play_round(everyone(simulation), number)
        rows = simulation.clients.rows["w"]
        torch.testing.assert_close(rows, rows[:1].expand(4, -1), rtol=0, atol=1e-15)
        torch.testing.assert_close(simulation.server["w"], rows[0], rtol=0, atol=1e-15)
    assert float(simulation.server["w"].abs().max()) > 0.01


def test_one_full_batch_step_is_gradient_descent_on_the_pooled_data() -> None:
    samples = quadratics(points(5), CURVATURES, SIZES)
    simulation = regress("fedavg", samples, {"lr": 0.1, "batch_size": 0, "local_epochs": 1})
    pooled = torch.cat([samples.splits["train"][i] for i in range(5)])
    x, y, w = samples.x[pooled].numpy(), samples.y[pooled].numpy(), np.zeros(3)
    for number in range(1, 6):
        simulation.play_round(everyone(simulation), number)
        w = w - 0.1 * gradient(w, (x, y))
        np.testing.assert_allclose(row(simulation.server["w"]), w, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["fedavg", "fedavg_ft"])
def test_bytes_are_one_model_each_way_and_evaluation_sends_nothing(name: str) -> None:
    simulation = simulate(name, classification(), small_model(), task="multiclass", settings=LOCAL)
    n = simulation.engine.net.layout.size
    for number in (1, 2):
        simulation.play_round(torch.tensor([0, 2, 3]), number)
        simulation.personal(everyone(simulation), number)
    assert (simulation.traffic.down, simulation.traffic.up) == (2 * 3 * 8 * n,) * 2


def test_a_round_to_which_nobody_replies_changes_nothing() -> None:
    simulation = classify("fedavg", LOCAL, rounds=1, lost=lambda asked, call: asked > (4 if call.round == 1 else -1))
    before, rows = simulation.server["w"].clone(), simulation.clients.rows["w"].clone()
    simulation.play_round(everyone(simulation), 2)
    assert torch.equal(simulation.server["w"], before)
    assert torch.equal(simulation.clients.rows["w"], rows)


@pytest.mark.parametrize("fine_tune_epochs", [0, 1, None])
def test_fine_tuning_leaves_fedavgs_global_model_as_it_is(fine_tune_epochs: int | None) -> None:
    plain = classify("fedavg", LOCAL)
    tuned = classify("fedavg_ft", LOCAL | {"fine_tune_epochs": fine_tune_epochs})
    tuned.personal(everyone(tuned), 3)
    assert torch.equal(plain.server["w"], tuned.server["w"])


def test_no_fine_tuning_is_fedavgs_global_model() -> None:
    tuned = classify("fedavg_ft", LOCAL | {"fine_tune_epochs": 0})
    personal = tuned.personal(everyone(tuned), 3)["w"]
    assert torch.equal(personal, classify("fedavg", LOCAL).server["w"].expand(5, -1))


@pytest.mark.parametrize("fine_tune_epochs", [1, 3, None])
def test_fine_tuning_equals_a_replay_in_numpy(fine_tune_epochs: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(monkeypatch)
    simulation = regress(
        "fedavg_ft",
        quadratics(points(5), CURVATURES, SIZES),
        {"lr": 0.05, "batch_size": 4, "local_epochs": 2, "fine_tune_epochs": fine_tune_epochs},
        engine="loop",
    )
    simulation.play_round(some(5, 3, 1), 1)
    trained = recorder.take()
    w = row(simulation.server["w"])
    personal = row(simulation.personal(everyone(simulation), 1)["w"])
    tuned = recorder.take()
    for i in range(5):  # those too that did not take part
        assert len(tuned[i]) == (fine_tune_epochs or 2) * -(-SIZES[i] // 4)
        np.testing.assert_allclose(personal[i], sgd(w, tuned[i], 0.05), rtol=0, atol=1e-13)
    # Fine-tuning draws shuffles of its own.
    i = min(trained)
    assert not np.array_equal(trained[i][0][0], tuned[i][0][0])


def test_fine_tuning_changes_the_model() -> None:
    tuned = classify("fedavg_ft", LOCAL)
    personal = tuned.personal(everyone(tuned), 3)["w"]
    assert float((personal - tuned.server["w"]).abs().amax(1).min()) > 1e-3
