"""Runs that are made longer: they stay the same runs, and end as if they had been as long from the start."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml

from coterie import api
from coterie.errors import RunFolderError
from coterie.runs.storage import RunFolder
from coterie.runs.storage import run_folder as run_folder_module
from tests.small_runs import Killed, config_of, last_state, same

ROUNDS = 5


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def play(path: Path, name: str, rounds: int, **more: Any) -> None:
    api.run_config(config_of(name, rounds=rounds, **more), out=path, progress=False)


@pytest.mark.parametrize("name", ["fedacs", "fedavg_ft", "flame"])
def test_a_lengthened_run_is_the_long_run_bit_for_bit(name: str, tmp_path: Path) -> None:
    """In two lengthenings, of which one ends at a round at which the long run is not evaluated."""
    long, grown = tmp_path / "long", tmp_path / "grown"
    play(long, name, ROUNDS, eval_every=2)
    play(grown, name, 1, eval_every=2)
    for rounds in (3, ROUNDS):
        api.play_on(grown, None, progress=False, rounds=rounds)
    one, two = last_state(long), last_state(grown)
    assert one.round == two.round == ROUNDS
    assert same(one.server, two.server) and same(one.clients, two.clients)
    expected, found = api.load(long), api.load(grown)
    assert found.config == expected.config
    assert found.summary["personal"]["final"] == expected.summary["personal"]["final"]
    assert found.summary["bytes"] == expected.summary["bytes"]
    of_clients = found.metrics[found.metrics["client"] >= 0]
    assert of_clients["round"].unique().tolist() == [1, 2, 3, 4, 5]  # ends of its stages are evaluated as well
    common = of_clients[of_clients["round"].isin([2, 4, 5])].reset_index(drop=True)
    there = expected.metrics[expected.metrics["client"] >= 0].reset_index(drop=True)
    pd.testing.assert_frame_equal(common, there)
    for split in ("test", "validation"):
        own, theirs = (each.answers_after(ROUNDS, split) for each in (found, expected))
        assert own is not None and theirs is not None
        pd.testing.assert_frame_equal(own, theirs)
        kept = found.answers_after(3, split)
        assert kept is not None and kept["round"].unique().tolist() == [3] and len(kept) == len(own)
        assert found.answers_after(2, split) is None


def test_one_that_is_as_long_already_stays_as_it_is(tmp_path: Path) -> None:
    play(tmp_path / "run", "fedavg", 2)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").glob("*.*")}
    for rounds in (1, 2):
        api.play_on(tmp_path / "run", None, progress=False, rounds=rounds)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").glob("*.*")} == before


@pytest.mark.parametrize("after", ["run.json", "config.yaml"])
def test_killed_while_it_is_lengthened(after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    play(run, "fedacs", 2)
    written: list[str] = []

    def killing(write: Any) -> Any:
        def wrapped(path: Path, *rest: Any, **more: Any) -> None:
            if written and written[-1] == after:
                raise Killed
            write(path, *rest, **more)
            written.append(path.name)
            if path.name == after:
                raise Killed

        return wrapped

    with monkeypatch.context() as patched, pytest.raises(Killed):
        for name in ("write_json", "write_text"):
            patched.setattr(run_folder_module, name, killing(getattr(run_folder_module, name)))
        api.play_on(run, None, progress=False, rounds=4)
    assert written[-1] == after
    assert yaml.safe_load((run / "config.yaml").read_text())["rounds"] == (2 if after == "run.json" else 4)
    assert last_state(run).round == 2  # its checkpoints are still its own
    found = api.play_on(run, None, progress=False, rounds=4)
    play(tmp_path / "long", "fedacs", 4)
    assert found.summary["rounds"] == 4
    assert same(last_state(run).clients, last_state(tmp_path / "long").clients)


def test_one_that_another_process_writes_is_not_lengthened(tmp_path: Path) -> None:
    play(tmp_path / "run", "fedavg", 1)
    with RunFolder.open(tmp_path / "run"), pytest.raises(RunFolderError, match="another process"):
        api.play_on(tmp_path / "run", None, progress=False, rounds=2)
