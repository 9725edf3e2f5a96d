from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
import pytest

from coterie.errors import RunFolderError
from coterie.results import summarise, table
from coterie.runs.storage import MetricsLog

Values = dict[int, Sequence[float]]


def frame(folder: Path, *tables: tuple[str, str, str, Values]) -> pd.DataFrame:
    log = MetricsLog(folder)
    for number in range(0, 10):
        for model, split, metric, values in tables:
            if number in values:
                log.append(number, model, split, metric, values[number], range(len(values[number])))
        if number in (1, 2):
            log.append_bytes(number, up=100 * number, down=10)
    return log.read()


def test_the_numbers(tmp_path: Path) -> None:
    metrics = frame(
        tmp_path,
        # On validation data round 1 is best; on test data it is round 2.
        ("personal", "test", "accuracy", {0: [0.1, 0.1], 1: [0.4, 0.6], 2: [0.9, 0.7], 3: [0.5, 0.9]}),
        ("personal", "validation", "accuracy", {0: [0.0, 0.0], 1: [1.0, 1.0], 2: [0.5, 0.9], 3: [1.0, 0.9]}),
        ("personal", "test", "loss", {0: [9.0, 9.0], 3: [1.0, 4.0]}),
    )
    summary = summarise(metrics, algorithm="fedacs", seed=5, rounds=3, seconds=6.0)
    # Last round: mean (.5 + .9)/2 = .7, std sqrt(((.2)^2 + (.2)^2)/2) = .2; losses 1 and 4 lie 1.5 from their mean, so
    # their variance is 2.25 with divisor 2 and 4.5 with divisor 1.
    assert summary == {
        "algorithm": "fedacs",
        "seed": 5,
        "rounds": 3,
        "metric": "accuracy",
        "higher_is_better": True,
        "best_chosen_on": "validation",
        "personal": {
            "final": {"mean": pytest.approx(0.7), "std": pytest.approx(0.2), "worst": 0.5},
            "best": {"mean": pytest.approx(0.5), "round": 1},
            "best_oracle": {"mean": pytest.approx(0.8), "round": 2},
            "clients": 2,
            "of_clients": 2,
            "fairness": {
                "worst_decile": 0.5,
                "loss_variance": pytest.approx(2.25),
                "loss_variance_sample": pytest.approx(4.5),
            },
        },
        "global": None,
        "seconds": {"total": 6.0, "per_round": 2.0},
        "bytes": {"up": 300, "down": 20},
    }


def test_the_order_of_records_does_not_matter(tmp_path: Path) -> None:
    metrics = frame(
        tmp_path,
        ("personal", "test", "accuracy", {1: [0.4, 0.6, 0.1], 2: [0.9, 0.7, 0.3], 3: [0.5, 0.9, 0.2]}),
        ("personal", "validation", "accuracy", {1: [1.0, 1.0, 0.3], 2: [0.5, 0.9, 0.9], 3: [1.0, 0.9, 0.1]}),
        ("personal", "test", "loss", {1: [2.0, 3.0, 5.0], 2: [1.0, 4.0, 2.0], 3: [1.0, 4.0, 9.0]}),
    )

    def summary(table: pd.DataFrame) -> dict[str, object]:
        return summarise(table, algorithm="fedacs", seed=5, rounds=3, seconds=6.0)

    wanted = summary(metrics)
    for seed in range(5):
        assert summary(metrics.sample(frac=1, random_state=seed)) == wanted
    assert summary(metrics.iloc[::-1]) == wanted
    # One client was measured less often than the others.
    lacking = metrics[~((metrics["round"] == 2) & (metrics["client"] == 1))]
    assert summary(lacking) == summary(lacking.iloc[::-1]) != wanted


def test_without_validation_data_there_is_no_best(tmp_path: Path) -> None:
    metrics = frame(tmp_path, ("global", "test", "accuracy", {1: [0.5], 2: [0.4]}))
    summary = summarise(metrics, algorithm="fedavg", seed=0, rounds=2, seconds=1.0)
    assert summary["personal"] is None and summary["best_chosen_on"] is None
    assert summary["global"]["best"] is None
    assert summary["global"]["best_oracle"] == {"mean": 0.5, "round": 1}
    assert math.isnan(summary["global"]["fairness"]["loss_variance"])


def test_less_may_be_better(tmp_path: Path) -> None:
    metrics = frame(
        tmp_path,
        ("personal", "test", "rmse", {1: [3.0, 5.0], 2: [1.0, 2.0]}),
        ("personal", "validation", "rmse", {1: [2.0, 2.0], 2: [2.5, 2.5]}),
    )
    summary = summarise(
        metrics, algorithm="local", seed=0, rounds=2, seconds=1.0, metric="rmse", higher_is_better=False
    )
    assert summary["personal"]["final"]["worst"] == 2.0
    assert summary["personal"]["best"] == {"mean": 4.0, "round": 1}
    assert summary["personal"]["best_oracle"] == {"mean": 1.5, "round": 2}


def test_the_first_of_equally_good_rounds(tmp_path: Path) -> None:
    metrics = frame(tmp_path, ("personal", "test", "accuracy", {3: [0.5], 5: [0.5], 7: [0.5]}))
    summary = summarise(metrics, algorithm="local", seed=0, rounds=7, seconds=1.0)
    assert summary["personal"]["best_oracle"]["round"] == 3


def test_hybrid_models_are_there_when_measured(tmp_path: Path) -> None:
    tables = [
        (model, "test", "accuracy", {1: [value]})
        for model, value in (("personal", 0.5), ("global", 0.6), ("hybrid", 0.7), ("hybrid_oracle", 0.8))
    ]
    summary = summarise(frame(tmp_path, *tables), algorithm="flame", seed=0, rounds=1, seconds=1.0)
    found = {m: summary[m]["final"]["mean"] for m in ("personal", "global", "hybrid", "hybrid_oracle")}
    assert found == {"personal": 0.5, "global": 0.6, "hybrid": 0.7, "hybrid_oracle": 0.8}


def test_only_some_clients_count(tmp_path: Path) -> None:
    metrics = frame(tmp_path, ("personal", "test", "accuracy", {1: [0.2, 0.6, 0.8]}))
    summary = summarise(metrics, algorithm="local", seed=0, rounds=1, seconds=1.0, clients={1, 2})
    assert summary["personal"]["final"]["mean"] == pytest.approx(0.7)
    assert summary["personal"]["clients"] == 2 and summary["bytes"]["up"] == 300


def test_newcomers_count_as_newcomers(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append(1, "personal", "test", "accuracy", [0.2, 0.4], [0, 1])
    log.append(1, "newcomer", "test", "accuracy", [0.9], [2])
    summary = summarise(log.read(), algorithm="local", seed=0, rounds=1, seconds=1.0, clients=[0, 1])
    assert summary["personal"]["final"]["mean"] == pytest.approx(0.3)
    assert summary["newcomer"]["final"]["mean"] == 0.9 and summary["newcomer"]["clients"] == 1


def test_an_undefined_value_is_left_out_and_shows_in_the_count(tmp_path: Path) -> None:
    metrics = frame(
        tmp_path,
        ("personal", "test", "accuracy", {1: [0.2, math.nan, 0.4]}),
        ("personal", "test", "loss", {1: [1.0, 50.0, 3.0]}),
    )
    summary = summarise(metrics, algorithm="local", seed=0, rounds=1, seconds=1.0)
    assert summary["personal"]["clients"] == 2
    assert summary["personal"]["final"]["mean"] == pytest.approx(0.3)
    assert summary["personal"]["fairness"]["loss_variance"] == pytest.approx(1.0)


def test_a_client_without_validation_data_takes_no_part_in_the_choice(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    for number, test, validation in ((1, [0.9, 0.1], 0.3), (2, [0.1, 0.1], 0.4)):
        log.append(number, "personal", "test", "accuracy", test, [0, 1])
        log.append(number, "personal", "validation", "accuracy", [validation], [1])
    summary = summarise(log.read(), algorithm="local", seed=0, rounds=2, seconds=1.0)
    assert summary["personal"]["best"] == {"mean": pytest.approx(0.1), "round": 2}


def test_nothing_to_sum_up(tmp_path: Path) -> None:
    metrics = frame(tmp_path, ("personal", "test", "accuracy", {1: [0.5]}))
    with pytest.raises(RunFolderError, match="'auroc' was never measured on test data"):
        summarise(metrics, algorithm="local", seed=0, rounds=1, seconds=1.0, metric="auroc")


def test_a_mean_says_over_how_many_of_those_with_samples(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path)
    log.append(1, "personal", "test", "loss", [1.0, 2.0, 3.0], [0, 1, 4])
    log.append(1, "personal", "test", "auroc", [0.5, 0.7], [0, 4])  # undefined for client 1
    summary = summarise(log.read(), algorithm="fedacs", seed=1, rounds=1, seconds=1.0, metric="auroc")
    assert (summary["personal"]["clients"], summary["personal"]["of_clients"]) == (2, 3)
    notes = table([summary]).notes[1:]  # the first is the dagger's
    assert notes == ("FedACS, personal model: auroc over 2 of 3 clients, for whom it is defined",)
    honest = summarise(log.read(), algorithm="fedacs", seed=1, rounds=1, seconds=1.0, metric="auroc", clients=[0, 4])
    assert honest["personal"]["of_clients"] == 2 and not table([honest]).notes[1:]
