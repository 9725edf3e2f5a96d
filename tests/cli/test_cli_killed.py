"""A real process that is killed, and the run that goes on after it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from coterie import api, randomness
from coterie.config import from_mapping
from coterie.runs import launch
from tests.small_runs import SMALL, assert_same_end, last_state

ROUNDS = 300  # more than fit between the first checkpoint and the signal
LONG = {**SMALL, "rounds": ROUNDS, "checkpoint_every": 3, "eval_every": 2, "threads": 1}
COMMAND = [sys.executable, "-W", "ignore", "-c", "from coterie.cli import main; main()"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "run"
    api._finish(launch.begin(from_mapping({"algorithm": "fedamp", "local_epochs": 1, **LONG}), path), False)
    return path


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_killed_at_some_instant(number: signal.Signals, code: int, whole: Path, tmp_path: Path) -> None:
    options = [word for name, value in LONG.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    path = tmp_path / "run"
    words = [*COMMAND, "run", "fedamp", *options, "--local-epochs", "1", "--quiet", "--out", str(path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not any((path / "checkpoint").glob("*-round-*")):
            time.sleep(0.002)
        time.sleep(float(randomness.stream(os.getpid(), "instant of a kill", int(number)).uniform(0, 0.2)))
        process.send_signal(number)
        out, err = process.communicate()
    assert process.returncode == code, err
    reached = last_state(path).round
    assert 0 < reached < ROUNDS and out == ""
    if number == signal.SIGINT:
        assert err == f"interrupted; everything up to round {reached} is kept, go on with: coterie resume {path}\n"
    if number == signal.SIGKILL:
        assert err == ""
    api.resume(path, progress=False)
    assert_same_end(whole, path)
