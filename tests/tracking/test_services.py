"""MLflow and Weights & Biases, with the real packages where they are installed."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coterie import api
from coterie.errors import ConfigError
from coterie.results import Result
from coterie.runs import launch
from coterie.runs.storage.atomic_files import read_json
from coterie.tracking import make_all
from tests.small_runs import assert_same_end, config_of

# What these packages warn of is theirs.
pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


class Stop(BaseException):
    """Stands for SIGKILL."""


def cut_and_resumed(path: Path, track: str) -> Result:
    """Stop a run after its third round, of which the checkpoint is that of the second, and go on with it."""
    playing = launch.begin(config_of("fedacs", threads=1), path)

    def told(number: int, mean: float | None) -> None:
        if number == 3:
            raise Stop

    playing.keep = lambda: None  # type: ignore[method-assign]
    with pytest.raises(Stop):
        api._finish(playing, told, make_all(track, new=path))
    return api.resume(path, progress=False, track=track)


def expected(result: Result) -> dict[int, float]:
    """The mean of the personal models' accuracy after each round, off the metrics."""
    chosen = result.metrics.query("model == 'personal' and split == 'test' and metric == 'accuracy'")
    means: dict[int, float] = chosen.groupby("round")["value"].mean().to_dict()
    return means


NAME = "personal/test/accuracy/mean"


# --------------------------------------------------------------------------------------------------------------- MLflow


@pytest.fixture
def mlflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    package = pytest.importorskip("mlflow", reason="MLflow is not installed: install coterie[mlflow] to test it")
    monkeypatch.chdir(tmp_path)  # where it puts files of its own
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    return package


def history(client: Any, run: str, name: str) -> dict[int, float]:
    points = [(point.step, point.value) for point in client.get_metric_history(run, name)]
    assert len(dict(points)) == len(points), f"{name} has a step twice: {points}"
    return dict(sorted(points))


def test_mlflow(mlflow: Any, tmp_path: Path) -> None:
    uri = f"sqlite:///{tmp_path / 'store.db'}"
    result = cut_and_resumed(tmp_path / "run", f"mlflow:{uri}")
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("coterie").experiment_id])
    assert run.info.run_name == "run" and run.info.status == "FINISHED"
    assert history(client, run.info.run_id, NAME) == pytest.approx(expected(result)) and len(expected(result)) == 5
    assert list(history(client, run.info.run_id, "bytes/up")) == [1, 2, 3, 4, 5]
    assert run.data.params["algorithm"] == "fedacs" and run.data.params["settings.local_epochs"].isdecimal()
    assert run.data.metrics["result/personal/final/mean"] == pytest.approx(result.summary["personal"]["final"]["mean"])
    assert [each.path for each in client.list_artifacts(run.info.run_id)] == ["summary.json"]
    assert read_json(tmp_path / "run/tracking.json")["mlflow"] == {"run": run.info.run_id, "round": 5}
    other = api.run_config(config_of("fedacs", threads=1), out=tmp_path / "plain", progress=False)
    assert_same_end(other.path, result.path)


def test_mlflow_with_a_store_that_cannot_be_used(mlflow: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^track is mlflow:nonsense://x, which cannot be used \("):
        api.run_config(config_of("local"), out=tmp_path / "run", progress=False, track="mlflow:nonsense://x")
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------------------------------------------- Weights & Biases


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    package = pytest.importorskip("wandb", reason="wandb is not installed: install coterie[wandb] to test it")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    return package


def records(file: Path) -> Iterator[bytes]:
    """Read the records of an offline run: blocks of 32 KiB with pieces of (checksum, length, kind)."""
    data, block = file.read_bytes(), 32768
    assert data[:4] == b":W&B"
    place, held = 7, b""
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        piece = data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind not in (1, 2, 3, 4):  # whole, first, middle, last
            break
        held = piece if kind in (1, 2) else held + piece
        if kind in (1, 4):
            yield held


def logged(run: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """What an offline run holds for its server: the rows of its history, and its summary."""
    from wandb.proto.wandb_internal_pb2 import Record

    rows, summary = [], {}
    for file in sorted(run.glob("wandb/offline-run-*/run-*.wandb")):
        for data in records(file):
            record = Record.FromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                rows.append({".".join(item.nested_key) or item.key: item.value_json for item in record.history.item})
            elif kind == "summary":
                summary |= {
                    ".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.summary.update
                }
    return [{name: json.loads(value) for name, value in row.items()} for row in rows], summary


def test_wandb(wandb: Any, tmp_path: Path) -> None:
    result = cut_and_resumed(tmp_path / "run", "wandb:trial")
    rows, summary = logged(tmp_path / "run")
    until = time.monotonic() + 20
    while "result/personal/final/mean" not in summary and time.monotonic() < until:
        time.sleep(0.1)  # another process writes
        rows, summary = logged(tmp_path / "run")
    points = [(row["_step"], row[NAME]) for row in rows if NAME in row]
    assert dict(points) == pytest.approx(expected(result)) and [step for step, _ in points] == [1, 2, 3, 4, 5]
    clients = "personal/test/accuracy/clients"
    assert rows[0][f"{clients}._type"] == "histogram" and sum(rows[0][f"{clients}.values"]) == 5
    assert rows[0]["weights._type"] == "image-file"
    assert summary["result/personal/final/mean"] == pytest.approx(result.summary["personal"]["final"]["mean"])
    names = {file.parent.name.rsplit("-", 1)[1] for file in (tmp_path / "run").glob("wandb/offline-run-*/run-*.wandb")}
    assert names == {read_json(tmp_path / "run/tracking.json")["wandb"]["run"]}  # both parts are of one run
    other = api.run_config(config_of("fedacs", threads=1), out=tmp_path / "plain", progress=False)
    assert_same_end(other.path, result.path)
