"""The documents against the code: every program in them runs, every table and link in them is true.

A line above a fenced block says what becomes of it: ``<!-- run -->`` (in order, in one folder for each document),
``<!-- file: NAME -->`` (written there), ``<!-- row -->`` (a row of the conformance table), ``<!-- test -->`` (a module
of tests), or ``<!-- not run: WHY -->``.
"""

from __future__ import annotations

import glob
import importlib.util
import inspect
import io
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Console
from typer.testing import CliRunner

import coterie
from coterie import data, models, partitions
from coterie.algorithms import registry
from coterie.algorithms.base import Algorithm
from coterie.cli.app import app
from coterie.results import table
from tests import conformance_table
from tests import test_conformance as conformance

ROOT = Path(__file__).resolve().parents[1]
README, PRINCIPLES, GUIDE = "README.md", "docs/principles.md", "docs/add_an_algorithm.md"
REPRODUCTION = "docs/reproduction.md"
DOCUMENTS = (README, PRINCIPLES, GUIDE, REPRODUCTION, "CHANGELOG.md")
TEXT = {name: (ROOT / name).read_text(encoding="utf-8") for name in DOCUMENTS}
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROGRAMS = ("bash", "python")
MARKS = re.compile(r"run|row|test|file: [\w.]+|not run: .+")
SIZES = {"--clients": 5, "--rounds": 2}  # no larger than this
SMALL = ("--scarcity", "20", "--checkpoint-every", "1", "--threads", "1")


@dataclass(frozen=True)
class Block:
    """A fenced block."""

    document: str
    line: int
    language: str
    mark: str
    text: str

    @property
    def file(self) -> str | None:
        return self.mark.removeprefix("file: ") if self.mark.startswith("file: ") else None


def blocks(document: str) -> Iterator[Block]:
    pattern = re.compile(r"^(?:<!-- (?P<mark>[^\n]+) -->\n)?```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S)
    for match in pattern.finditer(TEXT[document]):
        line = TEXT[document].count("\n", 0, match.start()) + 1
        yield Block(document, line, match["language"], match["mark"] or "", match["text"])


BLOCKS = [block for document in DOCUMENTS for block in blocks(document)]


def only(mark: str, document: str = GUIDE) -> str:
    (text,) = [block.text for block in BLOCKS if (block.document, block.mark) == (document, mark)]
    return text


def section(document: str, title: str) -> str:
    match = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", TEXT[document], re.M | re.S)
    assert match, f"{document} has no section {title!r}"
    return match[1]


def first_cells(text: str) -> list[str]:
    """The first cell of each row of the Markdown tables in a text, without headers and code marks."""
    cells = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("|")]
    return [cell.strip("`") for cell, below in zip(cells, [*cells[1:], ""], strict=True) if "---" not in (cell, below)]


# --------------------------------------------------------------------------------------------------- programs that run


def test_every_fence_is_closed_and_every_program_is_run_or_says_why_not() -> None:
    for document in DOCUMENTS:
        fences = re.findall(r"^```", TEXT[document], re.M)
        assert len(fences) == 2 * sum(block.document == document for block in BLOCKS), document
        marks = re.findall(r"^<!-- .+ -->$", TEXT[document], re.M)
        assert len(marks) == sum(block.document == document and bool(block.mark) for block in BLOCKS), document
    for block in BLOCKS:
        marked = MARKS.fullmatch(block.mark) is not None
        assert marked or (not block.mark and block.language not in PROGRAMS), f"{block.document}:{block.line}"
    assert sum(block.mark == "run" for block in BLOCKS) >= 8


def small(command: str) -> list[str]:
    """The arguments of a ``coterie`` command, with the same options but small sizes."""
    program, *arguments = [
        word
        for written in shlex.split(command, comments=True)
        for word in (sorted(glob.glob(written)) if "*" in written else [written])
    ]
    assert program == "coterie", f"only coterie is run here, not {command!r}"
    if arguments[0] not in ("run", "compare"):
        return arguments
    for option, most in SIZES.items():
        if option in arguments:
            place = arguments.index(option) + 1
            arguments[place] = str(min(int(arguments[place]), most))
        else:
            arguments += [option, str(most)]
    return [*arguments, *SMALL]


def run_commands(text: str) -> None:
    for command in filter(None, text.splitlines()):
        arguments = small(command)
        if arguments[0] == "resume":
            # As a kill leaves it: without the end, and without the last checkpoint.
            run = Path(arguments[1])
            (run / "summary.json").unlink()
            shutil.rmtree(max((run / "checkpoint").iterdir()))
        done = CliRunner().invoke(app, arguments, catch_exceptions=False)
        assert done.exit_code == 0, f"{command}\n{done.output}"


def run_python(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    run = coterie.run

    def run_small(algorithm: str, *, clients: int, rounds: int, **settings: Any) -> coterie.Result:
        return run(algorithm, clients=min(clients, 5), rounds=min(rounds, 2), scarcity=20, progress=False, **settings)

    monkeypatch.setattr(coterie, "run", run_small)
    exec(compile(block.text, f"{block.document}:{block.line}", "exec"), {"__name__": "document"})


@pytest.mark.parametrize("document", [README, GUIDE])
def test_programs_run(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for block in blocks(document):
        if block.file:
            Path(block.file).write_text(block.text, encoding="utf-8")
        elif block.mark == "run" and block.language == "bash":
            run_commands(block.text)
        elif block.mark == "run":
            with monkeypatch.context() as patched:
                run_python(block, patched)


def test_what_is_not_run_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(), re.M))
    commands = [line for block in BLOCKS if block.mark.startswith("not run") for line in block.text.splitlines()]
    made = {line.split()[1] for line in commands if line.startswith("make ")}
    assert {"demo", "test", "check"} <= made <= targets
    assert "pip install -c constraints.txt ." in commands
    assert re.findall(r"`make (\w+)`", " ".join(TEXT.values()))
    assert set(re.findall(r"`make (\w+)`", " ".join(TEXT.values()))) <= targets


def test_options_that_documents_name_exist() -> None:
    def options(command: Any) -> Iterator[str]:
        for below in getattr(command, "commands", {}).values():
            yield from options(below)
        for option in command.params:
            yield from (*option.opts, *option.secondary_opts)

    known = set(options(typer.main.get_command(app)))
    for document in (README, PRINCIPLES, GUIDE, REPRODUCTION):
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", TEXT[document]))
        assert named <= known, document


# ------------------------------------------------------------------------------------------------- the guide's skeleton


@pytest.fixture
def skeleton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> type[Algorithm]:
    """The guide's algorithm, registered, with its row in the conformance table, for the length of a test."""
    registry.names()  # the registry fills itself when it is first asked
    path = tmp_path / "elastic.py"
    path.write_text(only("file: elastic.py"), encoding="utf-8")
    algorithm = registry.get(str(path))
    row = eval("{" + only("row") + "}", vars(conformance_table).copy())
    assert list(row) == [algorithm.name]
    monkeypatch.setitem(registry._registered, algorithm.name, algorithm)
    monkeypatch.setitem(conformance_table.TABLE, algorithm.name, row[algorithm.name])
    return algorithm


def cases(check: Callable[..., None], name: str) -> list[dict[str, Any]]:
    """The arguments with which the conformance suite would call a check for one algorithm."""
    row = conformance_table.TABLE[name]
    found: list[dict[str, Any]] = [{}]
    for mark in getattr(check, "pytestmark", []):
        names = [mark.args[0]] if isinstance(mark.args[0], str) else list(mark.args[0])
        values: list[dict[str, Any]]
        if names == ["name"]:
            values = [{"name": name}]
        elif names == ["name", "settings"]:
            values = [{"name": name, "settings": row.settings | variant} for variant in ({}, *row.variants)]
        else:
            assert len(names) == 1 and "name" not in names, f"{check.__name__} takes {names}"
            values = [{names[0]: value} for value in mark.args[1]]
        found = [one | other for one in found for other in values]
    return found


CHECKS = [
    check
    for name, check in vars(conformance).items()
    if name.startswith("test_") and callable(check) and "name" in inspect.signature(check).parameters
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("test_"))
def test_the_skeleton_conforms(
    check: Callable[..., None], skeleton: type[Algorithm], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fixtures = {"tmp_path": tmp_path, "monkeypatch": monkeypatch}
    wanted = inspect.signature(check).parameters.keys()
    for arguments in cases(check, skeleton.name):
        check(**arguments, **{name: value for name, value in fixtures.items() if name in wanted})


def test_the_skeleton_is_checked_by_the_whole_suite() -> None:
    names = {check.__name__ for check in CHECKS}
    assert {"test_engines_agree", "test_absent_clients_are_bit_identical", "test_deterministic_bit_for_bit"} <= names
    assert len(names) >= 10


def test_the_skeletons_oracles_hold_and_can_fail(skeleton: type[Algorithm], monkeypatch: pytest.MonkeyPatch) -> None:
    namespace: dict[str, Any] = {}
    exec(compile(only("test"), GUIDE, "exec"), namespace)
    oracles = [value for name, value in namespace.items() if name.startswith("test_")]
    assert len(oracles) == 2
    for oracle in oracles:
        oracle()
    task = sys.modules[skeleton.__module__].ElasticTraining
    monkeypatch.setattr(task, "start", lambda self, here, state, message: _wrong(self, here, state, message))
    for oracle in oracles:
        with pytest.raises(AssertionError):
            oracle()


def _wrong(task: Any, here: Any, state: Any, message: Any) -> Any:
    w = (state["w"] + message["w"]) / 3
    return {"w": w, **task.optimiser.init(here, w)}


def test_the_skeleton_is_short_and_in_the_house_style() -> None:
    text = only("file: elastic.py")
    assert len(text.splitlines()) < 80
    places = {"src/coterie/algorithms/elastic.py": text, "tests/oracles/test_elastic.py": only("test")}
    for place, code in places.items():
        for command in (["check"], ["format", "--check"]):
            done = subprocess.run(
                [sys.executable, "-m", "ruff", *command, "--no-cache", f"--stdin-filename={place}", "-"],
                input=code,
                capture_output=True,
                text=True,
                check=False,
                cwd=ROOT,
            )
            assert done.returncode == 0, done.stdout + done.stderr


# --------------------------------------------------------------------------------------------------- links and tables


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def anchors(path: Path) -> set[str]:
    prose = re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.M | re.S)
    return {slug(heading) for heading in re.findall(r"^#+ (.+)$", prose, re.M)}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_link_is_dead(document: str) -> None:
    links = re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", TEXT[document])
    for link in links:
        if re.match(r"https?://", link):
            continue
        file, _, anchor = link.partition("#")
        target = (ROOT / document).parent / file if file else ROOT / document
        assert target.exists(), f"{document}: {link}"
        assert not anchor or anchor in anchors(target), f"{document}: {link}"
    assert links


@pytest.mark.parametrize("document", [README, PRINCIPLES, GUIDE, REPRODUCTION])
def test_paths_and_modules_that_are_named_exist(document: str) -> None:
    new = {"src/coterie/algorithms/elastic.py", "tests/oracles/test_elastic.py"}  # the reader is to make these
    for path in re.findall(r"`((?:src|tests|docs|benchmarks|results)/[\w./]*)`", TEXT[document]):
        assert (ROOT / path).exists() or path in new, f"{document}: {path}"
    for module in re.findall(r"`(coterie\.\w+)`", TEXT[document]):
        name = module.partition(".")[2]
        assert name in coterie.__all__ or importlib.util.find_spec(module), f"{document}: {module}"


def methods() -> Iterator[str]:
    for name in registry.names():
        method = registry.get(name)
        gives = {
            "personal": method.has_personal,
            "global": method.has_global and not method.derived_global,
            "global (derived)": method.has_global and method.derived_global,
            "hybrid": method.has_hybrid,
        }
        outputs = ", ".join(model for model, given in gives.items() if given)
        yield f"| `{name}` | {method.title} | {outputs} | {method.summary()} | {method.citation} |"


def test_the_table_of_methods_is_the_registry() -> None:
    written = [line for line in section(README, "Methods").splitlines() if line.startswith("| `")]
    expected = list(methods())
    assert written == expected, "in README.md, Methods, write these rows:\n" + "\n".join(expected)


@pytest.mark.parametrize(
    ("title", "names"),
    [("Data", data.names()), ("Partitions", list(partitions.SCHEMES)), ("Models", list(models.names()))],
)
def test_the_readme_names_what_there_is(title: str, names: list[str]) -> None:
    text = section(README, title)
    assert [name for name in names if f"`{name}`" not in text] == []


def test_what_the_readme_shows_is_what_a_run_prints() -> None:
    shown = next(block.text for block in BLOCKS if block.document == README and "method  model" in block.text)
    lines = shown.splitlines()
    model = {"final": dict.fromkeys(("mean", "std", "worst"), 0.5), "best": {"mean": 0.5, "round": 7}}
    summaries = [
        {"algorithm": name, "seed": 1, "rounds": 50, "metric": "accuracy", "higher_is_better": True, "personal": model}
        | {"seconds": {"total": 12.3}}
        for name in ("fedacs", "fedamp", "fedavg", "local")
    ]
    out = io.StringIO()
    Console(file=out, width=80).print(table(summaries))
    printed = [line.rstrip() for line in out.getvalue().splitlines()]
    assert lines[:4] == printed[:4]
    for line, like in zip(lines[4:8], printed[4:8], strict=True):
        assert re.sub(r"\d", "0", line).split()[:2] == re.sub(r"\d", "0", like).split()[:2]
        assert [len(word) for word in line.split()[2:6]] == [len(word) for word in like.split()[2:6]]


def test_the_fashion_mnist_check_is_what_was_measured() -> None:
    check = json.loads((ROOT / "results/fashion_mnist_check.json").read_text())
    text = section(REPRODUCTION, "Fashion-MNIST, 100 clients with 50 samples each")
    rows = [
        [cell.strip(" `") for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| `")
    ]
    assert len(rows) == len(check["runs"]) == 5
    for row, found in zip(rows, check["runs"], strict=True):
        settings = "".join(f" --set {key}={value:g}" for key, value in found["settings"].items())
        assert row[:2] == [found["algorithm"] + settings, found["model"]]
        assert [float(cell) for cell in row[2:5]] == [found[key] for key in ("measured", "prototype", "difference")]
        assert found["difference"] == pytest.approx(found["measured"] - found["prototype"])
        assert abs(found["difference"]) <= check["bound"] == 2.0
    (commands,) = [block for block in BLOCKS if block.document == REPRODUCTION and "coterie run" in block.text]
    common, *runs = [line for line in commands.text.splitlines() if line]
    for line, found in zip(runs, check["runs"], strict=True):
        words = shlex.split(line.replace("$options", shlex.split(common)[0].removeprefix("options=")))
        assert words[:3] == ["coterie", "run", found["algorithm"]]
        given = dict(zip(words[3::2], words[4::2], strict=True))
        given.pop("--out")
        settings = dict([given.pop("--set").split("=")]) if "--set" in given else {}
        assert {key: float(value) for key, value in settings.items()} == found["settings"]
        values = {name.removeprefix("--").replace("-", "_"): yaml.safe_load(value) for name, value in given.items()}
        assert values == check["config"]


def test_every_dependency_has_its_reason() -> None:
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *PROJECT["build-system"]["requires"], "editables"]
    wanted += [text for extra in project["optional-dependencies"].values() for text in extra]
    written = [canonicalize_name(name) for name in first_cells(section(PRINCIPLES, "Dependencies"))]
    assert len(written) == len(set(written))
    assert set(written) == {canonicalize_name(Requirement(text).name) for text in wanted}


def test_the_rooms_are_those_of_the_import_contract() -> None:
    contract = PROJECT["tool"]["importlinter"]["contracts"][0]
    layers = [{room.strip(" ()") for room in layer.split("|")} for layer in contract["layers"]]
    written = first_cells(section(PRINCIPLES, "Rooms and import directions"))
    level = {room: number for number, layer in enumerate(layers) for room in layer}
    assert set(written) == set(level)
    assert [level[room] for room in written] == sorted(level.values())


WORDS = (
    "client cohort row message reply personal global round exchange task fold step share newcomer ask state stream "
    "engine chunk split hybrid derived weights oracle layout key purpose run"
)


def test_the_glossary_has_the_words_and_the_code_uses_them() -> None:
    glossary = [word for cell in first_cells(section(PRINCIPLES, "Glossary")) for word in cell.split(", ")]
    assert set(WORDS.split()) <= set(glossary)
    assert len(glossary) == len(set(glossary))
    code = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py")).lower()
    used = set(re.findall(r"[a-z]+", code))
    assert [word for word in glossary if word not in used] == []
