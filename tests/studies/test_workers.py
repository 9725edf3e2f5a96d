"""Processes that play groups of runs: they live on, share the cores, and leave nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.errors import ConfigError, CoterieWarning
from coterie.memory import GPU_SHARE, gpu_share
from coterie.studies.comparison import PlannedRun, make_plan, workers
from coterie.studies.comparison.workers import (
    EndedRun,
    Group,
    RoundCallback,
    play_groups,
    usable_cores,
    workers_that_gain,
    workers_that_pay,
)
from tests.small_runs import SMALL

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Whoever runs the tests in the background may have Ctrl-C ignored, which what they start would inherit.
HEARD = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
COMMAND = [sys.executable, "-W", "ignore", "-c", f"{HEARD}; from coterie.cli import main; main()"]
Rounds = list[tuple[str, int, float | None]]


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2]))  # workers find the functions of this file


def planned(seeds: int) -> tuple[PlannedRun, ...]:
    return make_plan({"methods": ["fedavg"], "seeds": list(range(1, seeds + 1)), **SMALL}).runs


def report(group: Group, round_ended: RoundCallback) -> Iterator[EndedRun]:
    """Play nothing, and say of each run where it was."""
    where = {"process": os.getpid(), "threads": torch.get_num_threads(), "given": [os.environ[n] for n in THREADS]}
    where["share"] = gpu_share()
    for run in group:
        round_ended(run, 0, None)
        round_ended(run, 1, 0.25 * run.config.seed)
        yield run, json.dumps(where)


def fail(group: Group, round_ended: RoundCallback) -> Iterator[EndedRun]:
    """Play the first seed; the second meets a mistake, and the third the end of its process."""
    for run in group:
        if run.config.seed == 2:
            raise ConfigError("lr is too large")
        if run.config.seed == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        yield run, None


def chatter(group: Group, round_ended: RoundCallback) -> Iterator[EndedRun]:
    """Tell more than a pipe holds, of which nobody hears the most, before a stop can be taken."""
    stopped = list[int]()
    before = signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    for run in group:
        for number in range(20_000):
            round_ended(run, number, None)
        yield run, None
    signal.signal(signal.SIGTERM, before)
    if stopped:
        raise KeyboardInterrupt


def listened(into: Rounds) -> RoundCallback:
    return lambda run, number, mean: into.append((run.name, number, mean))


def test_workers_live_on_and_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "usable_cores", lambda: 7)  # 3 for each of two
    monkeypatch.setattr(torch, "get_num_threads", lambda: 12)
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    monkeypatch.setenv(GPU_SHARE, "0.5")
    runs = planned(7)
    groups, rounds = [runs[:2], runs[2:3], runs[3:6], runs[6:]], Rounds()
    playing = play_groups(groups, report, 2, listened(rounds))
    ended = {run.name: json.loads(text or "") for run, text in playing}
    assert sorted(ended) == sorted(run.name for run in runs)
    processes = {place["process"] for place in ended.values()}
    assert len(processes) == 2 and os.getpid() not in processes
    for group in groups:  # one process plays a whole group
        assert len({ended[run.name]["process"] for run in group}) == 1
    assert {place["threads"] for place in ended.values()} == {3}
    assert {place["share"] for place in ended.values()} == {0.25}, "half of a GPU for both, a quarter for each"
    assert all(place["given"] == ["3", "3", "3"] for place in ended.values())
    assert os.environ["OMP_NUM_THREADS"] == "5"  # what this process was given is as it was
    for run in runs:
        assert [each[1:] for each in rounds if each[0] == run.name] == [(0, None), (1, 0.25 * run.config.seed)]
    for process in processes:
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)


def test_in_turn_tells_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in THREADS:
        monkeypatch.setenv(name, "1")
    runs, rounds = planned(3), Rounds()
    ended = list(play_groups([runs[:2], runs[2:]], report, 1, listened(rounds)))
    assert [run for run, _ in ended] == list(runs)
    assert [each[1:] for each in rounds] == [(0, None), (1, 0.25), (0, None), (1, 0.5), (0, None), (1, 0.75)]


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (2, "fedavg-seed2: lr is too large"),
        (
            3,
            "the process that played fedavg-seed3 was ended by signal 9 (for lack of memory?): go on with the same "
            "command",
        ),
    ],
)
def test_what_stops_a_worker_is_said_and_the_others_end(broken: int, said: str) -> None:
    runs, ended = planned(3), []
    with pytest.raises(ConfigError) as stopped:
        for run, _ in play_groups([runs[:1], [runs[broken - 1]]], fail, 2, lambda *round_ended: None):
            ended.append(run.name)
    assert str(stopped.value) == said
    assert set(ended) <= {"fedavg-seed1"}


def test_a_worker_that_has_much_to_tell_is_heard_to_its_end() -> None:
    runs = planned(2)

    def stop(run: PlannedRun, number: int, mean: float | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(play_groups([runs[:1], runs[1:]], chatter, 2, stop))


def test_groups_are_divided_among_workers() -> None:
    runs = planned(9)
    sizes = [[len(part) for part in workers.divided([runs[:6], runs[6:]], count)] for count in (1, 2, 3, 4, 9, 12)]
    assert sizes == [[6, 3], [6, 3], [3, 3, 3], [2, 1, 3, 3], [1] * 9, [1] * 9]
    assert [run for part in workers.divided([runs[:6], runs[6:]], 4) for run in part] == list(runs)
    assert workers.divided([], 3) == []


def test_runs_of_a_seed_stay_with_one_worker() -> None:
    runs = make_plan({"methods": ["fedavg", "local", "fedacs"], "seeds": [3, 1], **SMALL}).runs
    parts = workers.divided([runs], 2)
    assert [{run.config.seed for run in part} for part in parts] == [{3}, {1}]
    assert [[run.method for run in part] for part in parts] == [["fedavg", "local", "fedacs"]] * 2


def test_as_many_workers_as_pay_for_their_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "usable_cores", lambda: 8)
    monkeypatch.setattr(workers, "free_memory", lambda: 2**40)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def count(seeds: int, **values: Any) -> int:
        small = {"clients": 100, "participation": 0.1, "data": "digits", "rounds": 500, "device": "auto"}
        return workers_that_pay(make_plan({"methods": ["fedavg"], "seeds": list(range(seeds)), **small, **values}).runs)

    # 500 rounds of ten clients are a third of what a process is started for.
    assert [count(seeds) for seeds in (1, 2, 3, 5, 6, 16, 30)] == [1, 1, 1, 1, 2, 5, 8]
    assert [count(2, rounds=rounds) for rounds in (1499, 1500, 10**6)] == [1, 2, 2], "no more than there are runs"
    assert [count(30, threads=threads) for threads in (1, 2, 3, 8, 9)] == [8, 4, 2, 1, 1]
    assert count(30, participation=1.0, rounds=50) == 8 and count(30, participation=0.001, rounds=5000) == 8
    monkeypatch.setattr(workers, "free_memory", lambda: 7 * 2**30)
    assert count(30) == 3, "each of them needs two gigabytes"
    (tmp_path / "large.csv").write_bytes(b"x" * 2**20)
    monkeypatch.setattr(workers, "_ROOM", 1)
    monkeypatch.setattr(workers, "free_memory", lambda: 5 * workers._OF_A_FILE * 2**20 + 5)
    assert count(30, data=f"table:{tmp_path / 'large.csv'},label=y") == 5, "each of them reads the file"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert count(30) == 1 and count(30, device="cuda:0") == 1 and count(30, device="cpu") == 8


def test_no_more_workers_than_gain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    monkeypatch.setattr(workers, "usable_cores", lambda: 4)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [workers_that_gain(jobs, 9, {"cpu", "auto"}) for jobs in (1, 3, 8)] == [1, 3, 4]
        assert [workers_that_gain(3, runs, {"cpu"}) for runs in (0, 1, 2, 5)] == [1, 1, 2, 3]
        assert workers_that_gain(1, 5, {"cuda"}) == 1
    for devices in ({"cuda:1"}, {"cpu", "cuda"}):
        with pytest.warns(CoterieWarning, match=r"^jobs is 8, but the runs share a GPU, .*: leave --jobs out$"):
            assert workers_that_gain(8, 9, devices) == 8
    (tmp_path / "control").touch()  # by which one finds NVIDIA's multi-process service
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert workers_that_gain(8, 9, {"cuda"}) == 8


@pytest.mark.parametrize(("quota", "cores"), [("max 100000", 16), ("350000 100000", 3), ("50000 100000", 1), ("", 16)])
def test_a_container_has_fewer_cores(quota: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    limit = tmp_path / "cpu.max"
    if quota:
        limit.write_text(f"{quota}\n")
    monkeypatch.setattr(workers, "Path", lambda name: limit)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(16)), raising=False)
    assert usable_cores() == cores


def children_of(process: int) -> list[int]:
    folder = Path(f"/proc/{process}/task/{process}")
    try:
        return [int(word) for word in (folder / "children").read_text().split()]
    except OSError:
        return []


def is_running(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="looks for processes in /proc")
@pytest.mark.parametrize("begun", [1, 2, 3], ids=["the tracker", "one", "both"])
def test_ctrl_c_while_workers_start_is_one_sentence(tmp_path: Path, begun: int) -> None:
    options: dict[str, Any] = {**SMALL, "rounds": 100000, "jobs": 2, "out": "all"}
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with subprocess.Popen(
        [*COMMAND, "compare", "fedavg", "local", *words, "--quiet"],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a terminal of its own: Ctrl-C reaches all that were started there
    ) as process:
        try:
            until = time.monotonic() + 60
            while len(started := children_of(process.pid)) < begun and time.monotonic() < until:
                time.sleep(0.002)
            os.killpg(process.pid, signal.SIGINT)
            out, err = process.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, out) == (130, "")
    assert err == "interrupted; 0 of 2 runs are finished and all is kept in all: go on with the same command\n"
    assert len(started) >= begun
    until = time.monotonic() + 10  # the tracker sees that it is alone
    while any(map(is_running, started)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not any(map(is_running, started))
