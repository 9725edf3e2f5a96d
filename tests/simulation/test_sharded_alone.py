"""Sharded runs: one rank alone, what is refused, and the command line under torchrun."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from coterie import cli
from coterie.errors import ConfigError, RunFolderError
from coterie.rows import distributed, repeat_row
from coterie.rows.backends import DeviceBackend
from coterie.rows.distributed import Ranks, checksum, number_of, sharded_placement
from coterie.rows.placement import Placement
from coterie.runs import launch
from coterie.runs.rounds import draw_cohort
from coterie.runs.storage import RunFolder
from coterie.studies import comparison
from tests.simulation.sharded_checks import COUNT, assert_close, assert_same_run, environment
from tests.simulation.sharded_play import options
from tests.small_runs import config_of, finish, last_state, same


def test_a_group_of_one_is_the_batched_engine(tmp_path: Path) -> None:
    for engine in ("sharded", "batched"):
        finish(launch.begin(config_of("fedamp", engine=engine), tmp_path / engine))
    assert (tmp_path / "sharded" / "metrics.parquet").read_bytes() == (
        tmp_path / "batched" / "metrics.parquet"
    ).read_bytes()
    assert same(last_state(tmp_path / "sharded").clients, last_state(tmp_path / "batched").clients)


def test_several_processes_need_an_engine_for_several(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="engine is 'batched', but torchrun started 2 processes"):
        launch.begin(config_of("fedavg"), tmp_path / "run")
    plan = comparison.make_plan({"methods": ["fedavg", "local"], "seeds": [1], "engine": "sharded"})
    with pytest.raises(ConfigError, match="torchrun started 2 processes, but a comparison runs in one"):
        comparison.compare(plan, tmp_path / "compared")
    assert not list(tmp_path.iterdir())


def test_the_first_process_speaks_for_all(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert distributed.first() and distributed.launched() == 1
    monkeypatch.setenv("RANK", "1")
    assert distributed.first()  # a variable of somebody else's
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert not distributed.first()
    monkeypatch.setattr(sys, "argv", ["coterie", "run", "nothing"])
    monkeypatch.setattr(sys, "path", sys.path.copy())
    for rank, said in (("1", ""), ("0", "error: there is no algorithm 'nothing'")):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit, match="2"):
            cli.main()
        assert capsys.readouterr().err.startswith(said) and bool(said) == bool(rank == "0")


def test_parts_of_a_rank() -> None:
    group = Ranks()
    group.rank, group.count = 1, 3
    assert [group.count_owned(7, rank) for rank in range(3)] == [3, 2, 2] and group.count_owned(7) == 2
    assert group.column_bounds(7) == [(0, 3), (3, 6), (6, 7)] and group.column_bounds(2) == [(0, 1), (1, 2), (2, 2)]
    assert torch.arange(7)[group.owns(torch.arange(7))].tolist() == [1, 4]


def test_room_is_what_is_left_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Ranks(local_count=4)
    monkeypatch.setattr("coterie.rows.placement.free_memory", lambda: 1000)
    cpu = torch.device("cpu")
    assert Placement("auto", cpu).choose(600) == "device" and Placement("auto", cpu).choose(601) == "disk"
    assert sharded_placement("auto", cpu, None, group).choose(150) == "device"
    assert sharded_placement("auto", cpu, None, group).choose(151) == "disk"


def test_bits_that_differ_are_told_apart() -> None:
    rows = torch.zeros(3, 5)
    assert checksum(rows) == checksum(torch.zeros(15)) == 0
    for place in (0, 7, 14):
        other = rows.clone().view(-1)
        other[place] = -0.0
        assert checksum(other) != 0
    assert checksum(torch.tensor([True, False])) == 1 and checksum(torch.zeros(0)) == 0
    assert number_of(("a", (3,), torch.float32)) != number_of(("a", (3,), torch.float64))
    assert 0 <= number_of("x") < 2**63


def test_a_folder_that_another_process_writes(tmp_path: Path) -> None:
    with RunFolder.written_elsewhere(tmp_path / "run", {"seed": 1}) as folder:
        assert folder.summary() is None and folder.config == {"seed": 1} and folder.checkpoints.latest() is None
    assert not list(tmp_path.iterdir())


def test_a_matrix_on_one_backend_owns_all_its_rows() -> None:
    kept = repeat_row(torch.zeros(2), 3)
    kept.move_to(DeviceBackend(3, torch.zeros(2)))
    kept = kept.patched(kept.backend.index_range(1, 2), torch.ones(1, 2))
    (chosen, block), *more = kept.local_blocks()
    assert not more and chosen.on_host.tolist() == [0, 1, 2]
    assert torch.equal(block, torch.tensor([[0.0, 0.0], [1.0, 1.0], [0.0, 0.0]]))
    assert torch.equal(kept.gather_local_rows(chosen), block)


# ------------------------------------------------------------------------------------------------------ torchrun


def torchrun(*words: object) -> subprocess.Popen[str]:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={COUNT}"]
    return subprocess.Popen(
        [*launch, "-m", "coterie", *map(str, words)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


WHAT = "--data synthetic:clients=5,samples=14,features=6,classes=3 --partition natural --clients 5 --participation 0.6"
HOW = "--model mlp:hidden=5 --dtype float64 --lr 0.1 --local-epochs 2 --batch-size 4 --set p=0.4 --engine sharded"
SMALL = ("run", "fedacs", *WHAT.split(), *HOW.split())


def test_torchrun_gives_what_coterie_run_gives(tmp_path: Path) -> None:
    out, err = torchrun(*SMALL, "--rounds", 2, "--out", tmp_path / "run").communicate(timeout=120)
    assert out.count("personal") == 1 and err.count(f"run: {tmp_path / 'run'}") == 1, err
    finish(launch.begin(config_of("fedacs", **options("batched")), tmp_path / "alone"))
    assert_same_run(tmp_path / "alone", tmp_path / "run")
    with pytest.raises(RunFolderError, match="finished"):
        launch.resume(tmp_path / "run")


def test_sigterm_to_torchrun_leaves_a_run_that_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "run"
    process = torchrun(*SMALL, "--rounds", 100_000, "--out", path, "--checkpoint-every", 5)
    deadline = time.monotonic() + 100
    while not (path / "checkpoint").is_dir() or not list((path / "checkpoint").glob("*-round-*")):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)
    process.terminate()
    _, err = process.communicate(timeout=60)
    assert err.count("interrupted; everything up to round") == 1, err
    again = launch.resume(path)
    assert again.completed >= 5 and f"everything up to round {again.completed} is kept" in err
    alone = launch.begin(config_of("fedacs", **options("batched", rounds=100_000)), tmp_path / "alone")
    assert again.completed < 3000
    for number in range(1, again.completed + 1):
        clients = draw_cohort(alone.config.seed, number, alone.rounds.trainers, alone.config.participation)
        alone.simulation.play_round(clients, number)
    for ours, theirs in (
        (alone.simulation.server, again.simulation.server),
        (alone.simulation.clients.rows, again.simulation.clients.rows),
    ):
        assert_close(*({name: value.clone() for name, value in rows.items()} for rows in (ours, theirs)))
    again.folder.close()
    alone.folder.close()
