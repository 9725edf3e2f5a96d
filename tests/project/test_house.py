"""The rules of the house that no other tool holds: pins, words that do not belong here, the licence, global seeding."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILD = ("hatchling", "editables")  # what the Makefile installs to build the package
EXTRAS = ("data-hub", "dev", "federation", "hf", "privacy")  # and those that it installs with it


def constraints() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    entries = [line for line in lines if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", entry) for entry in entries), (
        "names and exact versions only"
    )
    pins = dict(entry.split("==") for entry in entries)
    assert len(pins) == len(entries) and list(pins) == sorted(pins)
    return pins


def installed() -> set[str]:
    """Everything that the package with its tools draws in, by the metadata of what is installed here."""
    package = PROJECT["project"]
    wanted = [*package["dependencies"], *BUILD]
    wanted += [text for extra in EXTRAS for text in package["optional-dependencies"][extra]]
    waiting, seen = [Requirement(text) for text in wanted], set()
    while waiting:
        requirement = waiting.pop()
        if (name := canonicalize_name(requirement.name)) in seen:
            continue
        seen.add(name)
        for text in importlib.metadata.requires(name) or ():
            below = Requirement(text)
            if below.marker is not None and not any(
                below.marker.evaluate({"extra": extra}) for extra in (*requirement.extras, "")
            ):
                continue
            # An accelerator's build of torch names the exact version of everything that it adds.
            if name == "torch" and any(part.operator == "==" for part in below.specifier):
                continue
            waiting.append(below)
    return seen


def test_everything_that_is_installed_is_pinned() -> None:
    assert installed() - constraints().keys() == set()


def test_pins_satisfy_what_the_project_asks_for() -> None:
    package, pins = PROJECT["project"], constraints()
    extras = [text for extra in EXTRAS for text in package["optional-dependencies"][extra]]
    for text in (*package["dependencies"], *extras):
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text
    assert pins["torch"] == "2.13.0"


# Written so that this file does not hold what it looks for.
FORBIDDEN = {
    "a path of somebody's machine": r"(?<![\w.:/~-])/(?:wor[k]|roo[t]|op[t]|hom[e]|User[s]|mn[t])/\w",
    "a package registry's address": r"pyp[i]\.org|pythonhoste[d]\.org|download\.pytorc[h]|anacond[a]\.org"
    r"|--(?:extra-)?inde[x]-url|--find-link[s]",
    "notes that are not part of the project": r"AMENDMENT[S]|\bSPE[C]\.md|\bDESIG[N]\.md|\bSTYL[E]\.md",
}


def texts() -> Iterator[Path]:
    for name in (".ci", ".github", "benchmarks", "docs", "src", "tests"):
        yield from (
            path for path in sorted((ROOT / name).rglob("*")) if path.is_file() and "__pycache__" not in path.parts
        )
    yield from (path for path in sorted(ROOT.iterdir()) if path.is_file() and path.name != ".git")


@pytest.mark.parametrize("kind", FORBIDDEN)
def test_words_that_do_not_belong_here(kind: str) -> None:
    found, looked_at = [], 0
    for path in texts():
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        looked_at += 1
        found += [
            f"{path.relative_to(ROOT)}:{n}" for n, line in enumerate(lines, 1) if re.search(FORBIDDEN[kind], line)
        ]
    assert looked_at > 30
    assert not found, f"{kind}: {', '.join(found)}"


@pytest.mark.parametrize(
    ("kind", "text", "is_meant"),
    [
        ("a path of somebody's machine", 'open("/ho' + 'me/ada/runs")', True),
        ("a path of somebody's machine", "https://example.org/wo" + "rk/a", False),
        ("a path of somebody's machine", "~/ho" + "me/a", False),
        ("a package registry's address", "https://py" + "pi.org/simple", True),
        ("a package registry's address", "--index" + "-url x", True),
        ("notes that are not part of the project", "see SP" + "EC.md", True),
    ],
)
def test_the_words_are_found(kind: str, text: str, is_meant: bool) -> None:
    assert bool(re.search(FORBIDDEN[kind], text)) is is_meant


def test_the_words_are_looked_for_in_what_the_host_of_the_repository_reads() -> None:
    found = {path.relative_to(ROOT).as_posix() for path in texts()}
    assert {".ci/run", ".github/workflows/ci.yml", ".github/pull_request_template.md", "CONTRIBUTING.md"} <= found


def test_the_licence() -> None:
    text = (ROOT / "LICENSE").read_text()
    assert text.split()[:4] == ["Apache", "License", "Version", "2.0,"]
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["project"]["license"] == "Apache-2.0"


BANNED = """\
import random
import numpy as np
import torch
np.random.seed(1)
np.random.set_state(())
np.random.rand(2)
torch.manual_seed(1)
torch.seed()
torch.random.manual_seed(1)
torch.cuda.manual_seed(1)
torch.cuda.manual_seed_all(1)
torch.cuda.seed_all()
"""
ALLOWED = """\
import torch
generator = torch.Generator()
generator.manual_seed(1)
"""


def lint(code: str) -> set[int]:
    """Give the lines of a made-up module of the package in which lint finds a source of global randomness."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "ruff",
            "check",
            "--no-cache",
            "--output-format=json",
            "--stdin-filename=src/coterie/new.py",
        ],
        input=code,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode in (0, 1), done.stderr
    return {found["location"]["row"] for found in json.loads(done.stdout) if found["code"] in ("TID251", "NPY002")}


def test_lint_refuses_global_seeding() -> None:
    imports = {2, 3}
    assert lint(BANNED) == set(range(1, len(BANNED.splitlines()) + 1)) - imports
    assert lint(ALLOWED) == set()


def test_only_the_source_of_randomness_may_seed() -> None:
    silenced = [
        path.relative_to(ROOT).as_posix()
        for path in texts()
        if path.suffix == ".py" and path != Path(__file__) and re.search(r"noqa.*(TID251|NPY002)", path.read_text())
    ]
    assert silenced == ["src/coterie/randomness.py"]
    everything = [  # a bare "noqa" would silence it too
        path.relative_to(ROOT).as_posix()
        for path in texts()
        if path.suffix == ".py" and re.search(r"#\s*noqa\s*$", path.read_text(), re.MULTILINE)
    ]
    assert everything == []


def test_what_a_source_release_holds_is_there() -> None:
    for name in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]:
        assert name.startswith("/") and (ROOT / name.lstrip("/")).exists(), name


def test_every_make_target_says_what_it_does() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = next(line for line in text.splitlines() if line.startswith(".PHONY:")).split()[1:]
    assert set(re.findall(r"^([a-z]+):.*## .+$", text, re.MULTILINE)) == set(phony)
    assert {"demo", "test", "quick", "check", "clean", "help"} <= set(phony)
