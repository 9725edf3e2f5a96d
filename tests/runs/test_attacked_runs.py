"""Attacks in whole runs: none changes nothing, robust means survive what the mean does not, honest clients count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import coterie
from coterie.algorithms import registry
from coterie.config import from_mapping
from coterie.errors import ConfigError
from coterie.results import Result
from coterie.runs import launch
from coterie.runs.builder import assemble, make_population, roles
from coterie.simulation import attacks
from tests.runs.test_resume import assert_same_end, config_of, finish

KINDS = attacks.names()


@pytest.mark.parametrize("name", registry.names())
def test_no_attackers_change_nothing_in_any_method(name: str, tmp_path: Path) -> None:
    kind = KINDS[registry.names().index(name) % len(KINDS)]
    for folder, more in (("plain", {}), ("attacked", {"attack": f"{kind}:0"})):
        finish(launch.begin(config_of(name, rounds=2, **more), tmp_path / folder))
    assert_same_end(tmp_path / "plain", tmp_path / "attacked")


TEN: dict[str, Any] = {
    "data": "digits",
    "partition": "iid",
    "clients": 10,
    "rounds": 8,
    "model": "linear",
    "validation": 0,
    "progress": False,
}


def digits(path: Path, name: str, attack: str | None = None, **settings: Any) -> Result:
    return coterie.run(name, out=path, attack=attack, settings={"lr": 0.1, "batch_size": 20, **settings}, **TEN)


def mean(result: Result, model: str = "global") -> float:
    return float(result.summary[model]["final"]["mean"])


def test_multi_krum_survives_one_gaussian_attacker_of_ten_where_the_mean_does_not(tmp_path: Path) -> None:
    attack = "gaussian:0.1,variance=100"
    honest = mean(digits(tmp_path / "honest", "fedavg"))
    assert honest > 0.85
    # The mean takes a tenth of N(0, 100) into every weight: noise of deviation 1 in each of 64 inputs, every round.
    assert mean(digits(tmp_path / "mean", "fedavg", attack)) < 0.4
    method = digits(tmp_path / "method", "multi_krum", attack, fraction=0.1)
    option = digits(tmp_path / "option", "fedavg", attack, aggregator="multi_krum", byzantine=1)
    for survivor in (method, option):
        assert mean(survivor) > honest - 0.03
        assert survivor.summary["global"]["clients"] == 9
    # Both leave one out of ten, and that must be the attacker: the models are one and the same.
    values = [result.metrics.query("model == 'global'")["value"].to_numpy() for result in (method, option)]
    np.testing.assert_array_equal(*values)


@pytest.mark.parametrize("kind", ["same_value", "sign_flip"])
def test_multi_krum_survives_the_other_attacks_too(kind: str, tmp_path: Path) -> None:
    result = digits(tmp_path / "run", "multi_krum", f"{kind}:0.2,variance=100", fraction=0.2)
    assert mean(result) > 0.85 and result.summary["global"]["clients"] == 8


def test_attacked_messages_never_reach_the_attackers_own_state(tmp_path: Path) -> None:
    # Local sends nothing, so there is nothing to corrupt: an attack on messages must leave it as it is.
    plain, attacked = (
        digits(tmp_path / name, "local", attack) for name, attack in (("a", None), ("b", "gaussian:0.3"))
    )
    pd.testing.assert_frame_equal(plain.metrics, attacked.metrics, check_exact=True)
    assert plain.summary["personal"]["clients"] == 10 and attacked.summary["personal"]["clients"] == 7


def test_label_poisoning_spoils_the_attackers_alone_where_nobody_listens(tmp_path: Path) -> None:
    attack = "label_poisoning:0.3"
    plain, poisoned = digits(tmp_path / "plain", "local"), digits(tmp_path / "poisoned", "local", attack)
    found = roles(from_mapping({"algorithm": "local", "clients": 10, "attack": attack}))
    of_client = [
        result.metrics.query(
            "model == 'personal' and split == 'test' and metric == 'accuracy' and round == 8"
        ).set_index("client")["value"]
        for result in (plain, poisoned)
    ]
    honest, attackers = found.honest, found.attackers.tolist()
    pd.testing.assert_series_equal(of_client[0][honest], of_client[1][honest], check_exact=True)
    # Random labels of ten classes carry nothing of the digits.
    assert of_client[0][attackers].mean() > 0.7 and of_client[1][attackers].mean() < 0.35
    final = poisoned.summary["personal"]["final"]
    assert final["mean"] == pytest.approx(of_client[1][honest].mean(), abs=1e-12)
    assert final["worst"] == of_client[1][honest].min()
    shares = poisoned.shares
    assert shares.loc[shares["role"] == "attacker", "client"].tolist() == attackers
    # What the table shows are the labels as they are, and not as an attacker would have them.
    pd.testing.assert_frame_equal(shares.drop(columns="role"), plain.shares.drop(columns="role"))


def test_fairness_under_attack_is_that_of_honest_clients(tmp_path: Path) -> None:
    result = digits(tmp_path / "run", "fedavg", "sign_flip:0.2")
    honest = roles(from_mapping({"algorithm": "fedavg", "clients": 10, "attack": "sign_flip:0.2"})).honest
    last = result.metrics.query("model == 'personal' and split == 'test' and round == 8")
    last = last[last["client"].isin(honest)]
    accuracy, loss = (last[last["metric"] == metric]["value"].to_numpy() for metric in ("accuracy", "loss"))
    found = result.summary["personal"]
    assert len(accuracy) == found["clients"] == 8
    assert found["final"]["std"] == pytest.approx(np.std(accuracy))
    assert found["fairness"]["worst_decile"] == accuracy.min()
    assert found["fairness"]["loss_variance"] == pytest.approx(np.var(loss))
    assert found["fairness"]["loss_variance_sample"] == pytest.approx(np.var(loss, ddof=1))


def test_poisoning_samples_that_others_hold_is_refused_and_other_attacks_are_not() -> None:
    shared: dict[str, Any] = {"algorithm": "fedavg", "partition": "dirichlet:0.5,overlap=true", "clients": 6}
    with pytest.raises(ConfigError, match="samples that attackers share with others"):
        assemble(from_mapping(shared | {"attack": "label_poisoning:0.4"}))
    config = from_mapping(shared | {"attack": "gaussian:0.4"})
    population = make_population(config)
    assert torch.cat([part.flat for part in (population.shares.train, population.shares.test)]).bincount().max() > 1
    assemble(config)
