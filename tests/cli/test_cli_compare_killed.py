"""Comparisons as real processes: one at a time in a folder, and killed ones that end with the same table."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from coterie.errors import RunFolderError
from coterie.runs.storage import lock_folder
from coterie.studies.comparison import ComparisonPlan, compare, make_plan
from tests.small_runs import SMALL

ROUNDS = 150  # more than fit between the first checkpoint and the signal
SHARED: dict[str, Any] = {**SMALL, "rounds": ROUNDS, "checkpoint_every": 7, "eval_every": 5, "threads": 1}
METHODS = ("fedavg", "local")
COMMAND = [sys.executable, "-W", "ignore", "-c", "from coterie.cli import main; main()"]


@pytest.fixture(autouse=True, scope="module")
def _quick_disk() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:  # in this process; the others are as they are
        patched.setattr(os, "fsync", lambda handle: None)
        yield


def planned() -> ComparisonPlan:
    return make_plan({"methods": list(METHODS), "seeds": [1], "local_epochs": 1, **SHARED})


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "all"
    compare(planned(), path, progress=False)
    return path


@contextmanager
def comparing(path: Path, *more: str) -> Iterator[subprocess.Popen[str]]:
    """Begin a comparison in a process, and wait until it is in the midst of a run."""
    options = [word for name, value in SHARED.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words = [*COMMAND, "compare", *METHODS, "--seeds", "1", *options, "--local-epochs", "1", "--quiet"]
    with subprocess.Popen(
        [*words, "--out", str(path), *more], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        while process.poll() is None and not any(path.glob("runs/*/checkpoint/*-round-*")):
            time.sleep(0.002)
        assert process.poll() is None, process.communicate()
        yield process


def assert_same_end(one: Path, two: Path) -> None:
    names = ["table.md", "table.tex", "table.csv", *(f"runs/{name}-seed1/metrics.parquet" for name in METHODS)]
    for name in names:
        assert (one / name).read_bytes() == (two / name).read_bytes(), name


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_a_killed_comparison_goes_on_and_ends_with_the_same_table(
    number: signal.Signals, code: int, whole: Path, tmp_path: Path
) -> None:
    path = tmp_path / "all"
    with comparing(path) as process:
        with pytest.raises(RunFolderError) as refused:
            compare(planned(), path, progress=False)
        assert str(refused.value) == (
            f"{path} is in use by another process (process {process.pid}): wait until it ends, or stop it"
        )
        process.send_signal(number)
        out, err = process.communicate()
    assert process.returncode == code and out == ""
    expected = f"interrupted; 0 of 2 runs are finished and all is kept in {path}: go on with the same command\n"
    assert err == ("" if number == signal.SIGKILL else expected)
    assert not (path / "table.md").exists()
    compare(planned(), path, progress=False)
    assert_same_end(whole, path)


def test_runs_side_by_side_end_soon_after_their_parent_was_killed(whole: Path, tmp_path: Path) -> None:
    path = tmp_path / "all"
    with comparing(path, "--jobs", "2") as process:
        process.kill()
        process.communicate()
    for run in path.glob("runs/*"):
        until = time.monotonic() + 30
        while time.monotonic() < until:
            try:
                os.close(lock_folder(run))
                break
            except RunFolderError:
                time.sleep(0.05)
        else:
            pytest.fail(f"{run} is still in use")
        assert not (run / "summary.json").exists()
    compare(planned(), path, progress=False)
    assert_same_end(whole, path)


def test_a_comparison_that_ended_leaves_its_folder_free(whole: Path) -> None:
    os.close(lock_folder(whole))
    before = (whole / "table.md").stat().st_mtime_ns
    compare(planned(), whole, progress=False)
    assert (whole / "table.md").stat().st_mtime_ns > before


def test_a_foreign_folder_is_refused_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunFolderError, match="holds no comparison"):
        compare(planned(), tmp_path, progress=False)
    assert [each.name for each in tmp_path.iterdir()] == ["notes.txt"]
