"""Accuracy matrices of whole runs: what is recorded, when, and that it changes nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from coterie.config import from_mapping
from coterie.errors import ConfigError, RunFolderError
from coterie.evaluation.accuracy_matrix import s_acc_clients
from coterie.results import Result
from coterie.runs import launch
from coterie.runs.builder import roles
from tests.runs.test_resume import assert_same_end, config_of, finish, stop

ENDS = {"matrix": True, "s_acc": (0.0, 0.5, 1.0)}


def run(path: Path, name: str = "fedavg", **more: Any) -> Result:
    return finish(launch.begin(config_of(name, **more), path))


def values(result: Result, model: str, split: str, metric: str, round_number: int = 5) -> pd.Series:  # type: ignore[type-arg]
    frame = result.metrics
    chosen = frame[(frame["model"] == model) & (frame["split"] == split) & (frame["metric"] == metric)]
    return chosen[chosen["round"] == round_number].set_index("client")["value"]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Result:
    # Everybody keeps two test samples, so all test samples count and the diagonal is what is measured in any case.
    return run(tmp_path_factory.mktemp("measured") / "run", max_test=2, **ENDS)


def test_the_diagonal_is_the_personal_accuracy(measured: Result) -> None:
    matrix = measured.matrix()
    assert matrix.index.tolist() == matrix.columns.tolist() == [0, 1, 2, 3, 4]
    assert (matrix.index.name, matrix.columns.name) == ("model", "samples")
    np.testing.assert_array_equal(np.diag(matrix), values(measured, "personal", "test", "accuracy"))
    shared = values(measured, "global", "cross", "accuracy")
    np.testing.assert_array_equal(shared, values(measured, "global", "test", "accuracy"))


def test_readings_are_those_of_the_matrix(measured: Result) -> None:
    matrix, seed = measured.matrix().to_numpy(), measured.config["seed"]
    read = {name: values(measured, "personal", "cross", name).to_numpy() for name in ("l_acc", "g_acc", "s_acc 0.5")}
    np.testing.assert_allclose(read["l_acc"], np.diag(matrix), rtol=0, atol=0)
    np.testing.assert_allclose(read["g_acc"], matrix.mean(1), rtol=1e-14)
    chosen = s_acc_clients(5, 0.5, seed).numpy()
    assert chosen.sum(1).tolist() == [3] * 5
    np.testing.assert_allclose(read["s_acc 0.5"], [row[mine].mean() for row, mine in zip(matrix, chosen, strict=True)])


def test_ends_of_s_acc_are_l_acc_and_g_acc_exactly(measured: Result) -> None:
    for end, name in (("s_acc 0.0", "l_acc"), ("s_acc 1.0", "g_acc")):
        one, other = (values(measured, "personal", "cross", metric) for metric in (end, name))
        pd.testing.assert_series_equal(one, other, check_exact=True)
    matrix = measured.summary["matrix"]
    assert matrix["s_acc"]["0.0"] == matrix["l_acc"] and matrix["s_acc"]["1.0"] == matrix["g_acc"]


def test_the_summary_of_a_matrix(measured: Result) -> None:
    matrix, found = measured.matrix().to_numpy(), measured.summary["matrix"]
    assert (found["round"], found["metric"], found["clients"], found["samples"]) == (5, "accuracy", 5, 5 * 2)
    assert found["l_acc"]["mean"] == pytest.approx(np.diag(matrix).mean(), abs=1e-12)
    assert found["l_acc"]["std"] == pytest.approx(np.diag(matrix).std(), abs=1e-12)
    assert found["g_acc"]["mean"] == pytest.approx(matrix.mean(), abs=1e-12)
    assert found["g_acc"]["std"] == pytest.approx(matrix.mean(1).std(), abs=1e-12)
    assert found["global"]["mean"] == pytest.approx(values(measured, "global", "test", "accuracy").mean(), abs=1e-12)


def test_measuring_it_changes_no_other_number(measured: Result, tmp_path: Path) -> None:
    plain = run(tmp_path / "run", max_test=2)
    rest = measured.metrics[measured.metrics["split"] != "cross"].reset_index(drop=True)
    for column in ("model", "split", "metric"):
        rest[column], plain.metrics[column] = rest[column].astype(str), plain.metrics[column].astype(str)
    pd.testing.assert_frame_equal(rest, plain.metrics, check_exact=True)
    assert plain.matrix_rounds == [] and "matrix" not in plain.summary
    with pytest.raises(RunFolderError, match="holds no accuracy matrices"):
        plain.matrix()


def test_when_it_is_measured(measured: Result, tmp_path: Path) -> None:
    assert measured.matrix_rounds == [5]
    result = run(tmp_path / "run", rounds=7, eval_every=2, matrix=True, matrix_every=2)
    assert result.matrix_rounds == [4, 7]
    assert result.summary["matrix"]["round"] == 7


def test_a_stopped_run_ends_with_the_same_matrices(tmp_path: Path) -> None:
    more: dict[str, Any] = {"matrix_every": 1, "checkpoint_every": 2, **ENDS}
    whole = run(tmp_path / "whole", "fedacs", **more)
    stop(launch.begin(config_of("fedacs", **more), tmp_path / "cut"), "while recording", 4)
    again = finish(launch.resume(tmp_path / "cut"))
    assert_same_end(tmp_path / "whole", tmp_path / "cut")
    assert whole.matrix_rounds == again.matrix_rounds == [1, 2, 3, 4, 5]
    for number in whole.matrix_rounds:
        pd.testing.assert_frame_equal(whole.matrix(number), again.matrix(number), check_exact=True)
    pd.testing.assert_frame_equal(whole.shares, again.shares)


def test_attackers_and_newcomers_are_left_out(tmp_path: Path) -> None:
    data = "synthetic:clients=9,samples=14,features=6,classes=3"
    more: dict[str, Any] = {"data": data, "clients": 9, "attack": "gaussian:0.3", "hold_out": 0.2}
    result = run(tmp_path / "run", matrix=True, **more)
    honest = roles(config_of("fedavg", **more)).honest
    assert len(honest) == 5 and result.matrix().index.tolist() == honest == result.matrix().columns.tolist()
    assert result.summary["matrix"]["clients"] == 5
    shares = result.shares.set_index("client")
    assert shares.index[shares["role"] == "honest"].tolist() == honest
    assert shares["role"].value_counts().to_dict() == {"honest": 5, "attacker": 2, "newcomer": 2}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"algorithm": "fedsgd", "matrix": True}, "measures personal models, and FedSGD has none"),
        ({"matrix_every": 2}, "give matrix=true"),
        ({"s_acc": [0.2]}, "give matrix=true"),
        ({"matrix": True, "s_acc": [0.2, 0.2]}, "each fraction must be given once"),
        ({"matrix": True, "s_acc": "0.2+1.5"}, "s_acc is .*1.5"),
    ],
)
def test_what_makes_no_sense_is_refused(more: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        from_mapping({"algorithm": "fedavg", **more})


def test_shares_say_what_each_client_holds(tmp_path: Path) -> None:
    result = run(tmp_path / "run", data="digits", partition="groups:2", clients=6, model="linear", rounds=1)
    shares = result.shares
    assert shares["client"].tolist() == list(range(6)) and set(shares["role"]) == {"honest"}
    assert shares["group"].tolist() == [0, 0, 0, 1, 1, 1]
    classes = shares[[f"class {digit}" for digit in range(10)]]
    assert (classes.sum(axis=1) == shares["train"]).all()
    # Each group's dominating classes are five of the ten, and make four fifths of a client's samples.
    for group, low in ((0, 0), (1, 5)):
        mine = classes[shares["group"] == group].to_numpy()
        assert mine[:, low : low + 5].sum() > 2 * mine.sum() / 3
    assert (shares[["validation", "test"]] > 0).all().all()
