"""What is released: a wheel and a source archive that hold what they should, and a wheel that works when installed.

A whole installation fetches PyTorch, which takes too long for every run of the tests: the wheel is installed by itself
into an empty environment, which is then shown the dependencies of this one, but not this one's Coterie.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from email.parser import Parser
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
VERSION = PROJECT["project"]["version"]
INFO = f"coterie-{VERSION}.dist-info"
SUFFIXES = {".py", ".typed", ".yaml", ".css", ".js", ".html", ".json"}  # of what the package may hold

PARTS = {"pydantic_core": ["pydantic"], "triton": ["torch"]}  # what comes with a package that is declared


@dataclass(frozen=True)
class Built:
    """What a build left, with its files' contents by name."""

    wheel: Path
    in_wheel: dict[str, bytes]
    in_sdist: dict[str, bytes]


def build(source: Path, out: Path, *targets: str) -> None:
    """Build as ``pip`` does, with the backend that ``make`` installed."""
    words = [word for target in targets for word in ("--target", target)]
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--directory", str(out), *words],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    out = tmp_path_factory.mktemp("dist")
    build(ROOT, out, "wheel", "sdist")
    assert sorted(path.name for path in out.iterdir()) == [
        f"coterie-{VERSION}-py3-none-any.whl",
        f"coterie-{VERSION}.tar.gz",
    ]
    wheel = out / f"coterie-{VERSION}-py3-none-any.whl"
    with tarfile.open(out / f"coterie-{VERSION}.tar.gz") as archive:
        archive.extractall(out / "extracted", filter="data")
    top = out / "extracted" / f"coterie-{VERSION}"
    assert [path.name for path in top.parent.iterdir()] == [top.name]
    return Built(wheel, contents(wheel), {str(path.relative_to(top)): path.read_bytes() for path in files(top)})


def files(folder: Path) -> Iterator[Path]:
    yield from (path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts)


def test_the_wheel_holds_the_package_and_nothing_else(built: Built) -> None:
    source = {f"coterie/{path.relative_to(ROOT / 'src/coterie')}": path for path in files(ROOT / "src/coterie")}
    facts = {f"{INFO}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert built.in_wheel.keys() == source.keys() | facts
    assert "coterie/py.typed" in source and {Path(name).suffix for name in source} <= SUFFIXES
    for name, path in source.items():
        assert built.in_wheel[name] == path.read_bytes(), name
    assert built.in_wheel[f"{INFO}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()


def asked(text: str) -> tuple[str, str, str]:
    requirement = Requirement(text)
    return canonicalize_name(requirement.name), str(requirement.specifier), str(requirement.marker or "")


def test_the_wheel_says_what_it_needs(built: Built) -> None:
    facts = Parser().parsestr(built.in_wheel[f"{INFO}/METADATA"].decode())
    project = PROJECT["project"]
    assert (facts["Name"], facts["Version"], facts["Requires-Python"]) == ("coterie", VERSION, ">=3.11")
    wanted = {asked(text) for text in project["dependencies"]}
    for extra, texts in project["optional-dependencies"].items():
        for text in texts:
            name, _, where = text.partition(";")
            there = f"({where.strip()}) and " if where else ""
            wanted.add(asked(f'{name}; {there}extra == "{extra}"'))
    found = {asked(text) for text in facts.get_all("Requires-Dist", [])}
    assert found == wanted and set(facts.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    assert built.in_wheel[f"{INFO}/entry_points.txt"].decode().split() == [
        "[console_scripts]", "coterie", "=", "coterie.cli:main",
    ]  # fmt: skip


def test_the_source_archive_holds_what_it_should(built: Built) -> None:
    named = [name.lstrip("/") for name in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]]
    tops = {name.split("/")[0] for name in built.in_sdist}
    assert tops == {*named, "pyproject.toml", "PKG-INFO", ".gitignore"}
    assert {"README.md", "CONTRIBUTING.md", "CITATION.cff", "SECURITY.md", "CODE_OF_CONDUCT.md", "LICENSE"} <= tops
    for folder in ("src", "tests", "docs"):
        theirs = {name for name in built.in_sdist if name.startswith(f"{folder}/")}
        assert theirs == {str(path.relative_to(ROOT)) for path in files(ROOT / folder)}
    hidden = [name for name in built.in_sdist if any(part.startswith(".") for part in Path(name).parts)]
    assert hidden == [".gitignore"]


def test_the_source_archive_builds_the_same_wheel(built: Built, tmp_path: Path) -> None:
    for name, data in built.in_sdist.items():
        place = tmp_path / "source" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    build(tmp_path / "source", tmp_path / "dist", "wheel")
    (wheel,) = (tmp_path / "dist").iterdir()
    assert contents(wheel) == built.in_wheel


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def test_everything_that_is_imported_is_declared() -> None:
    project = PROJECT["project"]
    extras = [text for name, texts in project["optional-dependencies"].items() if name != "dev" for text in texts]
    declared = {canonicalize_name(Requirement(text).name) for text in (*project["dependencies"], *extras)}
    owners = {"mlflow": ["mlflow-skinny"]} | dict(packages_distributions()) | PARTS
    names = {name for path in files(ROOT / "src") if path.suffix == ".py" for name in imported(path)}
    foreign = names - sys.stdlib_module_names - {"coterie"}
    undeclared = {
        name for name in foreign if not {canonicalize_name(owner) for owner in owners.get(name, [name])} & declared
    }
    assert undeclared == set() and {"torch", "tensorboardX", "yaml", "sklearn"} <= foreign


def test_the_wheel_works_in_an_empty_environment(built: Built, tmp_path: Path) -> None:
    place = tmp_path / "empty"
    venv.create(place, symlinks=True)
    python = place / "bin/python"
    installing = ["install", "--quiet", "--no-deps", "--no-index", "--disable-pip-version-check", str(built.wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *installing], check=True, cwd=tmp_path)
    (packages,) = place.glob("lib/python*/site-packages")
    # Folders that a .pth file names are searched, but .pth files in them are not read: an editable install is hidden.
    (packages / "dependencies.pth").write_text(
        "\n".join({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    )
    outside = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "COTERIE", "PYTEST"))
    }
    outside |= {"OMP_NUM_THREADS": "1"}

    def run(*words: str) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=outside, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = "import coterie, importlib.metadata as m; print(coterie.__file__, m.version('coterie'), m.files('coterie'))"
    found = run(str(python), "-c", where)
    assert found.startswith(f"{packages / 'coterie/__init__.py'} {VERSION} ") and "py.typed" in found
    coterie = str(place / "bin/coterie")
    assert run(coterie, "--version") == f"{VERSION}\n"
    words = ["--clients", "4", "--rounds", "1", "--scarcity", "20", "--threads", "1", "--track", "tensorboard"]
    shown = run(coterie, "run", "fedacs", *words, "--out", "first")
    assert "FedACS, test accuracy, 1 round," in shown and "personal" in shown
    assert {"config.yaml", "metrics.parquet", "summary.json", "tensorboard"} <= {
        path.name for path in (tmp_path / "first").iterdir()
    }
