from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.errors import CheckpointError, RunFolderError
from coterie.runs.storage import RunFolder, atomic_files, read_config

CONFIG: dict[str, Any] = {"algorithm": "fedacs", "lr": 1e-05, "seed": 3, "partition": {"name": "iid"}, "set": [1, None]}


def test_keeps_the_configuration(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path / "a" / "run", CONFIG) as run:
        assert run.config == CONFIG and list(run.config) == list(CONFIG)
        identity = run.run_id
        run.config["lr"] = 7
        assert run.config == CONFIG
    with RunFolder.open(tmp_path / "a" / "run") as run:
        assert run.config == CONFIG and run.run_id == identity


def test_whoever_changes_a_configuration_that_was_read_changes_nobody_elses(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "a", CONFIG).close()
    RunFolder.create(tmp_path / "b", CONFIG).close()
    found = read_config(tmp_path / "a")
    found["partition"]["name"] = found["set"][0] = "another"
    assert read_config(tmp_path / "a") == read_config(tmp_path / "b") == CONFIG
    file = tmp_path / "a" / "config.yaml"
    file.write_text(file.read_text().replace("seed: 3", "seed: 4"))
    assert read_config(tmp_path / "a") == {**CONFIG, "seed": 4}


def test_the_run_is_named_by_its_configuration(tmp_path: Path) -> None:
    with (
        RunFolder.create(tmp_path / "a", CONFIG) as one,
        RunFolder.create(tmp_path / "b", dict(reversed(CONFIG.items()))) as same,
        RunFolder.create(tmp_path / "c", {**CONFIG, "seed": 4}) as other,
    ):
        assert one.run_id == same.run_id != other.run_id


def test_refuses_a_run_that_exists(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, CONFIG).close()
    with pytest.raises(RunFolderError, match=r"holds a run already: choose another --out, or `coterie resume"):
        RunFolder.create(tmp_path, CONFIG)


def test_refuses_a_folder_with_something_in_it_and_leaves_nothing_there(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunFolderError, match=r"not empty \(it holds 'thesis.tex'\): choose another --out"):
        RunFolder.create(tmp_path, CONFIG)
    assert os.listdir(tmp_path) == ["thesis.tex"]


def test_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder.create(tmp_path / "run", CONFIG)
    with pytest.raises(RunFolderError, match="cannot be written"):
        RunFolder.create(tmp_path / "run" / "below", CONFIG)


def test_takes_an_empty_folder_and_one_whose_run_never_began(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch()
    (tmp_path / ".config.yaml.draft").touch()
    RunFolder.create(tmp_path, CONFIG).close()
    assert read_config(tmp_path) == CONFIG


def test_opens_only_runs(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="there is no run in"):
        RunFolder.open(tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match=r"is not a run's folder: it holds no config\.yaml"):
        RunFolder.open(tmp_path)
    assert not os.listdir(tmp_path)
    for text, reason in (("a: [", "cannot be read"), ("- 1", "holds a list")):
        (tmp_path / "config.yaml").write_text(text)
        with pytest.raises(RunFolderError, match=reason):
            RunFolder.open(tmp_path)
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(RunFolderError, match="cannot be read"):
        RunFolder.open(tmp_path)


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with (
        RunFolder.create(tmp_path, CONFIG),
        pytest.raises(RunFolderError, match=rf"in use by another process \(process {os.getpid()}\)"),
    ):
        RunFolder.open(tmp_path)
    RunFolder.open(tmp_path).close()


def test_a_forgotten_folder_is_released(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path, CONFIG)
    del run
    gc.collect()
    RunFolder.open(tmp_path).close()


def test_a_refused_folder_is_released(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="cannot represent"):
        RunFolder.create(tmp_path, {"lr": object()})
    RunFolder.create(tmp_path, CONFIG).close()


def test_the_lock_holds_between_processes_and_ends_with_a_kill(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, CONFIG).close()
    code = (
        "import fcntl, os, sys, time; handle = os.open(sys.argv[1], os.O_RDWR); fcntl.flock(handle, fcntl.LOCK_EX); "
        "print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / ".lock")], stdout=subprocess.PIPE) as holder:
        try:
            assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
            with pytest.raises(RunFolderError, match="in use by another process"):
                RunFolder.open(tmp_path)
        finally:
            holder.kill()
    RunFolder.open(tmp_path).close()


def test_choices_are_kept(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, CONFIG) as run:
        assert run.choices == {}
        run.write_choices({"kernel": "stacked", "chunk": 64})
    with RunFolder.open(tmp_path) as run:
        assert run.choices == {"kernel": "stacked", "chunk": 64}


def test_a_summary_is_json_for_everyone(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, CONFIG) as run:
        assert run.summary() is None
        run.write_summary({"a": float("nan"), "b": [float("inf"), 1.5], "c": {"d": (1, None)}})
        assert run.summary() == {"a": None, "b": [None, 1.5], "c": {"d": [1, None]}}
    assert "NaN" not in (tmp_path / "summary.json").read_text()


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_damaged_json_is_named(tmp_path: Path, text: str) -> None:
    with RunFolder.create(tmp_path, CONFIG) as run:
        (tmp_path / "choices.json").write_text(text)
        with pytest.raises(RunFolderError, match=r"choices\.json is damaged"):
            _ = run.choices


def record(run: RunFolder, number: int) -> None:
    run.metrics.append(number, "personal", "test", "accuracy", [number / 10], [0])
    run.collaboration_weights.append(number, [[1.0]], [0])
    run.timings.append(number, train=1.0)


def test_what_is_recorded_lies_on_the_disk_before_its_checkpoint(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, CONFIG) as run:
        for number in (1, 2, 3):
            record(run, number)
            if number < 3:
                run.checkpoint(number, {"at": torch.tensor(number)}, {}, {"best": number})
    with RunFolder.open(tmp_path) as run:  # killed in round 3
        found = run.checkpoints.latest()
        assert found is not None and (found.round, found.extra) == (2, {"best": 2})
        run.rewind(found.round)
        assert (
            run.metrics.read()["round"].tolist()
            == run.collaboration_weights.rounds()
            == run.timings.read()["round"].tolist()
        )
        assert run.collaboration_weights.rounds() == [1, 2]
        run.rewind(1)
        assert run.metrics.read()["round"].tolist() == run.collaboration_weights.rounds() == [1]
        run.rewind(-1)
        assert run.metrics.read().empty and run.collaboration_weights.rounds() == [] and run.timings.total() == 0


def test_a_diverged_run_keeps_what_it_recorded(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, CONFIG) as run:
        record(run, 1)
        run.flush()
    with RunFolder.open(tmp_path) as run:
        assert run.metrics.read()["round"].tolist() == [1]


def test_finish_and_rewind(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, CONFIG) as run:
        record(run, 1)
        run.finish({"rounds": 1})
        assert (tmp_path / "metrics.parquet").exists() and run.summary() == {"rounds": 1}
        run.rewind(1)
        assert run.summary() is None and run.metrics.read()["round"].tolist() == [1]


def test_the_configuration_is_fixed_once_there_are_checkpoints(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, CONFIG) as run:
        run.write_config({**CONFIG, "resolved": True})
        assert run.config["resolved"]
        run.checkpoint(0, {}, {})
        with pytest.raises(RunFolderError, match="can no longer change"):
            run.write_config(CONFIG)


def test_a_configuration_edited_by_hand_makes_its_checkpoints_foreign(tmp_path: Path) -> None:
    with RunFolder.create(tmp_path, CONFIG) as run:
        run.checkpoint(1, {}, {})
    file = tmp_path / "config.yaml"
    file.write_text(file.read_text().replace("seed: 3", "seed: 4"))
    with RunFolder.open(tmp_path) as run, pytest.raises(CheckpointError, match="belongs to another run"):
        run.checkpoints.latest()


def test_a_full_disk_is_said_in_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError(28, "No space left on device")

    with RunFolder.create(tmp_path, CONFIG) as run:
        record(run, 1)
        monkeypatch.setattr(atomic_files, "sync", full)
        with pytest.raises(RunFolderError, match=r"cannot be written \(No space left on device\)"):
            run.checkpoint(1, {}, {})


def test_a_failed_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "file"
    atomic_files.write_text(target, "old")
    with pytest.raises(RuntimeError), atomic_files.replacing(target) as draft:
        draft.write_text("half of the n")
        raise RuntimeError
    assert target.read_text() == "old"
    assert [path for path in tmp_path.iterdir() if not atomic_files.is_draft(path)] == [target]
