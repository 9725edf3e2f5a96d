"""The command line is light: help and mistakes are answered before PyTorch, pandas or SciPy are imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer

from coterie.algorithms import registry
from coterie.cli.app import app
from coterie.data.partitions.registry import SCHEMES
from coterie.data.registry import SOURCES
from coterie.lazy import Registry
from coterie.simulation.attack_registry import ATTACKS

HEAVY = ("torch", "pandas", "scipy", "numpy", "pyarrow", "plotly", "sklearn", "flwr", "pooch", "PIL")

# Each command line runs in one process after the other, and what is imported stays: the first that imports too much is
# the one to blame.
PROBE = """
import contextlib, io, json, sys
from coterie.cli import main
heavy, commands = json.load(sys.stdin)
found = []
for words in commands:
    sys.argv = ["coterie", *words]
    said, wrong = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(wrong):
        try:
            main()
        except SystemExit as end:
            code = end.code
    found.append([code, said.getvalue(), wrong.getvalue(), [name for name in heavy if name in sys.modules]])
json.dump(found, sys.stdout)
"""


def probe(commands: list[list[str]], folder: Path, heavy: tuple[str, ...] = HEAVY) -> list[Any]:
    """Run command lines in a process of their own; give code, outputs, and which heavy modules are there by then."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE],
        input=json.dumps([heavy, commands]),
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env=os.environ | {"COLUMNS": "100"},
    )
    assert done.returncode == 0, done.stderr
    found: list[Any] = json.loads(done.stdout)
    return found


def paths(command: click.Command, words: list[str]) -> Iterator[list[str]]:
    """Walk the tree of commands."""
    yield words
    if isinstance(command, click.Group):
        for name, below in command.commands.items():
            yield from paths(below, [*words, name])


def test_every_help_is_light(tmp_path: Path) -> None:
    commands = list(paths(typer.main.get_command(app), []))
    assert len(commands) > 25 and ["federate", "run"] in commands
    answers = probe([[*words, "--help"] for words in commands], tmp_path)
    for words, (code, said, wrong, imported) in zip(commands, answers, strict=True):
        assert code == 0 and wrong == "" and "Usage: coterie" in said, words
        assert imported == [], f"coterie {' '.join(words)} --help imports {', '.join(imported)}"


@pytest.mark.parametrize("words", ["fedavg", "fedpg --engine loop", "flame --model cnn_small --kernel vmap"])
def test_no_run_loads_pytorchs_compiler_unasked(words: str, tmp_path: Path) -> None:
    """It takes as long to load as PyTorch itself, and every run, worker and node would wait for it."""
    heavy = ("torch._dynamo", "torch._inductor", "sympy")
    ((code, _, wrong, imported),) = probe([["run", *words.split(), "--rounds", "1", "--out", "run"]], tmp_path, heavy)
    assert code == 0, wrong
    assert imported == []


MISTAKES = {
    "rum": "No such command 'rum': did you mean 'run'? see coterie --help",
    "list model": "No such command 'model': did you mean 'models'? see coterie list --help",
    "run fedavg --client 3": "No such option '--client': did you mean '--clients'? see coterie run --help",
    "run fedavg --rounds many": "Invalid value for '--rounds': 'many' is not a valid int",
    "run": "Missing argument 'ALGORITHM'",
    "run import:mine:Method": "there is no algorithm 'import:mine:Method': a method of your own is named by its file",
    "run fedavgg": "there is no algorithm 'fedavgg': did you mean 'fedavg'? known are ",
    "run fedavg --data digit": "there is no data set 'digit': did you mean 'digits'? known are ",
    "run fedavg --partition dirichlett:1": "there is no partition 'dirichlett': did you mean 'dirichlet'? known are ",
    "run fedavg --model mpl:hidden=3": "there is no model 'mpl': did you mean 'mlp'? known are ",
    "run fedavg --attack gausian:0.2": "there is no attack 'gausian': did you mean 'gaussian'? known are ",
    "run fedavg --rounds 0": "experiment: rounds is 0, but must be integer ≥ 1",
    "run fedavg --engine lop": "experiment: engine is 'lop', but must be batched or loop",
    "run fedavg --set p": "--set is 'p', but must be key=value",
    "run nowhere.yaml": "the experiment file 'nowhere.yaml' cannot be read",
    "compare fedavg fedamq --out all": "there is no algorithm 'fedamq': did you mean 'fedamp'?",
    "choose fedavg fedamq": "there is no algorithm 'fedamq': did you mean 'fedamp'?",
    "choose --data digit": "there is no data set 'digit': did you mean 'digits'?",
    "choose --minutes soon": "Invalid value for '--minutes': 'soon' is not a valid float",
    "federate run nowhere choice.yaml": "the experiment file 'choice.yaml' cannot be read",
    "federate run nowhere fedavgg": "there is no algorithm 'fedavgg': did you mean 'fedavg'?",
    "federate wire fedavgg": "there is no algorithm 'fedavgg': did you mean 'fedavg'?",
    "list algorithms fedavgg": "there is no algorithm 'fedavgg': did you mean 'fedavg'?",
    "list data digit": "there is no data set 'digit': did you mean 'digits'?",
    "list partitions idd": "there is no partition 'idd': did you mean 'iid'?",
    "list models mpl": "there is no model 'mpl': did you mean 'mlp'?",
    "list attacks gausian": "there is no attack 'gausian': did you mean 'gaussian'?",
    "recipe run fedamp-table33": "there is no recipe 'fedamp-table33': did you mean 'fedamp-table3'?",
    "recipe show fedamp-table33 --quick": "there is no recipe 'fedamp-table33': did you mean 'fedamp-table3'?",
    "recipe show nowhere.yaml": "the file 'nowhere.yaml' cannot be read",
    "recipe run one two": "a recipe is run alone, not one two: give one name",
    "recipe verdicts --results nowhere": "there are no results in 'nowhere': give their folder with --results",
    "data fetch mnits": "there is no data set 'mnits': did you mean 'mnist'?",
    "partition show --data digit": "there is no data set 'digit': did you mean 'digits'?",
}


def test_mistakes_are_found_before_anything_is_imported(tmp_path: Path) -> None:
    answers = probe([words.split() for words in MISTAKES], tmp_path)
    for (words, sentence), (code, said, wrong, imported) in zip(MISTAKES.items(), answers, strict=True):
        assert code == 2 and said == "", words
        assert wrong.startswith(f"error: {sentence}") and wrong.count("\n") == 1, wrong
        assert imported == [], f"coterie {words} imports {', '.join(imported)}"
    assert list(tmp_path.iterdir()) == []


LISTS = ("algorithms", "algorithms fedavg", "data", "data digits", "partitions", "models", "attacks", "metrics")


def test_lists_are_light(tmp_path: Path) -> None:
    commands = [*(["list", *words.split()] for words in LISTS), ["recipe", "list"]]
    for words, (code, said, wrong, imported) in zip(commands, probe(commands, tmp_path), strict=True):
        assert code == 0 and said and wrong == "", words
        assert imported == [], f"coterie {' '.join(words)} imports {', '.join(imported)}"


def test_the_probe_sees_what_is_imported(tmp_path: Path) -> None:
    ((code, _, wrong, imported),) = probe([["show", "nowhere"]], tmp_path)
    assert code == 2 and wrong.startswith("error: ") and "torch" in imported


def test_importing_the_package_is_light() -> None:
    code = f"import sys, coterie; print([name for name in {(*HEAVY, 'pydantic', 'typer')!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_ctrl_c_while_pytorch_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'torch': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupt())\n"
        "sys.argv = ['coterie', 'run', 'fedavg']\n"
        "from coterie.cli import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path)
    said = "interrupted before a round was played: what was there is as it was\n"
    assert (done.returncode, done.stdout, done.stderr) == (130, "", said)
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------- names that are known without imports


@pytest.mark.parametrize(("known", "name"), [(SOURCES, "name"), (SCHEMES, "name"), (ATTACKS, "kind")])
def test_things_are_called_as_their_registry_calls_them(known: Registry[type], name: str) -> None:
    assert {each: getattr(entry, name) for each, entry in known.items()} == {each: each for each in known}


def test_methods_are_called_as_their_files() -> None:
    for name in registry.names():
        method = registry.get(name)
        assert (method.name, method.__module__) == (name, f"coterie.algorithms.{name}")


def test_methods_are_shown_by_their_titles() -> None:
    assert registry.title("fedavg_ft") == "FedAvg-FT"
    assert registry.title("gone") == "gone" and registry.title("somewhere/mine.py") == "somewhere/mine.py"
