"""The accuracy matrix against a double loop over plain modules."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from coterie.algorithms.base import Net
from coterie.compute.nets.row_net import ModuleNet
from coterie.data.partitions import Ragged
from coterie.errors import PartitionError
from coterie.evaluation import g_acc, l_acc, s_acc
from coterie.rows import Rows
from coterie.simulation import accuracy_matrix as crossing
from coterie.simulation.accuracy_matrix import AccuracyMatrixScorer, cross
from coterie.simulation.simulation import Simulation
from tests.support import classification, everyone, linear_regression, play, samples_of, simulate, small_model

LOCAL = {"lr": 0.1, "local_epochs": 2, "batch_size": 4}


def samples_to_test_on(simulation: Simulation) -> list[Tensor]:
    """The test samples of each client, all of them."""
    test = simulation.engine.samples.splits["test"]
    return [test[client] for client in range(len(test))]


def by_hand(simulation: Simulation, rows: Tensor, regression: bool = False) -> Tensor:
    """The double loop, one plain module at a time."""
    samples, index = simulation.engine.samples, samples_to_test_on(simulation)
    out = torch.zeros(len(rows), len(index), dtype=torch.float64)
    for i, row in enumerate(rows):
        module: nn.Module = copy.deepcopy(simulation.engine.problem.module)
        nn.utils.vector_to_parameters(row, module.parameters())
        for k, mine in enumerate(index):
            outputs, targets = module.eval()(samples.x[mine]).detach(), samples.y[mine]
            if regression:
                out[i, k] = math.sqrt(float((outputs[:, 0] - targets).square().mean()))
            else:
                out[i, k] = (outputs.argmax(1) == targets).double().mean()
    return out


def trained(name: str, engine: str, rounds: int = 2, **more: Any) -> Simulation:
    simulation = simulate(
        name, classification(), small_model(), task="multiclass", engine=engine, settings=LOCAL | more
    )
    play(simulation, rounds)
    return simulation


@pytest.mark.parametrize("elements", [1, 50, 2**22])
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_every_model_on_every_clients_samples(engine: str, elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossing, "_BLOCK_ELEMENTS", elements)
    simulation = trained("fedavg", engine)
    found = AccuracyMatrixScorer(simulation, everyone(simulation), everyone(simulation)).measure(2)
    assert found.metric == "accuracy" and found.samples == 5 * 6 and found.values.dtype == torch.float64
    wanted = by_hand(simulation, simulation.clients.rows["w"])
    torch.testing.assert_close(found.values, wanted, rtol=0, atol=1e-15)
    assert len(wanted.unique()) > 3 and not torch.equal(wanted, wanted.T)
    assert found.global_values is not None
    shared = by_hand(simulation, simulation.server["w"].unsqueeze(0))[0]
    torch.testing.assert_close(found.global_values, shared, rtol=0, atol=1e-15)


@pytest.mark.parametrize("name", ["fedavg_ft", "fedrep", "splitgp", "fedacs"])
def test_any_methods_predict_and_both_engines(name: str) -> None:
    scores = []
    for engine in ("loop", "batched"):
        simulation = trained(name, engine, 1)
        found = AccuracyMatrixScorer(simulation, everyone(simulation), everyone(simulation)).measure(1)
        personal = simulation.personal(everyone(simulation), 1)
        problem, samples = simulation.engine.problem, simulation.engine.samples
        net = ModuleNet(copy.deepcopy(problem.module), problem.layout)
        wanted = torch.zeros(5, 5, dtype=torch.float64)
        for i in range(5):
            one = {key: value[i : i + 1] for key, value in personal.items()}
            for k, mine in enumerate(samples_to_test_on(simulation)):
                with torch.no_grad():
                    outputs = simulation.algorithm.predict(net, one, samples.x[mine].unsqueeze(0))[0]
                wanted[i, k] = (outputs.argmax(1) == samples.y[mine]).double().mean()
        torch.testing.assert_close(found.values, wanted, rtol=0, atol=1e-15)
        assert (found.global_values is not None) is simulation.algorithm.has_global
        scores.append(found.values)
    torch.testing.assert_close(*scores, rtol=0, atol=1e-15)


def test_regression_is_measured_by_its_error() -> None:
    train = [(torch.linspace(-1, 1, 5).unsqueeze(1), torch.linspace(-1, 1, 5) * slope) for slope in (1.0, 2.0, -3.0)]
    simulation = simulate("local", samples_of(train), linear_regression(1), settings=LOCAL)
    play(simulation, 3)
    found = AccuracyMatrixScorer(simulation, everyone(simulation), everyone(simulation)).measure(3)
    wanted = by_hand(simulation, simulation.clients.rows["w"], regression=True)
    assert found.metric == "rmse" and found.global_values is None
    torch.testing.assert_close(found.values, wanted, rtol=1e-12, atol=1e-12)


def test_what_is_in_memory_at_once_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crossing, "_BLOCK_ELEMENTS", 40)
    simulation = trained("local", "batched")
    seen: list[int] = []

    def predict(net: Net, rows: Rows, x: Tensor) -> Tensor:
        seen.append(x.numel())
        return simulation.algorithm.predict(net, rows, x)

    index = Ragged.of(samples_to_test_on(simulation))
    cross(simulation.engine, predict, simulation.clients.rows, index, "accuracy")
    # 6 numbers a sample and 5 models: one sample at a time for all of them, and nothing larger.
    assert max(seen) <= 40 and len(seen) == 5 * 6


def unequal(simulate_with: str, sizes: list[int]) -> Simulation:
    """A federation whose clients have these many test samples."""
    samples = classification()
    flat = samples.splits["test"]
    samples.splits["test"] = type(flat).of([flat[client][:size] for client, size in enumerate(sizes)])
    simulation = simulate(simulate_with, samples, small_model(), task="multiclass", settings=LOCAL)
    play(simulation, 1)
    return simulation


@pytest.mark.parametrize("elements", [1, 5 * 6 * 3, 5 * 6 * 7, 2**22])
def test_all_samples_count_and_clients_of_different_sizes_count_the_same(
    elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever clients share a block: one model and sample at a time, 3 or 7 samples of all models, everything."""
    monkeypatch.setattr(crossing, "_BLOCK_ELEMENTS", elements)
    simulation = unequal("fedavg", [6, 1, 4, 2, 5])
    found = AccuracyMatrixScorer(simulation, everyone(simulation), everyone(simulation)).measure(1)
    assert found.samples == 18
    wanted = by_hand(simulation, simulation.clients.rows["w"])
    torch.testing.assert_close(found.values, wanted, rtol=0, atol=1e-15)
    # Accuracies in sixths, quarters and fifths: nothing was cut to the one sample of the smallest client.
    for client, size in enumerate([6, 1, 4, 2, 5]):
        counts = found.values[:, client] * size
        torch.testing.assert_close(counts, counts.round(), rtol=0, atol=1e-12)
    assert bool(((found.values > 0) & (found.values < 1)).any())
    torch.testing.assert_close(g_acc(found.values), wanted.mean(1), rtol=0, atol=1e-15)


def test_l_acc_and_g_acc_by_hand() -> None:
    """Two models that always answer one class, and clients of 1 and 4 samples: clients count the same.

    Client 0 holds one sample of class 0; client 1 three of class 0 and one of class 1. The model that answers 0 is
    right on 1/1 and 3/4, the one that answers 1 on 0/1 and 1/4. G-acc is the mean of two accuracies, 7/8 and 1/8;
    pooled over samples it would be 4/5 and 1/5, cut to one sample each 1 or 1/2.
    """
    x = torch.zeros(5, 2, dtype=torch.float64)
    y = torch.tensor([0, 0, 0, 0, 1])
    simulation = simulate("local", samples_of([(x[:1], y[:1]), (x[1:], y[1:])]), nn.Linear(2, 2), task="multiclass")
    answers = torch.zeros(2, 6, dtype=torch.float64)
    answers[0, 4], answers[1, 5] = 1.0, 1.0  # the biases, behind four weights
    simulation.clients.rows["w"] = answers
    found = AccuracyMatrixScorer(simulation, everyone(simulation), everyone(simulation)).measure(0)
    assert found.values.tolist() == [[1.0, 0.75], [0.0, 0.25]] and found.samples == 5
    assert l_acc(found.values).tolist() == [1.0, 0.25]
    assert g_acc(found.values).tolist() == [0.875, 0.125]
    assert s_acc(found.values, 1.0, 3).tolist() == [0.875, 0.125]


def test_some_of_the_clients() -> None:
    simulation = trained("fedavg", "batched")
    some = torch.tensor([1, 3, 4])
    found = AccuracyMatrixScorer(simulation, everyone(simulation), some).measure(2)
    whole = AccuracyMatrixScorer(simulation, everyone(simulation), everyone(simulation)).measure(2)
    assert found.clients.tolist() == [1, 3, 4]
    # All samples of a client count, so leaving others out changes nothing of what is left.
    assert torch.equal(found.values, whole.values[some][:, some])
    assert found.global_values is not None and whole.global_values is not None
    assert torch.equal(found.global_values, whole.global_values[some])


def test_everything_stays_as_it_was() -> None:
    simulation = trained("fedavg_ft", "batched")
    before = {name: value.clone() for name, value in simulation.clients.rows.items()}, simulation.server["w"].clone()
    AccuracyMatrixScorer(simulation, everyone(simulation), everyone(simulation)).measure(2)
    assert all(torch.equal(value, simulation.clients.rows[name]) for name, value in before[0].items())
    assert torch.equal(before[1], simulation.server["w"]) and simulation.round == 2


def test_a_client_without_samples_to_test_on_is_refused() -> None:
    samples = classification()
    flat = samples.splits["test"]
    samples.splits["test"] = type(flat).of([flat[client][: client * 2] for client in range(5)])
    simulation = simulate("local", samples, small_model(), task="multiclass", settings=LOCAL)
    with pytest.raises(PartitionError, match="client 0 has no test sample"):
        AccuracyMatrixScorer(simulation, everyone(simulation), everyone(simulation))
