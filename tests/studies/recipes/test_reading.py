"""Cells that are read off runs, whose every number is known."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from coterie.errors import RunFolderError
from coterie.runs.storage.metric_columns import MetricColumns
from coterie.studies.recipes.cells import CellName
from coterie.studies.recipes.plans import planned
from coterie.studies.recipes.readings import Value, read_values
from coterie.studies.recipes.run_numbers import RunNumbers, numbers_of_runs
from coterie.studies.recipes.schema import Reading
from tests.studies.recipes.small_recipe import recipe, values

CLIENTS = 5
ROUNDS = 8
EVALUATED = (2, 4, 6, 8)
ATTACKER = 4


def accuracy(method: str, seed: int, number: int, client: int) -> float:
    """Grows until round 6 and then falls; ours is two points above theirs on odd clients, and equal on even ones."""
    rise = {2: 0.2, 4: 0.4, 6: 0.6, 8: 0.5}[number]
    return rise + 0.01 * client + 0.001 * seed + (0.02 * (client % 2) if method == "ours" else 0.0)


class Fake:
    """A run as its reader sees it, without a folder."""

    def __init__(self, method: str, seed: int) -> None:
        self.path = f"{method}-{seed}"
        self.config = {"seed": seed, "rounds": ROUNDS, "partition": "natural", "data": "made up"}
        self.method, self.seed = method, seed
        rows: list[tuple[int, int, str, str, str, float]] = []
        for number in EVALUATED:
            for client in range(CLIENTS):
                value = 9.0 if client == ATTACKER else accuracy(method, seed, number, client)
                rows += [
                    (number, client, "personal", "test", "accuracy", value),
                    (number, client, "personal", "test", "loss", 1 - value),
                    (number, client, "personal", "train", "accuracy", value / 2),
                ]
                if method == "theirs":
                    rows.append((number, client, "global", "test", "accuracy", value - 0.1))
        rows += [(ROUNDS, client, "personal", "cross", "s_acc 0.5", 0.1 * client) for client in range(CLIENTS)]
        self.metrics = pd.DataFrame(rows, columns=["round", "client", "model", "split", "metric", "value"])
        self._columns, self._attackers = MetricColumns.of_frame(self.metrics), np.array([ATTACKER])
        roles = ["attacker" if client == ATTACKER else "honest" for client in range(CLIENTS)]
        self.shares = pd.DataFrame({"client": range(CLIENTS), "role": roles, "group": [0, 0, 1, 1, 1]})
        at = {"final": {"mean": 0.0}, "best": None, "best_oracle": {"mean": 0.0, "round": 6}}
        self.summary = {
            "metric": "accuracy",
            "higher_is_better": True,
            "personal": at,
            "global": at if method == "theirs" else None,
        }
        self.weight_rounds = [8] if method == "ours" else []

    def weights(self, round_number: int | None = None) -> pd.DataFrame:
        if self.method != "ours":
            raise RunFolderError("no weights")
        groups = self.shares["group"].to_numpy()
        return pd.DataFrame(np.where(groups[:, None] == groups[None, :], 3.0, 1.0) * self.seed)


def read(reading: dict[str, Any], *, at: str = "final", unit: str = "fraction", diverge: str = "") -> dict[str, Value]:
    """Give the reading of each method."""
    made = values()
    part = made["parts"][0]
    del part["numbers"], part["not_targets"]
    part |= {"readings": {"r": reading}, "at": at}
    part["plan"] |= {"rounds": ROUNDS, "eval_train": True, "matrix": True, "methods": part["plan"]["methods"]}
    found = recipe(**{**made, "unit": unit}).parts[0]
    plan = planned(found)
    results: Any = {run.name: None if run.name == diverge else Fake(run.method, run.config.seed) for run in plan.runs}
    runs = numbers_of_runs(found, plan, results)
    cells = read_values(found, plan, runs, unit)
    written = {name: run and json.loads(json.dumps(run.plain())) for name, run in runs.items()}
    kept = {name: run and RunNumbers.parse(run) for name, run in written.items()}
    assert repr(read_values(found, plan, kept, unit)) == repr(cells)  # a file keeps all that is read off runs
    assert cells.diverged == (frozenset({("", diverge.split("-")[0])}) if diverge else frozenset())
    return {name.method: value for name, value in cells.values.items() if name == CellName("one", "", name.method, "r")}


def honest(method: str, seed: int, number: int) -> list[float]:
    return [accuracy(method, seed, number, client) for client in range(CLIENTS) if client != ATTACKER]


@pytest.mark.parametrize(
    ("reading", "at", "number"),
    [
        ({}, "final", 8),
        ({}, "best_oracle", 6),
        ({"at": "final"}, "best_oracle", 8),
        ({"at": 0.25}, "final", 2),
        ({"at": 0.3}, "final", 4),  # 2.4 rounds: the next that was evaluated
        ({"at": 1.0}, "best_oracle", 8),
    ],
)
def test_when(reading: dict[str, Any], at: str, number: int) -> None:
    found = read(reading, at=at)["theirs"]
    each = [np.mean(honest("theirs", seed, number)) for seed in (1, 10)]
    assert found.mean == pytest.approx(np.mean(each)) and found.seeds == 2
    assert found.std == pytest.approx(abs(each[0] - each[1]) / math.sqrt(2))  # of two numbers, with divisor one


def test_the_deviation_over_seeds_can_be_the_number_itself() -> None:
    # Seeds 1 and 10 differ by 0.009 on every client: of two numbers, with divisor one.
    found = read({"of_seeds": "std"}, unit="percent")["theirs"]
    assert found.mean == pytest.approx(100 * 0.009 / math.sqrt(2)) and math.isnan(found.std) and found.seeds == 2
    with pytest.raises(ValueError, match="leave out weights, paired, spread"):
        Reading(of_seeds="std", spread="clients")


def test_the_mean_over_rounds() -> None:
    each = [np.mean([np.mean(honest("ours", seed, number)) for number in EVALUATED]) for seed in (1, 10)]
    assert read({"at": "mean"})["ours"].mean == pytest.approx(np.mean(each))


@pytest.mark.parametrize(
    ("over", "expected"),
    [
        # theirs after the last round with seed 1: 0.501, 0.511, 0.521, 0.531; with seed 10 all 0.009 more
        ("mean", 0.5205),
        ("median", 0.5205),
        ("worst", 0.5055),
        ("worst_tenth", 0.5055),
        ("std", 0.01 * math.sqrt(1.25)),
        ("variance", 0.0001 * 1.25),
    ],
)
def test_statistics_over_clients_that_do_not_attack(over: str, expected: float) -> None:
    assert read({"over": over})["theirs"].mean == pytest.approx(expected)
    if over in ("mean", "median", "std", "variance"):
        sign = -1 if over in ("mean", "median") else 1
        shift = 1 if over in ("mean", "median") else 0
        assert read({"over": over, "metric": "loss"})["theirs"].mean == pytest.approx(shift + sign * expected)


def test_the_worst_loss_is_the_largest() -> None:
    assert read({"over": "worst", "metric": "loss"})["theirs"].mean == pytest.approx(1 - 0.5055)


def test_models() -> None:
    assert set(read({"model": "global"})) == {"theirs"}
    mixed = read({"models": {"theirs": "global"}})
    assert mixed["theirs"].mean == pytest.approx(0.4205) and set(mixed) == {"ours", "theirs", "alone"}
    assert read({"model": "cloud"}) == {}
    assert read({"split": "train"})["theirs"].mean == pytest.approx(0.5205 / 2)


@pytest.mark.parametrize("metric", ["s_acc 0.5", "s_acc .50"])
def test_the_accuracy_matrix(metric: str) -> None:
    found = read({"split": "cross", "metric": metric})["ours"]
    assert found.mean == pytest.approx(0.15)  # clients 0 to 3
    assert read({"split": "cross", "metric": "g_acc"}) == {}
    assert read({"split": "cross", "metric": metric}, at="best_oracle") == {}  # measured at the end alone


def test_the_spread_of_clients() -> None:
    assert read({"spread": "clients"})["theirs"].std == pytest.approx(0.01 * math.sqrt(1.25))


@pytest.mark.parametrize(
    ("reading", "factor"),
    [({}, 100), ({"metric": "loss"}, 1), ({"over": "variance"}, 1e4), ({"over": "std"}, 100)],
)
def test_percents(reading: dict[str, Any], factor: float) -> None:
    plain, percent = read(reading)["theirs"], read(reading, unit="percent")["theirs"]
    assert percent.mean == pytest.approx(factor * plain.mean)
    assert percent.std == pytest.approx(factor * plain.std)
    assert read({**reading, "scale": 7.0}, unit="percent")["theirs"].mean == pytest.approx(7 * plain.mean)


def test_pairs_of_clients_of_all_seeds() -> None:
    pairs = [(honest("theirs", seed, 6), honest("ours", seed, 6)) for seed in (1, 10)]
    difference = np.round(np.concatenate([np.subtract(*pair) for pair in pairs]), 12)
    expected = stats.wilcoxon(difference[difference != 0]).pvalue
    found = read({"paired": "pvalue", "against": "ours"}, at="best_oracle", unit="percent")
    assert set(found) == {"theirs", "alone"}
    assert found["theirs"].mean == pytest.approx(expected) and math.isnan(found["theirs"].std)
    # Two of four clients are equal, which counts half; on two, ours is ahead.
    assert read({"paired": "ahead", "against": "ours"}, unit="percent")["theirs"].mean == 0.25
    assert read({"paired": "ahead", "against": "theirs"})["ours"].mean == 0.75
    shares = read({"paired": "ahead", "against": "theirs"})["ours"]
    assert len(shares.each) == shares.seeds and sum(shares.each) / shares.seeds == pytest.approx(0.75)
    assert read({"paired": "difference", "against": "ours"}, unit="percent")["alone"].mean == pytest.approx(-1.0)
    assert read({"paired": "pvalue", "against": "ours", "model": "global"}) == {}


def test_weights() -> None:
    assert read({"weights": "contrast"}, unit="percent") == {"ours": Value(3.0, 0.0, 2, (3.0, 3.0))}
    assert read({"weights": "recovery"}) == {"ours": Value(1.0, 0.0, 2, (1.0, 1.0))}


def test_a_method_of_which_a_run_diverged_has_no_number() -> None:
    assert set(read({}, diverge="theirs-seed1")) == {"ours", "alone"}
    assert set(read({"paired": "pvalue", "against": "theirs"}, diverge="theirs-seed10")) == set()


@pytest.mark.parametrize(
    "nonsense",
    [
        {"paired": "pvalue"},
        {"against": "x"},
        {"weights": "contrast", "metric": "loss"},
        {"split": "cross"},
        {"paired": "pvalue", "against": "x", "at": 0.5},
        {"split": "cross", "metric": "g_acc 0.5"},
        {"split": "cross", "metric": "s_acc half"},
        {"at": 0.0},
        {"at": 1.5},
        {"over": "most"},
    ],
)
def test_readings_that_are_none(nonsense: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        Reading(**nonsense)
