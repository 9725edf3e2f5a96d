"""Mistakes that are answered in one sentence, and at once, where they once were not."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import coterie
from coterie.errors import ConfigError, CoterieError, CoterieWarning, DataError, PartitionError, RunFolderError
from coterie.runs import launch
from coterie.runs.storage import RunFolder, atomic_files
from tests.small_runs import SMALL, config_of

COMMAND = [sys.executable, "-W", "ignore", "-c", "from coterie.cli import main; main()"]
LOADER = """
import torch
from coterie.data import Dataset

def holes(what="x"):
    x, y = torch.ones(20, 3), torch.arange(20) % 2
    x[17, 2] = float("nan")
    return Dataset("mine", x, y, 20, "multiclass", ("a", "b"), (0.0,), (1.0,))

def endless():
    y = torch.zeros(20)
    y[4] = float("inf")
    return Dataset("mine", torch.ones(20, 3), y, 20, "regression", (), (0.0,), (1.0,))

def needs_more():
    import a_module_that_is_not_there
"""


def run(method: str = "fedavg", **settings: Any) -> coterie.Result:
    return coterie.run(method, **{**SMALL, "rounds": 1, "progress": False, **settings})


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_loader_with_mistakes.py").write_text(LOADER)
    (tmp_path / "my_broken_loader.py").write_text("import a_module_that_is_not_there\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("my_loader_with_mistakes:holes", "inputs must be finite numbers, but there is nan in sample 17, at (2,)"),
        ("my_loader_with_mistakes:endless", "labels must be finite numbers, but there is inf in sample 4"),
        ("my_loader_with_mistakes:needs_more", "failed: ModuleNotFoundError: No module named 'a_module_that_is_not_"),
        (
            "my_broken_loader:load",
            "cannot be imported: the module was found, but raised ModuleNotFoundError: No module",
        ),
        ("no_such_loader:load", "No module named 'no_such_loader'; is it installed, or on PYTHONPATH?"),
    ],
)
def test_a_loader_of_the_user_s_own(function: str, sentence: str, mine: Path) -> None:
    with pytest.raises(DataError) as refused:
        run(data=f"import:{function}", partition="iid", clients=2)
    assert sentence in str(refused.value)
    assert ("PYTHONPATH" in str(refused.value)) == function.startswith("no_such")
    assert not (mine / "runs").exists()


def test_more_clients_than_samples_are_refused_at_once() -> None:
    def little_memory() -> None:
        resource.setrlimit(resource.RLIMIT_DATA, (2**31, 2**31))  # a set of all clients would take 60 times as much

    done = subprocess.run(
        [*COMMAND, "run", "fedavg", "--clients", "2000000000"], capture_output=True, text=True, preexec_fn=little_memory
    )
    sentence = "error: 2000000000 clients cannot share 1797 samples of 'digits': every client needs one to train on and"
    assert done.returncode == 2 and done.stderr.startswith(sentence) and done.stderr.count("\n") == 1
    with pytest.raises(PartitionError, match="cannot share 70 samples"):
        run(clients=36)


def test_more_synthetic_clients_than_fit_are_refused_at_once() -> None:
    with pytest.raises(DataError, match=r"^clients=1000000000000, samples=14 and .* are 448 TB, more than half of the"):
        run(data="synthetic:clients=1000000000000,samples=14,features=6", clients=5)


@pytest.mark.parametrize("method", ["fedavg", "ditto", "fedprox_ft"])
def test_more_malicious_clients_than_an_aggregator_withstands(method: str, tmp_path: Path) -> None:
    # Of n clients, Krum needs n ≥ 2 f + 3, a trimmed mean n ≥ 2 f + 1.
    for aggregator, most in (("krum", 1), ("multi_krum", 1), ("trimmed_mean", 2)):
        settings = {"aggregator": aggregator, "byzantine": 30}
        with pytest.raises(
            ConfigError, match=f"byzantine is 30, but {aggregator} of 5 clients withstands at most {most}"
        ):
            run(method, settings=settings, out=tmp_path / "run")
    run(method, settings={"aggregator": "krum", "byzantine": 1}, out=tmp_path / "run")


def test_what_only_a_gpu_or_torchrun_has_is_refused_without(tmp_path: Path) -> None:
    for precision in ("bf16", "tf32"):
        with pytest.raises(ConfigError, match=f"precision is '{precision}', but the device is the CPU"):
            run(precision=precision, device="cpu", out=tmp_path / "run")
    with pytest.raises(ConfigError, match="engine is 'sharded', but torchrun did not start this process"):
        run(engine="sharded", out=tmp_path / "run")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("attack", ["gaussian", "gaussian:", "gaussian:,variance=1"])
def test_an_attack_without_its_fraction(attack: str) -> None:
    with pytest.raises(ConfigError, match=r"does not say which fraction of the clients attacks: write gaussian:0\.2"):
        run(attack=attack)


def test_paths_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="out is 3, of type int, but must be a path: a text or a Path"):
        run(out=3)
    with pytest.raises(ConfigError, match="data_dir is 3"):
        run(data_dir=3)
    for function in (coterie.load, coterie.resume):
        with pytest.raises(ConfigError, match="path is 3"):
            function(3)  # type: ignore[operator]


def test_a_finished_run_is_given_back(tmp_path: Path) -> None:
    run(out=tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    assert coterie.resume(tmp_path / "run").summary["rounds"] == 1
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_a_metric_of_fewer_clients_is_told_once(tmp_path: Path) -> None:
    settings = {"data": "digits", "partition": "shards:1", "clients": 10, "metrics": "accuracy+auroc", "rounds": 3}
    with pytest.warns(CoterieWarning, match=r"auroc is not defined for \d+ of 10 clients") as told:
        run(**settings, out=tmp_path / "run")
    assert len(told) == 1


def test_a_metric_of_no_client_is_told_in_the_first_round_and_at_the_end(tmp_path: Path) -> None:
    data = {str(label): (torch.randn(20, 3), torch.full((20,), label)) for label in (0, 1)}
    settings = {"data": data, "clients": 2, "model": "linear", "metrics": "auroc", "rounds": 2}
    with (
        pytest.warns(CoterieWarning, match="auroc is not defined for any of 2 clients"),
        pytest.raises(CoterieError, match="was never measured on test data; begin anew with a metric"),
    ):
        run(**settings, out=tmp_path / "run")


@pytest.mark.skipif(os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root may read everything")
def test_folders_that_may_not_be_read(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0)
    drop = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", "--inh-caps=-all"] if os.geteuid() == 0 else []
    program = (
        "import coterie, sys\nfor what in (lambda: coterie.load('closed'), lambda: coterie.resume('closed'), "
        "lambda: coterie.run('fedavg', out='closed/run'), lambda: coterie.run('fedavg', data='folder:closed'), "
        "lambda: coterie.run('fedavg', data='table:closed/x.csv,label=y'), lambda: coterie.run('closed/x.py')):\n"
        "    try: what()\n    except coterie.CoterieError as error: print(error)\n"
    )
    done = subprocess.run([*drop, sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path)
    closed.chmod(0o755)
    assert done.returncode == 0, done.stderr
    said = done.stdout.splitlines()
    assert len(said) == 6 and all("closed" in line and "Permission denied" in line for line in said), said


def test_a_full_disk_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(self: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self))

    playing = launch.begin(config_of("fedamp", rounds=2), tmp_path / "run")
    with monkeypatch.context() as patched, pytest.raises(RunFolderError, match=r"cannot be written \(No space left"):
        patched.setattr(atomic_files, "_write_synced", full)
        playing.run()
    playing.folder.close()
    with RunFolder.open(tmp_path / "run") as folder, monkeypatch.context() as patched:
        patched.setattr(atomic_files, "_write_synced", full)
        with pytest.raises(RunFolderError, match=r"cannot be written \(No space left"):
            folder.write_summary({})
    from coterie import cli

    monkeypatch.setattr(cli, "_run", lambda: full(tmp_path / "report.html"))
    monkeypatch.setattr(sys, "path", sys.path.copy())
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert capsys.readouterr().err == f"error: {tmp_path / 'report.html'}: No space left on device\n"


def test_sigterm_ends_a_comparison_side_by_side(tmp_path: Path) -> None:
    options = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    words = ["compare", "fedavg", "local", *options, "--rounds", "100000", "--jobs", "2", "--quiet", "--out", "all"]
    with subprocess.Popen(
        [*COMMAND, *words], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        until = time.monotonic() + 120
        while len(list(tmp_path.glob("all/runs/*/checkpoint/*-round-*"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (128 + signal.SIGTERM, "")
    assert err == "interrupted; 0 of 2 runs are finished and all is kept in all: go on with the same command\n"
    for path in (tmp_path / "all" / "runs").iterdir():
        RunFolder.open(path).close()  # its process has ended: the lock is free
