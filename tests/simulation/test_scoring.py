"""Scores against an evaluation by hand with plain modules."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.algorithms import registry
from coterie.data.partitions import Ragged
from coterie.rows import Rows
from coterie.simulation.scoring import Score, Scorer
from coterie.simulation.simulation import Simulation
from tests.conformance_table import TABLE
from tests.support import classification, everyone, linear_regression, play, samples_of, simulate, small_model

LOCAL = {"lr": 0.1, "local_epochs": 2, "batch_size": 4}


def scores_of(
    simulation: Simulation, rounds: int, newcomers: tuple[int, ...] = (), **more: Any
) -> dict[tuple[str, ...], Score]:
    away = torch.tensor(newcomers, dtype=torch.int64)
    trainers = torch.tensor([client for client in everyone(simulation).tolist() if client not in newcomers])
    found = Scorer(simulation, trainers, away, **more).scores(rounds)
    assert len({(score.model, score.split, score.metric) for score in found}) == len(found)
    return {(score.model, score.split, score.metric): score for score in found}


def by_hand(simulation: Simulation, row: Tensor, client: int, split: str) -> tuple[float, float]:
    """Loss and accuracy of one model on one client's samples, by a plain module."""
    module: nn.Module = copy.deepcopy(simulation.engine.problem.module)
    nn.utils.vector_to_parameters(row, module.parameters())
    samples = simulation.engine.samples
    index = samples.splits[split][client]  # type: ignore[index]
    outputs, targets = module.eval()(samples.x[index]).detach(), samples.y[index]
    correct = (outputs.argmax(1) == targets).double().mean()
    return float(F.cross_entropy(outputs, targets)), float(correct)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_personal_and_global_on_every_clients_own_samples(engine: str) -> None:
    simulation = simulate("fedavg", classification(), small_model(), task="multiclass", engine=engine, settings=LOCAL)
    play(simulation, 2, lambda number: torch.tensor([0, 2, 3] if number == 1 else [1, 2, 4]))
    scores = scores_of(simulation, 2, splits=("train", "validation", "test"))
    rows = {"personal": simulation.clients.rows["w"], "global": simulation.server["w"].expand(5, -1)}
    assert len(scores) == 2 * 3 * 2
    for (model, split, metric), score in scores.items():
        assert score.clients.tolist() == [0, 1, 2, 3, 4] and score.values.dtype == torch.float64
        wanted = [by_hand(simulation, rows[model][client], client, split)[metric == "accuracy"] for client in range(5)]
        assert score.values.tolist() == pytest.approx(wanted, abs=1e-12)


def test_fine_tuned_models_are_scored_and_everything_stays() -> None:
    simulation = simulate("fedavg_ft", classification(), small_model(), task="multiclass", settings=LOCAL)
    play(simulation, 2)
    before = {name: value.clone() for name, value in simulation.clients.rows.items()}, simulation.server["w"].clone()
    traffic = (simulation.traffic.down, simulation.traffic.up)
    scores = scores_of(simulation, 2)
    personal = simulation.personal(everyone(simulation), 2)["w"]
    wanted = [by_hand(simulation, personal[client], client, "test")[0] for client in range(5)]
    assert scores["personal", "test", "loss"].values.tolist() == pytest.approx(wanted, abs=1e-12)
    assert wanted != pytest.approx(scores["global", "test", "loss"].values.tolist())
    assert all(torch.equal(value, simulation.clients.rows[name]) for name, value in before[0].items())
    assert torch.equal(before[1], simulation.server["w"])
    assert traffic == (simulation.traffic.down, simulation.traffic.up)


@pytest.mark.parametrize("name", ["fedamp", "fedavg_ft", "flame", "apfl"])
def test_many_clients_are_scored_in_blocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = classification(300, sizes=[4 + client % 3 for client in range(300)])
    # The second block of 128 has nothing to validate on.
    ragged = samples.splits["validation"]
    samples.splits["validation"] = Ragged.of([ragged[c][: 0 if 128 <= c < 256 else None].cpu() for c in range(300)])
    simulation = simulate(name, samples, small_model(), task="multiclass", settings=LOCAL)
    play(simulation, 2, lambda number: torch.arange(number, 300, 40))
    at_once = scores_of(simulation, 2)
    sizes: list[int] = []
    monkeypatch.setattr("coterie.simulation.simulation._BLOCK_ELEMENTS", 1)  # then there are at least 128 in a block
    personal = simulation.personal

    def noted(clients: torch.Tensor, number: int, briefly: bool = False) -> Rows:
        sizes.append(len(clients))
        return personal(clients, number, briefly)

    monkeypatch.setattr(simulation, "personal", noted)
    in_blocks = scores_of(simulation, 2)
    assert sizes == [128, 128, 44] and list(in_blocks) == list(at_once)
    for key, score in in_blocks.items():
        assert torch.equal(score.clients, at_once[key].clients)
        torch.testing.assert_close(score.values, at_once[key].values, rtol=0, atol=1e-12, equal_nan=True)
    assert int(in_blocks["personal", "validation", "loss"].values.isnan().sum()) == 128


@pytest.mark.parametrize("name", TABLE)
def test_models_that_are_read_where_they_lie_are_those_that_are_copied(name: str) -> None:
    simulation = simulate(name, classification(), small_model(), task="multiclass", settings=TABLE[name].settings)
    play(simulation, 2)

    def state() -> Rows:
        return {
            f"{owner} {key}": value.clone()
            for owner, rows in (("server", simulation.server), ("clients", simulation.clients.rows))
            for key, value in rows.items()
        }

    before = state()
    clients = everyone(simulation)
    copied, read = simulation.personal(clients, 2), simulation.personal(clients, 2, briefly=True)
    assert list(copied) == list(read)
    for key, value in copied.items():
        assert torch.equal(value, read[key])
    scores_of(simulation, 2)
    for key, value in state().items():
        assert torch.equal(value, before[key])


def test_models_that_depend_on_who_is_evaluated_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.simulation.simulation._BLOCK_ELEMENTS", 1)
    for fresh in (False, True):
        simulation = simulate("fedpg", classification(), small_model(), task="multiclass", settings={"fresh": fresh})
        many = torch.arange(300)
        assert [len(block) for block in simulation.blocks(many)] == ([300] if fresh else [128, 128, 44])


def test_hybrid_takes_the_better_of_two() -> None:
    simulation = simulate("flame", classification(), small_model(), task="multiclass", settings=LOCAL)
    play(simulation, 3)
    simulation.clients.rows["theta"][[0, 3]] *= -1  # so that some personal models are the worse ones
    scores = scores_of(simulation, 3, newcomers=(1,))
    kept = scores["global", "test", "accuracy"].clients != 1

    def both(split: str, metric: str) -> tuple[list[float], list[float]]:
        return (
            scores["personal", split, metric].values.tolist(),
            scores["global", split, metric].values[kept].tolist(),
        )

    by_test = [own >= shared for own, shared in zip(*both("test", "accuracy"), strict=True)]
    by_validation = [
        (own, -own_loss) >= (shared, -shared_loss)
        for own, shared, own_loss, shared_loss in zip(
            *both("validation", "accuracy"), *both("validation", "loss"), strict=True
        )
    ]
    assert len(set(by_test)) == 2, "the case is worth nothing unless clients differ"
    for name, use_personal in (("hybrid_oracle", by_test), ("hybrid", by_validation)):
        for split, metric in (("test", "accuracy"), ("test", "loss"), ("validation", "accuracy")):
            wanted = [
                own if personal else shared
                for personal, own, shared in zip(use_personal, *both(split, metric), strict=True)
            ]
            score = scores[name, split, metric]
            assert score.values.tolist() == wanted and score.clients.tolist() == [0, 2, 3, 4]


def test_hybrid_where_less_is_better() -> None:
    # Targets 0 for all but client 1, whose are 9: what is shared is worse than each client's own.
    train = [(torch.ones(4, 1), torch.full((4,), 9.0 * (client == 1))) for client in range(3)]
    simulation = simulate("flame", samples_of(train), linear_regression(1), settings=LOCAL | {"lam": 0.01, "rho": 1.0})
    play(simulation, 5)
    scores = scores_of(simulation, 5)
    pair = torch.stack([scores[model, "test", "rmse"].values for model in ("personal", "global")])
    assert torch.equal(scores["hybrid_oracle", "test", "rmse"].values, pair.min(0).values)
    assert bool((pair[0] < pair[1]).any())
    assert ("hybrid", "test", "rmse") not in scores  # nobody has validation samples to choose by


def test_a_split_that_nobody_has_gives_no_score_and_a_client_without_samples_nan() -> None:
    train = [(torch.ones(4, 1), torch.zeros(4)) for _ in range(3)]
    some = [(torch.ones(size, 1), torch.zeros(size)) for size in (2, 0, 1)]
    simulation = simulate("local", samples_of(train, test=some), linear_regression(1), settings=LOCAL)
    scores = scores_of(simulation, 0)
    assert {split for _, split, _ in scores} == {"test"}
    assert scores["personal", "test", "loss"].values.isnan().tolist() == [False, True, False]


@pytest.mark.parametrize("name", registry.names())
def test_newcomers_are_adapted_and_everything_stays(name: str) -> None:
    simulation = simulate(
        name, classification(), small_model(), task="multiclass", settings=TABLE[name].settings if name in TABLE else {}
    )
    trainers = torch.tensor([0, 1, 3])
    simulation.play_round(trainers, 1)
    before = (
        {key: value.clone() for key, value in simulation.server.items()},
        {key: value.clone() for key, value in simulation.clients.rows.items()},
        (simulation.round, simulation.traffic.down, simulation.traffic.up),
    )
    first, again = (scores_of(simulation, 1, newcomers=(2, 4), adapt_rounds=2) for _ in range(2))
    after = (
        simulation.server,
        simulation.clients.rows,
        (simulation.round, simulation.traffic.down, simulation.traffic.up),
    )
    assert before[2] == after[2]
    for old, new in zip(before[:2], after[:2], strict=True):
        assert all(torch.equal(torch.nan_to_num(value), torch.nan_to_num(new[key])) for key, value in old.items())
    if simulation.algorithm.has_personal:
        score = first["newcomer", "test", "loss"]
        assert score.clients.tolist() == [2, 4] and bool(score.values.isfinite().all())
        assert torch.equal(score.values, again["newcomer", "test", "loss"].values)
        without = scores_of(simulation, 1, newcomers=(2, 4), adapt_rounds=0)["newcomer", "test", "loss"].values
        assert not torch.equal(score.values, without)
    if simulation.algorithm.has_global:
        assert first["global", "test", "loss"].clients.tolist() == [0, 1, 2, 3, 4]
