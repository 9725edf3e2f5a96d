"""The documents against the code: every program in them runs, every table and link in them is true."""

from __future__ import annotations

import ast
import glob
import importlib.util
import io
import itertools
import json
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator
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
from coterie import data, models
from coterie.algorithms import registry
from coterie.cli.app import app
from coterie.data import partitions
from coterie.results import table
from coterie.studies import comparison
from tests.documents import (
    BLOCKS,
    CHOICE,
    DOCUMENTS,
    EXPERIMENT,
    FEDERATION,
    GUIDES,
    HOSPITALS,
    PRINCIPLES,
    README,
    REPRODUCTION,
    ROOT,
    TEXT,
    Block,
    blocks,
    first_cells,
    section,
)
from tests.programs import load_program

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROGRAMS = ("bash", "python")
MARKS = re.compile(r"run|row|test|file: [\w.]+|not run: .+")
GENERATED = re.compile(r"^<!-- generated: \w+ -->$", re.M)
SIZES = {"--clients": 5, "--rounds": 2}  # no larger than this
CUT = {"scarcity": 20, "checkpoint_every": 1, "threads": 1}
SMALL = [word for name, value in CUT.items() for word in (f"--{name.replace('_', '-')}", str(value))]
HERE = "PYTHONPATH=. "  # before a command that imports a module that the document wrote


# --------------------------------------------------------------------------------------------------- programs that run


def test_every_fence_is_closed_and_every_program_is_run_or_says_why_not() -> None:
    for document in DOCUMENTS:
        fences = re.findall(r"^```", TEXT[document], re.M)
        assert len(fences) == 2 * sum(block.document == document for block in BLOCKS), document
        assert not re.findall(r"^ +```(?:bash|python)", TEXT[document], re.M), f"{document}: a program in a list"
        marks = re.findall(r"^<!-- (?!table: ).+ -->$", GENERATED.sub("", TEXT[document]), re.M)
        assert len(marks) == sum(block.document == document and bool(block.mark) for block in BLOCKS), document
    for block in BLOCKS:
        marked = MARKS.fullmatch(block.mark) is not None
        assert marked or (not block.mark and block.language not in PROGRAMS), f"{block.document}:{block.line}"
    assert sum(block.mark == "run" for block in BLOCKS) >= 8


def small(command: str) -> list[str]:
    """The arguments of a ``coterie`` command, with the same options but small sizes."""
    program, *arguments = [
        word
        for written in shlex.split(command.removeprefix(HERE), comments=True)
        for word in (sorted(glob.glob(written)) if "*" in written else [written])
    ]
    assert program == "coterie", f"only coterie is run here, not {command!r}"
    if arguments[0] not in ("run", "compare"):
        return arguments
    own = any(word.startswith(("npz:", "import:")) or ",client=" in word for word in arguments)
    named = own and "--partition" not in arguments
    for option, most in SIZES.items():
        if option == "--clients" and (named or "natural" in arguments):
            continue  # as many as the data name
        if option in arguments:
            place = arguments.index(option) + 1
            arguments[place] = str(min(int(arguments[place]), most))
        else:
            arguments += [option, str(most)]
    if "--seeds" in arguments:
        first = arguments.index("--seeds") + 1
        seeds = list(itertools.takewhile(str.isdecimal, arguments[first:]))
        arguments[first : first + len(seeds)] = seeds[:2]
    elif arguments[0] == "compare":
        arguments += ["--seeds", "1"]
    return [*arguments, *SMALL]


def run_commands(text: str) -> None:
    for command in filter(None, text.replace("\\\n", " ").splitlines()):
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

    def run_small(algorithm: Any, *, rounds: int, **settings: Any) -> coterie.Result:
        if "clients" in settings:
            settings["clients"] = min(settings["clients"], 5)
        return run(algorithm, rounds=min(rounds, 2), scarcity=20, progress=False, **settings)

    def plan_small(values: dict[str, Any]) -> comparison.ComparisonPlan:
        sizes = {name.removeprefix("--"): min(values[name.removeprefix("--")], most) for name, most in SIZES.items()}
        return make_plan(values | sizes | CUT | {"seeds": [1]})

    make_plan = comparison.make_plan
    monkeypatch.setattr(coterie, "run", run_small)
    monkeypatch.setattr(comparison, "make_plan", plan_small)
    exec(compile(block.text, f"{block.document}:{block.line}", "exec"), {"__name__": "document"})


# The guide about hospitals is followed without shortening anything, in a file of its own.
@pytest.mark.parametrize("document", sorted({block.document for block in BLOCKS if block.mark == "run"} - {HOSPITALS}))
def test_programs_run(document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if document == FEDERATION:
        pytest.importorskip("cryptography", reason="certificates for a try-out need coterie[federation]")
    monkeypatch.chdir(tmp_path)
    if HERE in TEXT[document]:
        monkeypatch.syspath_prepend(tmp_path)
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
    known |= {"--help", "--logdir", "--trusted-entities"}  # of TensorBoard and of Flower
    known |= {"--standalone", "--nproc-per-node"}  # of torchrun
    known |= {"--pdb", "--quick"}  # of pytest, and tests/conftest.py
    programs = [path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks").rglob("*.py")]
    known |= {option for text in programs for option in re.findall(r"add_argument\(\s*\"(--[a-z-]+)\"", text)}
    for document in GUIDES:
        named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", TEXT[document]))
        assert named <= known, document


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
        made = target.parent.name == "reference"  # its anchors come with the site: tests/test_site.py
        assert not anchor or made or anchor in anchors(target), f"{document}: {link}"


@pytest.mark.parametrize("document", GUIDES)
def test_paths_and_modules_that_are_named_exist(document: str) -> None:
    new = {"src/coterie/algorithms/elastic.py", "tests/oracles/test_elastic.py"}  # the reader is to make these
    for path in re.findall(r"`((?:src|tests|docs|benchmarks|results)/[\w./]*)`", TEXT[document]):
        assert (ROOT / path).exists() or path in new or "NAME" in path, f"{document}: {path}"
    for module in re.findall(r"`(coterie\.\w+)`", TEXT[document]):
        name = module.partition(".")[2]
        assert name in coterie.__all__ or importlib.util.find_spec(module), f"{document}: {module}"


def test_the_methods_that_the_readme_names_are_there() -> None:
    text = section(README, "What is in it")
    titles = {registry.get(name).title for name in registry.names()}
    (listed,) = [line for line in text.splitlines() if line.startswith("| methods |")]
    named = re.findall(r"`(\w+)`", listed)
    assert len(named) >= 6 and set(named) <= set(registry.names())
    spoken = re.sub(r"\([^)]*\)", "", listed.split("|")[2]).split(": ")
    for title in re.split(r",? and |, ", spoken[0].partition(", and what")[0]) + spoken[1].split(", ")[:-1]:
        assert title.strip() in titles, title
    assert {registry.get(name).title for name in named} <= {title for title in titles if title in listed}


@pytest.mark.parametrize(
    ("title", "names"),
    [("Data", data.names()), ("Partitions", list(partitions.SCHEMES))],
)
def test_what_the_guide_names_is_there(title: str, names: list[str]) -> None:
    # That nothing is missing is the catalogue's matter, which is made from the code.
    named = [name for cell in first_cells(section(EXPERIMENT, title)) for name in re.findall(r"\w+", cell)]
    assert len(named) >= 10 and set(named) <= set(names)


def test_the_models_that_the_guide_names_are_there() -> None:
    listed = section(EXPERIMENT, "Models").partition("The models are")[2].partition("For\ntables")[0]
    named = re.findall(r"`(\w+)(?::[^`]*)?`", listed)
    assert len(named) >= 10 and set(named) <= set(models.names())


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
        assert line.lower().split()[:2] == like.lower().split()[:2]
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


def benchmark_of(name: str) -> Any:
    return load_program(ROOT / f"benchmarks/{name}.py", f"{name}_benchmark")


def test_what_is_said_of_methods_is_what_was_measured() -> None:
    benchmark = benchmark_of("methods")
    measured = json.loads((ROOT / "results/methods.json").read_text())
    assert set(measured["plans"]) == {path.stem for path in (ROOT / "benchmarks/plans").glob("*.yaml")}
    tables = benchmark.tables(measured)
    assert len(tables) == 6
    for title, text in tables.items():
        assert text in TEXT[CHOICE], f"in {CHOICE}, {title}, write:\n{text}"
        assert text in (ROOT / "results/methods.md").read_text(), title
    models = [row["models"] for rows in measured["plans"].values() for row in rows]
    means = [100 * cell["mean"] for found in models for cell in found.values()]
    # What the leaderboard's record gives is compared by tests/project/test_leaderboard_page.py.
    own = re.sub(r"^<!-- table: leaderboard -->\n.*^<!-- table: end -->\n", "", TEXT[CHOICE], flags=re.M | re.S)
    assert own != TEXT[CHOICE]
    for said in re.findall(r"([\d.]+) %", own):
        digits = len(said.partition(".")[2])
        assert any(f"{mean:.{digits}f}" == said for mean in means), f"{said} % was not measured"


def test_what_is_said_of_latecomers_is_what_was_measured() -> None:
    """Every table of the page is one that the benchmark makes of its results."""
    measured = json.loads((ROOT / "results/latecomers.json").read_text())
    tables = benchmark_of("latecomers").tables(measured["rows"])
    assert len(tables) == 2
    for title, text in tables.items():
        assert text in TEXT["docs/newcomers.md"], f"in docs/newcomers.md, {title}, write:\n{text}"


def test_the_first_page_counts_the_methods() -> None:
    assert "more than twenty methods" in " ".join(TEXT["docs/index.md"].split())
    assert len(registry.names()) > 20


def test_every_dependency_has_its_reason() -> None:
    project = PROJECT["project"]
    wanted = [*project["dependencies"], *PROJECT["build-system"]["requires"], "editables"]
    wanted += [text for extra in project["optional-dependencies"].values() for text in extra]
    written = [canonicalize_name(name) for name in first_cells(section(PRINCIPLES, "Dependencies"))]
    assert len(written) == len(set(written))
    assert set(written) == {canonicalize_name(Requirement(text).name) for text in wanted}


def test_the_rooms_are_those_of_the_import_contract() -> None:
    contract = PROJECT["tool"]["importlinter"]["contracts"][0]
    layers = [{room.strip() for room in re.split("[|:]", layer)} for layer in contract["layers"]]
    written = first_cells(section(PRINCIPLES, "Rooms and import directions"))
    level = {room: number for number, layer in enumerate(layers) for room in layer}
    assert set(written) == set(level)
    listed = {path.stem for path in (ROOT / "src/coterie").iterdir() if path.suffix == ".py" or path.is_dir()}
    assert set(written) == listed - {"__init__", "__pycache__"}
    assert [level[room] for room in written] == sorted(level.values())


def defined(path: Path) -> set[str]:
    """The functions, classes and methods of a file."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{each.name}" for each in node.body if isinstance(each, ast.FunctionDef)}
    return found


def test_the_walk_of_a_run_is_where_it_says() -> None:
    walk = section("CONTRIBUTING.md", "The walk of a run")
    steps = re.findall(r"^\|[ \d]*\| `(src/[\w/]+\.py)` \| `([\w.]+)` \|", walk, re.M)
    assert len(steps) == sum(line.startswith("|") for line in walk.splitlines()) - 4  # two headers with their lines
    assert [f"{name} is not in {path}" for path, name in steps if name not in defined(ROOT / path)] == []


WORDS = (
    "client cohort row message reply personal global round exchange task fold step share newcomer ask state stream "
    "engine chunk split hybrid derived weights oracle layout key purpose run"
)


def test_the_glossary_has_the_words_and_the_code_uses_them() -> None:
    glossary = [word for cell in first_cells(section(PRINCIPLES, "Glossary")) for word in cell.split(", ")]
    assert set(WORDS.split()) <= set(glossary)
    assert len(glossary) == len(set(glossary))
    code = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py")).lower()
    assert [word for word in glossary if not re.search(rf"(?<![a-z]){word}(?![a-z])", code)] == []
