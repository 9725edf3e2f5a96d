"""The command line as its users meet it: what goes where, and what mistakes look like."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pytest
import yaml

from coterie import __version__, api
from coterie.algorithms import registry
from coterie.cli import main
from coterie.config import ExperimentConfig
from coterie.results import Result
from coterie.runs import launch
from coterie.simulation.simulation import Simulation
from tests.small_runs import FAR_TOO_FAST, OWN, SMALL


class Said(NamedTuple):
    """How a command ended and what it said."""

    code: int
    out: str
    err: str


Coterie = Callable[..., Said]


@pytest.fixture
def coterie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Coterie:
    """Run the command line in this process, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(os, "fsync", lambda handle: None)

    def run(*words: object) -> Said:
        monkeypatch.setattr(sys, "argv", ["coterie", *map(str, words)])
        try:
            main()
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        return Said(code, *capsys.readouterr())

    return run


OPTIONS = [word for name, value in SMALL.items() for word in (f"--{name.replace('_', '-')}", str(value))]
FAST = ["--local-epochs", "1", "--rounds", "3"]


def test_a_run_and_what_it_prints(coterie: Coterie) -> None:
    said = coterie("run", "fedacs", *OPTIONS, *FAST, "--set", "p=0.3", "--out", "mine")
    assert said.code == 0
    assert said.out.split()[:7] == ["FedACS,", "test", "accuracy,", "3", "rounds,", "seed", "1"]
    assert "personal" in said.out and "global" in said.out and "run:" not in said.out and "3/3" not in said.out
    assert said.err.splitlines()[-1] == "run: mine"
    assert "FedACS" in said.err and "3/3" in said.err
    summary = json.loads(Path("mine/summary.json").read_text())
    assert f"{summary['personal']['final']['mean']:.4f}" in said.out
    assert yaml.safe_load(Path("mine/config.yaml").read_text())["settings"]["p"] == 0.3
    assert max(map(len, said.out.splitlines())) <= 80


def test_quiet(coterie: Coterie) -> None:
    assert coterie("run", "local", *OPTIONS, *FAST, "--quiet") == (0, "", "run: runs/local-synthetic-seed1\n")
    assert coterie("run", "local", *OPTIONS, *FAST, "-q") == (0, "", "run: runs/local-synthetic-seed1-2\n")


def test_a_file_equals_the_same_options(coterie: Coterie) -> None:
    Path("experiment.yaml").write_text(
        yaml.safe_dump({"algorithm": "fedacs", **SMALL, "lr": 0.02, "settings": {"p": 0.3}})
    )
    assert coterie("run", "experiment.yaml", *FAST, "--seed", "4", "--out", "file").code == 0
    options = ["--lr", "0.02", "--set", "p=0.3", "--seed", "4", "--out", "words"]
    assert coterie("run", "fedacs", *OPTIONS, *FAST, *options).code == 0
    one, two = Result("file"), Result("words")
    assert one.config == two.config and one.config["seed"] == 4 and one.config["rounds"] == 3
    pd.testing.assert_frame_equal(one.metrics, two.metrics, check_exact=True)
    assert coterie("run", "file/config.yaml", "--out", "again").code == 0
    pd.testing.assert_frame_equal(one.metrics, Result("again").metrics, check_exact=True)


def test_every_setting_has_an_option(coterie: Coterie, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[ExperimentConfig] = []
    monkeypatch.setattr(api, "run_config", lambda config, **_: seen.append(config) or sys.exit(0))
    values: dict[str, Any] = {
        "data": "synthetic",
        "partition": "iid",
        "clients": 7,
        "rounds": 3,
        "participation": 0.5,
        "model": "linear",
        "loss": "cross_entropy",
        "class_weights": "balanced",
        "seed": 5,
        "validation": 0.2,
        "test_fraction": 0.3,
        "scarcity": 9,
        "local": "head",
        "buffers": "frozen",
        "scope": "pooled",
        "max_test": 8,
        "hold_out": 0.3,
        "adapt_rounds": 2,
        "attack": "gaussian:0.2",
        "eval_every": 2,
        "checkpoint_every": 4,
        "engine": "batched",
        "device": "auto",
        "dtype": "float64",
        "kernel": "vmap",
        "convolution": "single",
        "chunk": 3,
        "precision": "tf32",
        "keep": "disk",
        "keep_samples": "host",
        "scratch": str(Path("elsewhere").absolute()),
        "privacy": "clip=1.0,noise=2.0,delta=1e-05",
        "threads": 2,
    }
    words = [word for name, value in values.items() for word in (f"--{name.replace('_', '-')}", value)]
    words += ["--compile", "--eval-train", "--metric", "auroc", "--metric", "accuracy"]
    words += ["--matrix", "--matrix-every", 2, "--s-acc", 0.2, "--s-acc", 1.0]
    words += ["--lr", 0.3, "--local-epochs", 4, "--batch-size", 0, "--set", "momentum=0.5"]
    assert coterie("run", "fedavg", *words).code == 0
    values |= {"compile": True, "eval_train": True, "metrics": ("auroc", "accuracy"), "algorithm": "fedavg"}
    values |= {"matrix": True, "matrix_every": 2, "s_acc": (0.2, 1.0)}
    values["settings"] = {"lr": 0.3, "local_epochs": 4, "batch_size": 0, "momentum": 0.5}
    assert seen[0].model_dump() == {**values, "algorithm_sha256": None}
    assert set(values) == set(ExperimentConfig.model_fields) - {"algorithm_sha256"}


def test_help_explains(coterie: Coterie) -> None:
    said = coterie("--help")
    assert said.code == 0 and all(word in said.out for word in ("run", "resume", "show", "list"))
    said = coterie("run", "-h")
    text = " ".join(said.out.replace("│", " ").split())
    for name, info in ExperimentConfig.model_fields.items():
        if name not in ("algorithm", "algorithm_sha256", "settings"):
            assert (info.description or "")[1:20] in text, name
    assert "[default: (20)]" in text and "dirichlet:0.5" in text and "Ctrl-C leaves a run" in text
    for command in (["resume"], ["show"], ["list"], ["list", "algorithms"]):
        assert coterie(*command, "--help").code == 0
    assert coterie("--version") == (0, f"{__version__}\n", "")


MISTAKES: dict[str, tuple[list[str], str]] = {
    "algorithm": (["run", "fedavgg"], "there is no algorithm 'fedavgg': did you mean 'fedavg'?"),
    "parameter": (["run", "fedacs", "--set", "pp=1"], "FedACS has no parameter 'pp': did you mean 'p'?"),
    "range": (["run", "fedacs", "--set", "p=2"], "FedACS: p is 2, but must be number ≥ 0 and < 1"),
    "no equals sign": (
        ["run", "fedacs", "--set", "p"],
        "--set is 'p', but must be key=value, for instance --set p=0.5",
    ),
    "no key": (["run", "fedacs", "--set", "=1"], "--set is '=1', but must be key=value"),
    "a key twice": (["run", "fedacs", "--set", "p=0", "--set", "p=1"], "--set gives 'p' twice"),
    "no YAML": (["run", "fedacs", "--set", "p=[1"], "--set p: '[1' is not a valid value"),
    "an option and --set": (
        ["run", "fedavg", "--lr", "1", "--set", "lr=2"],
        "lr is given twice: as 1.0 and, in settings",
    ),
    "contradiction": (
        ["run", "fedavg", "--engine", "loop", "--chunk", "2"],
        "experiment: engine=loop contradicts chunk",
    ),
    "seed": (["run", "fedavg", "--seed", "-1"], "experiment: seed is -1, but must be integer ≥ 0"),
    "file": (["run", "nowhere.yaml"], "the experiment file 'nowhere.yaml' cannot be read: No such file or directory"),
    "algorithm file": (["run", "nowhere.py"], "the algorithm file 'nowhere.py' cannot be read: No such file"),
    "broken algorithm file": (["run", "broken.py"], "the algorithm file "),
    "partition": (["run", "fedavg", "--clients", "9999"], "9999 clients cannot share 1797 samples of 'digits': "),
    "device": (["run", "fedavg", "--device", "cuda:99"], "device is 'cuda:99', but PyTorch finds"),
    "no run": (["resume", "nowhere"], "there is no run in nowhere: it must be a folder that `coterie run` wrote"),
    "no run to show": (["show", "nowhere"], "there is no run in nowhere"),
    "list": (["list", "models", "mpl"], "there is no model 'mpl': did you mean 'mlp'?"),
    "folder with other things": (
        ["run", "local", "--out", "."],
        ". is not empty (it holds 'broken.py'): choose another",
    ),
    "folder that is a file": (["run", "local", "--out", "broken.py"], "broken.py is a file: choose another --out"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_one_sentence_and_code_two(what: str, coterie: Coterie) -> None:
    Path("broken.py").write_text("def broken(:\n")
    words, sentence = MISTAKES[what]
    said = coterie(*words)
    assert said.code == 2 and said.out == ""
    assert said.err.startswith(f"error: {sentence}") and said.err.count("\n") == 1, said.err
    assert [path.name for path in Path().iterdir() if path.name != "runs"] == ["broken.py"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["run", "fedavg", "--clients", "many"], "'many' is not a valid int"),
        (["run", "fedavg", "--client", "3"], "No such option '--client'"),
        (["run"], "Missing argument 'ALGORITHM'"),
        (["rum"], "No such command 'rum'"),
    ],
)
def test_what_the_parser_refuses(words: list[str], sentence: str, coterie: Coterie) -> None:
    said = coterie(*words)
    assert said.code == 2 and said.out == "" and "Traceback" not in said.err
    assert sentence in " ".join(said.err.replace("│", " ").split())


def test_a_folder_that_exists(coterie: Coterie) -> None:
    assert coterie("run", "local", *OPTIONS, *FAST, "--out", "mine", "-q").code == 0
    said = coterie("run", "local", *OPTIONS, *FAST, "--out", "mine")
    assert said == (2, "", "error: mine holds a run already: choose another --out, or `coterie resume mine`\n")
    again = coterie("resume", "mine", "-q")
    assert again == (0, "", "mine is finished: there is nothing to resume\nrun: mine\n")


def interrupt_at(round_number: int, monkeypatch: pytest.MonkeyPatch, number: int = signal.SIGINT) -> None:
    original = Simulation.play_round

    def stopped(self: Simulation, clients: Any, now: int) -> Any:
        if now == round_number:
            monkeypatch.setattr(Simulation, "play_round", original)
            os.kill(os.getpid(), number)
        return original(self, clients, now)

    monkeypatch.setattr(Simulation, "play_round", stopped)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_run_says_how_to_go_on(
    number: int, code: int, coterie: Coterie, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt_at(3, monkeypatch, number)
    said = coterie("run", "fedacs", *OPTIONS, "-q", "--out", "my run")
    assert said.code == code and said.out == ""
    assert said.err == "interrupted; everything up to round 2 is kept, go on with: coterie resume 'my run'\n"
    said = coterie("show", "my run")
    assert said.code == 0 and "2 rounds" in said.out and said.err == "my run is not finished: round 2 of 5\n"
    said = coterie("resume", "my run")
    assert said.code == 0 and "5 rounds" in said.out and said.err.endswith("run: my run\n")
    assert coterie("run", "fedacs", *OPTIONS, "-q", "--out", "whole").code == 0
    assert Path("my run/metrics.parquet").read_bytes() == Path("whole/metrics.parquet").read_bytes()


def test_an_interrupt_before_the_first_round(coterie: Coterie, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launch, "assemble", stopped)
    said = coterie("run", "fedacs", *OPTIONS)
    assert said == (130, "", "interrupted before a round was played: what was there is as it was\n")
    assert not Path("runs").exists()


def test_divergence_names_round_clients_and_folder(coterie: Coterie) -> None:
    words = ["--data", "synthetic:clients=5,samples=14,features=6,task=regression", "--participation", "1"]
    for key, value in FAR_TOO_FAST.items():
        words += ["--set", f"{key}={value}"]
    said = coterie("run", "local", *OPTIONS, *words, "--model", "linear", "-q", "--out", "far")
    assert said.code == 2
    sentence, where = said.err.splitlines()
    models = "the models of 5 clients are no longer finite (0, 1, 2, 3, 4); try a smaller --lr"
    assert re.match(rf"error: round [23]: {re.escape(models)}", sentence)
    assert where == "run: far"
    assert coterie("show", "far").code == 0
    assert coterie("resume", "far", "-q").err == said.err


def test_models_in_the_current_folder(coterie: Coterie) -> None:
    Path("coterie_here.py").write_text(
        "from torch import nn\n\n\ndef net(outputs):\n    return nn.Linear(6, outputs)\n"
    )
    assert coterie("run", "local", *OPTIONS, *FAST, "--model", "import:coterie_here:net", "-q").code == 0


def test_an_algorithm_in_a_file(coterie: Coterie) -> None:
    Path("turned.py").write_text(OWN)
    said = coterie("run", "turned.py", *OPTIONS, *FAST)
    assert said.code == 0 and said.out.startswith("Turned, ")
    assert Path("runs/turned-synthetic-seed1/summary.json").exists()
    said = coterie("list", "algorithms", "turned.py")
    assert said.code == 0 and "Turned" in said.out and "lr_decay=1.0" in said.out


def test_show_of_a_comparison_is_its_table(coterie: Coterie) -> None:
    words = [*OPTIONS, *FAST, "--seeds", "1,2", "--tune", "lr=0.01,0.1", "--out", "compared"]
    said = coterie("compare", "local", "fedavg", *words)
    assert said.code == 0
    shown = coterie("show", "compared")
    assert shown.code == 0 and shown.out.strip() and shown.out in said.out
    both = coterie("show", "compared", next(Path("compared/runs").glob("local*seed1")).as_posix())
    assert both.code == 0 and both.out.startswith(shown.out) and len(both.out) > len(shown.out)


def test_show_puts_runs_beside_each_other(coterie: Coterie) -> None:
    for name in ("local", "fedavg"):
        assert coterie("run", name, *OPTIONS, *FAST, "-q", "--out", name).code == 0
    said = coterie("show", "local", "fedavg")
    assert said.code == 0 and said.err == ""
    assert [line.split()[:2] for line in said.out.splitlines() if "personal" in line or "global" in line] == [
        ["Local", "personal"],
        ["FedAvg", "personal"],
        ["FedAvg", "global"],
    ]


def test_lists(coterie: Coterie) -> None:
    said = coterie("list", "algorithms")
    assert said.code == 0
    for name in registry.names():
        algorithm = registry.get(name)
        assert f"\n{name}  {algorithm.title}" in "\n" + said.out
    for what in ("data", "partitions", "models", "attacks", "metrics"):
        said = coterie("list", what)
        assert said.code == 0 and len(said.out.splitlines()) > 5
    assert "number > 0" in coterie("list", "partitions", "dirichlet").out
    assert coterie("list", "models", "mlp").out.count("hidden=") == 2


def test_nothing_is_cut_off_in_a_narrow_terminal(coterie: Coterie, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "gamma_over_history=false" in coterie("list", "algorithms", "fedpg").out
    listed = coterie("recipe", "list").out
    assert "…" not in listed and "pathological" in listed and max(map(len, listed.splitlines())) <= 80
