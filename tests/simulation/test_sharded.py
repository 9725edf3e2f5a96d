"""Sharded runs: two ranks on a CPU give what one process gives, and stop, fail and go on together."""

from __future__ import annotations

import fcntl
import os
import pickle
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie import randomness
from coterie.results import Result
from coterie.runs import launch
from tests.simulation.sharded_checks import COUNT, assert_close, assert_same_run, environment
from tests.simulation.sharded_play import FEW, METHODS, RUNS, options, played, products, seen, simulation_of
from tests.simulation.sharded_play import lost as lose_some
from tests.small_runs import assert_same_end, config_of, finish, same, stop

HERE = Path(__file__).resolve()
ALONE = options("sharded", rounds=5, checkpoint_every=9)


@pytest.fixture(scope="session")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which two ranks have played all scenes, once for all tests and for all of pytest's processes."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder = base / "sharded"
    with (base / "sharded.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "played").exists():
            folder.mkdir()
            _play(folder)
            (folder / "played").touch()
    return folder


def _play(folder: Path) -> None:
    stop(launch.begin(config_of("fedacs", **ALONE), folder / "begun alone"), "in a round", 4)
    script = str(HERE.with_name("sharded_play.py"))
    words = [[sys.executable, script, str(rank), str(COUNT), str(folder)] for rank in range(COUNT)]
    both = [subprocess.Popen(each, env=environment(), stderr=subprocess.PIPE, text=True) for each in words]
    deadline = time.monotonic() + 240
    said = []
    for process in both:
        try:
            said.append(process.communicate(timeout=max(1.0, deadline - time.monotonic()))[1])
        except subprocess.TimeoutExpired:
            for each in both:
                each.kill()
            pytest.fail("a rank waits for another")
    (folder / "said").write_text("\n".join(said), encoding="utf-8")


def facts(stage: Path, scene: str) -> tuple[Any, Any]:
    """Give what both ranks saw."""
    found = [stage / f"{scene}.{rank}" for rank in range(COUNT)]
    for path in found:
        assert path.exists(), (stage / "said").read_text(encoding="utf-8")
    one, two = (pickle.loads(path.read_bytes()) for path in found)
    for each in (one, two):
        assert not isinstance(each, str), each
    return one, two


# ----------------------------------------------------------------------------------------------------- the same numbers


@pytest.mark.parametrize("name", METHODS)
def test_every_method_gives_what_one_process_gives(stage: Path, name: str, tmp_path: Path) -> None:
    one, two = facts(stage, "methods")
    assert same(one[name], two[name])  # bit for bit on both ranks
    finish(launch.begin(config_of(name, **options("batched")), tmp_path / "run"))
    assert_same_run(tmp_path / "run", stage / "methods" / name)


@pytest.mark.parametrize("lossy", [False, True], ids=["all-reply", "some-lost"])
@pytest.mark.parametrize("name", FEW)
def test_cohorts_of_one_rank_alone_and_lost_replies(stage: Path, name: str, lossy: bool) -> None:
    wanted = played(simulation_of(name, None, lost=lose_some if lossy else None))
    for each in facts(stage, "rounds"):
        for expected, found in zip(wanted, each[name, lossy], strict=True):
            assert_close(expected, found)


@pytest.mark.parametrize("name", FEW)
def test_wherever_ranks_keep_their_rows(stage: Path, name: str) -> None:
    rounds, _ = facts(stage, "rounds")
    for each in facts(stage, "places"):
        for keep in ("host", "disk"):
            for expected, found in zip(rounds[name, False], each[name, keep], strict=True):
                assert same(expected, found), keep


def test_a_run_whose_rows_lie_on_disk_goes_on(stage: Path, tmp_path: Path) -> None:
    facts(stage, "places")
    finish(launch.begin(config_of("flame", **options("batched", rounds=4)), tmp_path / "run"))
    assert_same_run(tmp_path / "run", stage / "places" / "flame")


@pytest.mark.parametrize("name", RUNS)
def test_what_else_a_run_may_have(stage: Path, name: str, tmp_path: Path) -> None:
    facts(stage, "options")
    finish(launch.begin(config_of("fedamp", **options("batched", **RUNS[name])), tmp_path / "run"))
    assert_same_run(tmp_path / "run", stage / "options" / name)
    if name == "everything":
        rounds = Result(stage / "options" / name).matrix_rounds
        assert rounds
        matrices = [Result(path).matrix(rounds[-1]) for path in (tmp_path / "run", stage / "options" / name)]
        np.testing.assert_allclose(*matrices, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("way", ["by columns", "by pairs"])
def test_products_over_ranks(stage: Path, way: str) -> None:
    one, two = facts(stage, "products")
    assert same(one[way], two[way])
    assert_close(products(lambda rows: rows), one[way])
    stream = randomness.stream(5, "test products")
    rows, patch = (stream.normal(size=(count, 37)) for count in (11, 3))
    weights = stream.normal(size=(4, 11))
    patched = rows.copy()
    patched[[2, 3, 9]] = patch
    for name, matrix in (("plain", rows), ("kept", rows), ("patched", patched)):
        apart = ((matrix[:, None] - matrix[None]) ** 2).sum(2)
        length = np.sqrt((matrix**2).sum(1))
        wanted = {
            "gram": matrix @ matrix.T,
            "gram of two": patch @ matrix.T,
            "gram turned": matrix @ patch.T,
            "gram with itself": matrix @ matrix.T,
            "cosines": matrix @ matrix.T / length[:, None] / length,
            "norms": length,
            "squared distances": apart,
            "distances from": apart[[2, 3, 9]],
            "mix": weights @ matrix,
            "mean": weights[0] @ matrix,
            "total": weights[0] @ matrix,
            "taken": matrix[[[9, 0], [0, 5]]],
            "whole": matrix,
        }
        assert_close(
            {key: torch.from_numpy(np.ascontiguousarray(value)) for key, value in wanted.items()},
            {key: one[way][f"{name} {key}"] for key in wanted},
        )
    symmetric = one[way]["kept gram"]
    assert torch.equal(symmetric, symmetric.T)


def test_rows_of_clients_lie_with_their_rank(stage: Path) -> None:
    one, two = facts(stage, "owned_rows")
    assert one[0] == 3 and two[0] == 2  # of five clients
    assert "does not belong" in one[1] and one[1] == two[1]


# ------------------------------------------------------------------------------------------------------ stop and go on


def test_a_stop_on_one_rank_stops_all_at_the_same_round(stage: Path, tmp_path: Path) -> None:
    one, two = facts(stage, "stop")
    assert one == two == [("Interrupted", 2, 2), ("Interrupted", 3, 3), ("resumed", 2, 2)]
    config = config_of("fedacs", **options("batched", rounds=5, checkpoint_every=9))
    finish(launch.begin(config, tmp_path / "run"))
    assert_same_run(tmp_path / "run", stage / "stop" / "in")
    assert_same_end(stage / "stop" / "in", stage / "stop" / "never")  # bit for bit


def test_one_process_goes_on_with_what_two_began_and_back(stage: Path, tmp_path: Path) -> None:
    facts(stage, "resume")
    finish(launch.begin(config_of("fedacs", **options("batched", rounds=5, checkpoint_every=9)), tmp_path / "run"))
    assert_same_run(tmp_path / "run", stage / "begun alone")
    assert Result(stage / "begun alone").finished
    again = launch.resume(stage / "stop" / "after")
    assert again.completed == 3 and again.folder.choices["ranks"] == 1
    finish(again)
    assert_same_run(tmp_path / "run", stage / "stop" / "after")


# ------------------------------------------------------------------------------------------------------ fail together


def test_a_client_that_diverges_on_the_second_rank(stage: Path) -> None:
    one, two = facts(stage, "diverged")
    assert one[0] == two[0] and one[0][:2] == (1, [3]) and "client 3" in one[0][2]
    alone = simulation_of("fedavg", None)
    alone.play_round(torch.tensor([0, 1]), 1)
    for each in (one, two):
        assert_close(seen(alone, 1), each[1])


def test_what_fails_on_one_rank_is_raised_on_all(stage: Path) -> None:
    one, two = facts(stage, "failures")
    assert one == two
    assert one["engine"][0] == "AlgorithmError" and "ValueError: no luck" in one["engine"][1]
    assert one["checkpoint"][0] == "RunFolderError" and "No space left" in one["checkpoint"][1]
    assert one["evaluation"][0] == "AlgorithmError" and "RuntimeError: odd" in one["evaluation"][1]
    assert one["watcher"] == ("KeyError", "'who'")
    assert one["taken"][0] == "RunFolderError" and "holds a run already" in one["taken"][1]
    assert one["device"] == (
        "ConfigError",
        "device is 'cuda:0', but each of 2 ranks needs one: use --device cuda",
    )
    assert one["differ"][0] == "RankError" and "no longer have the same state" in one["differ"][1]
    assert Result(stage / "failures" / "full").finished


def test_a_rank_that_ends_is_missed_and_waits_for_nobody(stage: Path) -> None:
    (kind, sentence), two = facts(stage, "lost_rank")
    assert two == ("ZeroDivisionError", "")
    assert kind == "RankError" and "coterie resume" in sentence
    assert re.search(r"cannot reach the others \([^.\[]+\[[\d.]+\][^.]*\): look", sentence), sentence
    again = launch.resume(stage / "lost_rank" / "run")  # what was in a checkpoint is there
    assert again.completed == 2
    finish(again)
