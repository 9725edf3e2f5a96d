"""Trackers of a run between machines: told of each round with its evaluation, which comes in with the next one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.cli.federate import _placed
from coterie.errors import ConfigError, RunFolderError, UnknownName
from coterie.federation.plan import Plan
from coterie.federation.server import serve
from coterie.results import Result
from coterie.runs.experiment import Experiment
from coterie.runs.storage import events
from coterie.tracking.tensorboard import TensorBoard
from tests.federation.grid import Dying, make_federation
from tests.small_runs import Killed
from tests.tracking.event_files import events as logged
from tests.tracking.event_files import series

ROUNDS = 3
PLAN = Plan(algorithm="fedacs", rounds=ROUNDS, wait=0.0, track=("tensorboard",))


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def expect_all_told(run: Path) -> None:
    """Everything that the run's folder holds of a round, TensorBoard shows at that round, once."""
    found, result = logged(run / "tensorboard"), Result(run)
    metrics, every = result.metrics, list(range(1, ROUNDS + 1))
    kinds = metrics[metrics["model"] != "federation"].groupby(["model", "split", "metric"], observed=True)
    assert {names[0] for names, _ in kinds} >= {"personal", "global"}
    for names, frame in kinds:
        means = frame.groupby("round")["value"].mean()
        told = series(found, "/".join(map(str, names)) + "/mean")
        assert list(told) == every == means.index.tolist(), names
        np.testing.assert_allclose(list(told.values()), means.to_numpy(), rtol=1e-6)
    for name, metric in (("bytes/up", "bytes_up"), ("bytes/down", "bytes_down"), ("server/wire_replies",) * 2):
        values = metrics[metrics["metric"] == metric.removeprefix("server/")].set_index("round")["value"]
        assert series(found, name) == values.to_dict()
    np.testing.assert_allclose(
        list(series(found, "seconds/training").values()), result.timings["training"].to_numpy(), rtol=1e-6
    )
    assert [image.step for image in found.Images("weights")] == every == result.weight_rounds
    assert [each.step for each in found.Histograms("personal/test/accuracy")] == every
    assert series(found, "result/personal/final/mean") == {
        ROUNDS: pytest.approx(result.summary["personal"]["final"]["mean"])
    }


def test_each_round_is_told_whole(tmp_path: Path) -> None:
    local = make_federation(tmp_path)
    serve(local.agreement, local.grid, PLAN, tmp_path / "run")
    expect_all_told(tmp_path / "run")
    assert "track" not in Result(tmp_path / "run").config


@pytest.mark.parametrize("exchange", range(1, 5))
def test_after_a_kill_each_round_is_told_whole_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: int
) -> None:
    """Hello, three rounds, an evaluation: killed after each of them."""
    local = make_federation(tmp_path)
    with monkeypatch.context() as kill, pytest.raises(Killed):
        kill.setattr(Experiment, "keep", lambda self: None)
        serve(local.agreement, Dying(local.grid, exchange), PLAN, tmp_path / "run")
    local.restart()
    serve(local.agreement, local.grid, PLAN, tmp_path / "run")
    expect_all_told(tmp_path / "run")


def test_after_a_kill_at_the_very_end_the_last_round_is_told_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = make_federation(tmp_path)

    def die(*given: Any, **more: Any) -> None:
        raise Killed

    with monkeypatch.context() as kill, pytest.raises(Killed):
        kill.setattr("coterie.runs.experiment.summary_of", die)
        serve(local.agreement, local.grid, PLAN, tmp_path / "run")
    local.restart()
    serve(local.agreement, local.grid, PLAN, tmp_path / "run")
    expect_all_told(tmp_path / "run")


def test_rounds_that_are_not_evaluated_are_told_too(tmp_path: Path) -> None:
    local = make_federation(tmp_path)
    serve(local.agreement, local.grid, PLAN.model_copy(update={"eval_every": 2}), tmp_path / "run")
    found = logged(tmp_path / "run" / "tensorboard")
    assert list(series(found, "bytes/up")) == [1, 2, 3]
    assert list(series(found, "personal/test/accuracy/mean")) == [2, 3]


def test_a_tracker_that_fails_is_an_event_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: TensorBoard, number: int, measured: Any) -> None:
        if number == 2:
            self._close()
            raise OSError("no space")

    monkeypatch.setattr(TensorBoard, "round", fail)
    local = make_federation(tmp_path)
    serve(local.agreement, local.grid, PLAN, tmp_path / "run")
    (told,) = [event for event in events.read(tmp_path / "run") if event.what == "tracker failed"]
    assert "TensorBoard failed in round 2" in told.reason and "no space" in told.reason
    assert Result(tmp_path / "run").finished


def test_a_tracker_that_cannot_be_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    local = make_federation(tmp_path)
    with pytest.raises(UnknownName, match="tracker"):
        serve(local.agreement, local.grid, PLAN.model_copy(update={"track": ("nobody",)}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_command_line_refuses_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")
    monkeypatch.chdir(tmp_path)
    CliRunner().invoke(app, ["federate", "init", "p", "--nodes", "2"], catch_exceptions=False)
    command = ["federate", "run", "p", "fedavg", "--track"]
    with pytest.raises(UnknownName, match="tracker"):
        CliRunner().invoke(app, [*command, "nobody"], catch_exceptions=False)
    with pytest.raises(ConfigError, match="given twice"):
        CliRunner().invoke(app, [*command, "tensorboard", "--track", "tensorboard:logs"], catch_exceptions=False)
    (tmp_path / "logs" / "fedavg-1").mkdir(parents=True)
    (tmp_path / "logs" / "fedavg-1" / "events.out.tfevents.1").touch()
    with pytest.raises(RunFolderError, match="holds the events of another run"):
        CliRunner().invoke(app, [*command, "tensorboard:logs"], catch_exceptions=False)
    assert _placed("tensorboard: logs") == f"tensorboard:{tmp_path / 'logs'}"
    assert _placed("mlflow:sqlite:///x.db") == "mlflow:sqlite:///x.db"
    assert _placed("tensorboard") == "tensorboard"
