"""Trackers: told what the run records, each round once, and unable to harm the run."""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tensorboardX
from PIL import Image
from typer.testing import CliRunner

from coterie import api, cli
from coterie.cli.app import app
from coterie.errors import ConfigError, CoterieError, Interrupted, RunFolderError
from coterie.results import Result
from coterie.runs import launch
from coterie.runs.storage import RunFolder
from coterie.tracking import TRACKERS, Measured, TrackedRun, TrackerWarning, make, make_all
from coterie.tracking._measurements import tag
from coterie.tracking._reported_rounds import ReportedRounds
from coterie.tracking.base import flat, results
from coterie.tracking.tensorboard import picture
from tests.small_runs import SMALL, Killed, assert_same_end, config_of
from tests.tracking.event_files import events, series

KINDS = {"bytes", "seconds", "result", "server", "cross"}  # what names of scalars begin with, besides models


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


class Recorder:
    """A tracker of the user's own."""

    def __init__(self, fails: str = "", error: type[BaseException] = OSError) -> None:
        self.told: list[tuple[str, Any]] = []
        self._fails, self._error = fails, error
        self.run: TrackedRun | None = None
        self.checkpoints: dict[int, list[int]] = {}

    def _tell(self, what: str, value: Any) -> None:
        self.told.append((what, value))
        if self._fails == what or self._fails == f"{what} {value}":
            raise self._error(f"no such {what}\nanywhere")

    def begin(self, run: TrackedRun) -> None:
        self.run = run
        self._tell("begin", run.after)

    def round(self, number: int, measured: Measured) -> None:
        assert self.run is not None
        found = (self.run.path / "checkpoint").glob("*-round-*")
        self.checkpoints[number] = [int(each.name.rsplit("-", 1)[1]) for each in found]
        self._tell("round", number)

    def end(self, summary: Mapping[str, Any] | None) -> None:
        self._tell("end", None if summary is None else summary["rounds"])


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Attackers, newcomers, weights and rounds that are not evaluated."""
    path = tmp_path_factory.mktemp("tracked") / "run"
    config = config_of("fedacs", threads=1, eval_every=2, attack="gaussian:0.3", hold_out=0.2, eval_train=True)
    api.run_config(config, out=path, progress=False, track="tensorboard")
    return path


# ----------------------------------------------------------------------------------------------- what TensorBoard shows


def test_scalars_are_what_was_recorded(tracked: Path) -> None:
    found, result = events(tracked / "tensorboard"), Result(tracked)
    shares, metrics = result.shares, result.metrics
    honest = set(shares.loc[shares["role"] == "honest", "client"])
    assert set(shares["role"]) == {"honest", "attacker", "newcomer"}
    seen = set()
    chosen = metrics[(metrics["model"] != "federation")]
    for (model, split, metric), frame in chosen.groupby(["model", "split", "metric"], observed=True):
        counted = frame if model == "newcomer" else frame[frame["client"].isin(honest)]
        grouped = counted.groupby("round")["value"]
        worst = grouped.max() if metric == "loss" else grouped.min()
        for name, values in (("mean", grouped.mean()), ("std", grouped.std(ddof=0)), ("worst", worst)):
            shown = series(found, f"{model}/{split}/{metric}/{name}")
            assert list(shown) == [2, 4, 5] == list(values.index)
            np.testing.assert_allclose(list(shown.values()), values.to_numpy(), rtol=1e-6, atol=1e-7)
            seen.add(f"{model}/{split}/{metric}/{name}")
    shown = {name for name in found.Tags()["scalars"] if name.split("/")[0] not in KINDS}
    assert shown == seen and {name.split("/")[0] for name in seen} >= {"personal", "global", "newcomer"}


def test_bytes_and_seconds_of_every_round(tracked: Path) -> None:
    found, result = events(tracked / "tensorboard"), Result(tracked)
    for way in ("up", "down"):
        sent = result.metrics[result.metrics["metric"] == f"bytes_{way}"].set_index("round")["value"]
        assert series(found, f"bytes/{way}") == sent.to_dict() and len(sent) == 5
    for stage in ("training", "evaluation"):
        seconds = result.timings.set_index("round")[stage]
        shown = pd.Series(series(found, f"seconds/{stage}"))
        pd.testing.assert_series_equal(shown, seconds, check_names=False, check_dtype=False, rtol=1e-6)


def test_histograms_and_weights(tracked: Path) -> None:
    found, result = events(tracked / "tensorboard"), Result(tracked)
    honest = result.shares.loc[result.shares["role"] == "honest", "client"]
    last = result.metrics.query("model == 'personal' and split == 'test' and metric == 'accuracy' and round == 5")
    values = last.loc[last["client"].isin(honest), "value"].to_numpy()
    shown = found.Histograms("personal/test/accuracy")[-1]
    assert shown.step == 5 and shown.histogram_value.num == len(values) == sum(shown.histogram_value.bucket)
    assert shown.histogram_value.sum == pytest.approx(values.sum())
    assert "personal/validation/accuracy" not in found.Tags()["histograms"]
    images = found.Images("weights")
    assert [image.step for image in images] == result.weight_rounds == [2, 4, 5]
    pixels = np.asarray(Image.open(io.BytesIO(images[-1].encoded_image_string)))
    weights = result.weights(5).to_numpy()
    np.testing.assert_array_equal(pixels[:, :, 0], np.rint(255 * weights / weights.max()))


def test_the_result_and_the_configuration_at_the_end(tracked: Path) -> None:
    found, summary = events(tracked / "tensorboard"), Result(tracked).summary
    assert series(found, "result/personal/final/worst") == {5: pytest.approx(summary["personal"]["final"]["worst"])}
    assert series(found, "result/personal/final/mean")[5] == series(found, "personal/test/accuracy/mean")[5]
    content = found.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    for word in (b"algorithm", b"fedacs", b"settings.p", b"partition", b"natural"):
        assert word in content


def test_a_picture_is_as_bright_as_its_matrix_and_never_large() -> None:
    shown = picture(np.array([[0.0, 0.25], [0.5, -1.0]]))
    assert shown.tolist() == [[0, 128], [255, 0]] and shown.dtype == np.uint8
    assert picture(np.zeros((2, 3))).tolist() == [[0] * 3] * 2
    assert picture(np.array([[np.nan, np.inf, 1.0]])).tolist() == [[0, 0, 255]]
    large = np.kron(np.array([[1.0, 0.0], [0.0, 0.5]]), np.ones((512, 512)))
    assert picture(large).shape == (256, 256)
    assert np.unique(picture(large)[:128, :128]).tolist() == [255] and picture(large)[200, 200] == 128


# ------------------------------------------------------------------------------------------------------------- no harm


def test_a_tracked_run_ends_as_one_that_is_not(tmp_path: Path) -> None:
    config = config_of("fedacs", threads=1)
    api.run_config(config, out=tmp_path / "plain", progress=False)
    api.run_config(config, out=tmp_path / "tracked", progress=False, track=["tensorboard", Recorder()])
    assert_same_end(tmp_path / "plain", tmp_path / "tracked")
    assert (tmp_path / "plain/config.yaml").read_bytes() == (tmp_path / "tracked/config.yaml").read_bytes()
    assert not (tmp_path / "plain/tensorboard").exists()


@pytest.mark.parametrize(
    ("fails", "when", "told"),
    [
        ("begin", "at the beginning", 1),
        ("round 3", "in round 3", 1 + 3),
        ("end", "at the end", 1 + 5 + 1),
    ],
)
def test_a_tracker_that_fails_is_reported_once_and_left_alone(fails: str, when: str, told: int, tmp_path: Path) -> None:
    bad, good, config = Recorder(fails), Recorder(), config_of("local", threads=1)
    with pytest.warns(TrackerWarning) as reported:
        result = api.run_config(config, out=tmp_path / "run", progress=False, track=[bad, good])
    assert [str(each.message) for each in reported] == [
        f"Recorder failed {when} and is told nothing more of {tmp_path / 'run'} "
        f"(OSError: no such {fails.split()[0]} anywhere)"
    ]
    assert result.finished and len(bad.told) == told
    assert good.told == [("begin", 0), *(("round", number) for number in range(1, 6)), ("end", 5)]


def test_a_full_disk_does_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Any, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    write = tensorboardX.RecordWriter.write
    monkeypatch.setattr(
        tensorboardX.RecordWriter, "write", lambda self, data: (full if len(data) > 100 else write)(self, data)
    )
    with pytest.warns(TrackerWarning, match=r"TensorBoard failed in round 1 .*No space left on device\)$"):
        result = api.run_config(config_of("local"), out=tmp_path / "run", progress=False, track="tensorboard")
    assert result.finished


def test_ctrl_c_at_a_tracker_that_does_not_end_is_no_interrupted_run(tmp_path: Path) -> None:
    slow = Recorder("end", KeyboardInterrupt)
    with pytest.warns(TrackerWarning, match="Recorder failed at the end .*KeyboardInterrupt"):
        result = api.run_config(config_of("local"), out=tmp_path / "run", progress=False, track=slow)
    assert result.finished


# ----------------------------------------------------------------------------------------------- runs that are stopped


def test_a_round_is_told_before_the_checkpoint_that_closes_it(tmp_path: Path) -> None:
    tracker = Recorder()
    api.run_config(config_of("local"), out=tmp_path / "run", progress=False, track=tracker)
    assert all(number not in found for number, found in tracker.checkpoints.items())
    assert 2 in tracker.checkpoints[3] and 4 in tracker.checkpoints[5]  # it can see them


def stopped_and_resumed(path: Path, track: Any, error: type[BaseException], again: Any = None) -> None:
    """Stop in the fourth round (a kill leaves the checkpoint of the second), then go on."""
    playing = launch.begin(config_of("fedacs", threads=1), path)
    watched = playing.run

    def interrupted() -> None:
        with pytest.raises(Interrupted if error is KeyboardInterrupt else error):
            api._finish(playing, False, make_all(track, new=path))

    playing.run = lambda watch=None: stop_within(playing, watch, watched, error)  # type: ignore[method-assign]
    interrupted()
    api.resume(path, progress=False, track=again or track)


def stop_within(playing: Any, watch: Any, run: Any, error: type[BaseException]) -> None:
    play_round = playing.simulation.play_round

    def stopping(cohort: Any, number: int) -> Any:
        info = play_round(cohort, number)
        if number == 4:
            raise error
        return info

    playing.simulation.play_round = stopping
    if error is Killed:
        playing.keep = lambda: None
    run(watch)


@pytest.mark.parametrize("error", [KeyboardInterrupt, Killed])
def test_a_resumed_run_shows_each_round_once(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "cut"
    stopped_and_resumed(path, "tensorboard", error)
    assert len(list((path / "tensorboard").iterdir())) == 2
    api.run_config(config_of("fedacs", threads=1), out=tmp_path / "whole", progress=False, track="tensorboard")
    cut, whole = events(path / "tensorboard"), events(tmp_path / "whole/tensorboard")
    assert cut.Tags() == whole.Tags()
    for name in whole.Tags()["scalars"]:
        if "seconds" not in name:
            assert series(cut, name) == series(whole, name), name
    assert list(series(cut, "personal/test/accuracy/mean")) == [1, 2, 3, 4, 5]
    assert [image.step for image in cut.Images("weights")] == [1, 2, 3, 4, 5]
    assert_same_end(tmp_path / "whole", path)


def test_what_is_told_of_a_run_that_is_stopped(tmp_path: Path) -> None:
    first, second = Recorder(), Recorder()
    stopped_and_resumed(tmp_path / "run", first, Killed, second)
    rounds = [("round", number) for number in range(1, 6)]
    assert first.told == [("begin", 0), *rounds[:3], ("end", None)]
    assert second.told == [("begin", 2), *rounds[2:], ("end", 5)]


def test_reported_rounds_are_remembered(tmp_path: Path) -> None:
    first = ReportedRounds(tmp_path, "mlflow")
    assert first.run is None and first.is_new(1)
    first.begin("abc")
    first.store(3)
    ReportedRounds(tmp_path, "wandb").begin("xyz")
    again = ReportedRounds(tmp_path, "mlflow")
    assert again.run == "abc" and [again.is_new(number) for number in (2, 3, 4)] == [False, False, True]
    (tmp_path / "tracking.json").write_text("{")
    assert ReportedRounds(tmp_path, "mlflow").run is None


# ------------------------------------------------------------------------------------------------------- by their names


@pytest.mark.parametrize(
    ("track", "sentence"),
    [
        (["tensorbord"], "there is no tracker 'tensorbord': did you mean 'tensorboard'?"),
        (["tensorboard:"], "track is 'tensorboard:', but a FOLDER must follow the colon"),
        (["tensorboard", "tensorboard:logs"], "track has 'tensorboard:logs', but tensorboard is given twice"),
        ([3], "track has 3, but each must be a name (tensorboard, mlflow, wandb) or a Tracker"),
    ],
)
def test_mistakes_are_one_sentence_before_anything_begins(
    track: Any, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refused:
        api.run_config(config_of("local"), progress=False, track=track)
    assert str(refused.value).startswith(sentence) and "\n" not in str(refused.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("name", TRACKERS)
def test_a_package_that_is_missing_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, TRACKERS[name].package, None)
    extra = "coterie" if name == "tensorboard" else f"coterie[{name}]"
    with pytest.raises(ConfigError) as refused:
        make(name)
    assert str(refused.value) == (f"track is {name!r}, but {TRACKERS[name].package} is not installed: install {extra}")


def test_a_folder_for_many_runs(tmp_path: Path) -> None:
    logs, config = tmp_path / "logs", config_of("local", rounds=2)
    api.run_config(config, out=tmp_path / "one", progress=False, track=f"tensorboard:{logs}")
    assert [each.name for each in logs.iterdir()] == ["one"]
    assert list(series(events(logs / "one"), "bytes/up")) == [1, 2] and not (tmp_path / "one/tensorboard").exists()
    with pytest.raises(RunFolderError, match="holds the events of another run"):
        api.run_config(config, out=tmp_path / "elsewhere/one", progress=False, track=f"tensorboard:{logs}")
    assert not (tmp_path / "elsewhere").exists()


def test_names_and_tables() -> None:
    assert tag("personal", "cross", "s_acc 0.5") == "personal/cross/s_acc_0.5"
    assert flat({"a": 1, "b": {"c": {"d": 2}}, "e": None}) == {"a": 1, "b.c.d": 2, "e": None}
    assert results({"a": {"b": 1.5, "c": None}, "d": "x", "e": True, "f": 2}) == {"result/a/b": 1.5, "result/f": 2.0}
    run = TrackedRun(Path("runs/x"), {"lr": 0.1, "none": None, "metrics": [], "s": {"p": [1, 2]}, "on": True})
    assert run.settings() == {"lr": 0.1, "s.p": "[1, 2]", "on": True} and run.name == "x"


# ----------------------------------------------------------------------------------------------------- the command line


def options(**more: Any) -> list[str]:
    shared = {**SMALL, "rounds": 2, "threads": 1, **more}
    return [word for name, value in shared.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def invoke(*words: str) -> None:
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output


def test_the_commands(tmp_path: Path) -> None:
    run, logs = tmp_path / "run", tmp_path / "logs"
    invoke("run", "local", *options(out=run), "--quiet", "--track", "tensorboard")
    assert list(series(events(run / "tensorboard"), "personal/test/accuracy/mean")) == [1, 2]
    with RunFolder.open(run) as folder:
        folder.rewind(0)
    for path in (run / "checkpoint").iterdir():
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    invoke("resume", str(run), "--quiet", "--track", "tensorboard")
    assert list(series(events(run / "tensorboard"), "personal/test/accuracy/mean")) == [1, 2]
    words = ["compare", "local", "fedavg", "--seeds", "1", *options(out=tmp_path / "all"), "--quiet"]
    invoke(*words, "--track", f"tensorboard:{logs}")
    assert {each.name for each in logs.iterdir()} == {"local-seed1", "fedavg-seed1"}
    with pytest.raises(CoterieError, match="there is no tracker 'x'"):
        invoke("compare", "local", *options(out=tmp_path / "new"), "--track", "x")
    assert not (tmp_path / "new").exists()


def test_the_command_line_reports_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    words = ["run", "local", *options(out=tmp_path / "run"), "--quiet", "--track", f"tensorboard:{tmp_path / 'file'}"]
    monkeypatch.setattr(sys, "argv", ["coterie", *words])
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    monkeypatch.setattr(sys, "path", list(sys.path))
    with pytest.warns(TrackerWarning) as reported, pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code and capsys.readouterr().out == ""
    (said,) = reported
    text = warnings.formatwarning(said.message, said.category, said.filename, said.lineno)
    assert text.startswith("warning: TensorBoard failed at the beginning") and text.count("\n") == 1
    assert warnings.formatwarning("x", UserWarning, "here.py", 3) != "warning: x\n"
