"""Who trains, who is held out and who attacks, and what comes of it."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from coterie.algorithms import registry
from coterie.compute.engine import Call
from coterie.config import ExperimentConfig, from_mapping
from coterie.data import partitions
from coterie.data.partitions import Ragged
from coterie.errors import ConfigError
from coterie.results import Result
from coterie.runs import launch
from coterie.runs.builder import Population, assemble, make_engine, make_population, roles
from coterie.runs.rounds import draw_cohort
from coterie.simulation import attacks
from coterie.simulation.exchange import alteration
from coterie.simulation.scoring import Scorer
from coterie.simulation.simulation import Simulation
from tests.small_runs import config_of, finish, same

CPU = torch.device("cpu")


def run(path: Path, name: str = "fedavg", **more: Any) -> Result:
    return finish(launch.begin(config_of(name, **more), path))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(tmp_path_factory.mktemp("plain") / "run")


# ------------------------------------------------------------------------------------------------ who does what


def test_cohorts_are_drawn_by_round_and_seed_alone() -> None:
    trainers = torch.tensor([1, 2, 5, 7, 8, 9, 11, 12])
    drawn = [draw_cohort(3, number, trainers, 0.5) for number in range(1, 41)]
    assert all(len(cohort) == 4 and bool((cohort.diff() > 0).all()) for cohort in drawn)
    assert set(torch.cat(drawn).tolist()) == set(trainers.tolist())
    assert len({tuple(cohort.tolist()) for cohort in drawn}) > 20
    assert torch.equal(drawn[6], draw_cohort(3, 7, trainers, 0.5))
    assert draw_cohort(3, 7, trainers, 0.01).numel() == 1
    assert torch.equal(draw_cohort(3, 7, trainers, 1.0), trainers)


def test_roles_do_not_mix() -> None:
    config = config_of("fedavg", clients=20, hold_out=0.25, attack="gaussian:0.2")
    found = roles(config)
    trainers, newcomers, attackers = (set(value.tolist()) for value in dataclasses.astuple(found))
    assert len(newcomers) == 5 and not newcomers & trainers and newcomers | trainers == set(range(20))
    assert len(attackers) == 3 and attackers < trainers
    assert set(found.honest) == trainers - attackers


@pytest.mark.parametrize("hold_out", [0.05, 0.95])
def test_too_few_or_too_many_held_out(hold_out: float) -> None:
    with pytest.raises(ConfigError, match=f"hold_out is {hold_out}, which is . of 5 clients"):
        roles(config_of("fedavg", hold_out=hold_out))


@pytest.mark.parametrize("scheme", partitions.SCHEMES)
def test_every_partition_gives_the_clients_that_roles_are_drawn_from(scheme: str) -> None:
    data = "digits" if scheme != "natural" else "synthetic:clients=6"
    config = from_mapping({"algorithm": "local", "data": data, "partition": scheme, "clients": 6})
    assert len(make_population(config).shares) == 6


def simulation_of(config: ExperimentConfig, population: Population) -> tuple[Simulation, Scorer]:
    engine = make_engine(config, population, CPU)
    algorithm = registry.make(config.algorithm, config.settings)
    simulation = Simulation(algorithm, engine, members=population.roles.trainers)
    return simulation, Scorer(simulation, population.roles.trainers, torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize("name", registry.names())
def test_newcomers_data_are_never_seen(name: str) -> None:
    config = config_of(name, hold_out=0.4)
    population = make_population(config)
    away = population.roles.newcomers.tolist()
    seen, shares = population.dataset, population.shares
    mine = torch.cat([shares.train[client] for client in away])
    x, y = seen.x.clone(), seen.y.clone()
    x[mine], y[mine] = 3 * x[mine] + 1, (y[mine] + 1) % len(seen.classes)
    parts = [shares.train[client] for client in range(config.clients)]
    fewer = [part[::2] if client in away else part for client, part in enumerate(parts)]
    other = Population(
        dataclasses.replace(seen, x=x, y=y), dataclasses.replace(shares, train=Ragged.of(fewer)), population.roles
    )
    ends = []
    for each in (population, other):
        simulation, scorer = simulation_of(config, each)
        for number in (1, 2, 3):
            simulation.play_round(draw_cohort(config.seed, number, population.roles.trainers, 0.7), number)
        scores = {f"{score.model} {score.split} {score.metric}": score.values for score in scorer.scores(3)}
        trained = {key: value[population.roles.trainers] for key, value in simulation.clients.rows.items()}
        ends.append((scores, trained))
    assert same(ends[0][0], ends[1][0]) and same(ends[0][1], ends[1][1])


def test_newcomers_are_recorded_apart(tmp_path: Path) -> None:
    result = run(tmp_path / "run", "fedavg_ft", hold_out=0.4, clients=5)
    metrics, summary = result.metrics, result.summary
    away = set(roles(config_of("fedavg_ft", hold_out=0.4)).newcomers.tolist())
    of_model = {model: set(rows["client"]) for model, rows in metrics.groupby("model", observed=True)}
    assert of_model["newcomer"] == away and of_model["personal"] == set(range(5)) - away
    assert of_model["global"] == set(range(5))
    assert summary["newcomer"]["clients"] == 2 and summary["personal"]["clients"] == 3 == summary["global"]["clients"]


# ------------------------------------------------------------------------------------------------ attacks


@pytest.mark.parametrize("kind", attacks.names())
def test_no_attackers_change_nothing(kind: str, plain: Result, tmp_path: Path) -> None:
    result = run(tmp_path / "run", attack=f"{kind}:0")
    pd.testing.assert_frame_equal(plain.metrics, result.metrics, check_exact=True)
    assert {**plain.summary, "seconds": 0} == {**result.summary, "seconds": 0}


def test_attacked_replies_count_and_honest_clients_are_summed_up(plain: Result, tmp_path: Path) -> None:
    result = run(tmp_path / "run", attack="gaussian:0.4,variance=4")
    found = roles(config_of("fedavg", attack="gaussian:0.4"))
    last = result.metrics.query("round == 5 and model == 'global' and split == 'test' and metric == 'accuracy'")
    assert set(last["client"]) == set(range(5))
    honest = last[last["client"].isin(found.honest)]["value"]
    assert len(honest) == 3 == result.summary["global"]["clients"]
    assert result.summary["global"]["final"]["mean"] == pytest.approx(honest.mean(), abs=1e-12)
    assert not np.array_equal(last["value"], plain.metrics.loc[last.index, "value"])


def test_an_attack_draws_anew_for_every_exchange_and_evaluation() -> None:
    config = config_of("fedavg", attack="gaussian:0.4")
    population = make_population(config)
    transform = alteration(attacks.parse("gaussian:0.4"), population.roles.attackers, config.seed)
    assert transform is not None
    clients, rows = torch.arange(5), {"w": torch.zeros(5, 7), "n": torch.arange(5)}
    calls = [Call(1), Call(1, "round", 1), Call(2), Call(1, "personalise"), Call(1, "personalise", 1), Call(1, "adapt")]
    sent = [transform(rows, clients, call) for call in calls]
    hostile = torch.isin(clients, population.roles.attackers)
    for reply in sent:
        assert not reply["w"][~hostile].any() and torch.equal(reply["n"], rows["n"])
    noise = torch.stack([reply["w"][hostile] for reply in sent])
    assert len(noise.unique(dim=0)) == len(calls)
    assert torch.equal(transform(rows, clients, calls[1])["w"], sent[1]["w"])


def test_poison_only_touches_the_attackers_training_labels() -> None:
    config = config_of("fedavg", attack="label_poisoning:0.4")
    population = make_population(config)
    clean = make_engine(config_of("fedavg"), make_population(config_of("fedavg")), CPU).samples
    poisoned = make_engine(config, population, CPU).samples
    mine = torch.cat([population.shares.train[int(client)] for client in population.roles.attackers])
    changed = (clean.y != poisoned.y).nonzero().flatten()
    assert len(changed) > len(mine) / 4 and set(changed.tolist()) <= set(mine.tolist())
    assert torch.equal(clean.x, poisoned.x)


def test_poison_for_shared_samples_is_refused() -> None:
    config = from_mapping(
        {
            "algorithm": "fedavg",
            "partition": "dirichlet:0.5,overlap=true",
            "clients": 6,
            "attack": "label_poisoning:0.4",
        }
    )
    with pytest.raises(ConfigError, match="attackers share with others"):
        make_engine(config, make_population(config), CPU)


def test_poison_needs_classes() -> None:
    data = "synthetic:clients=5,samples=14,task=regression"
    with pytest.raises(ConfigError, match="at least two classes"):
        assemble(config_of("fedavg", data=data, attack="label_poisoning:0.4"))
