"""The algorithm of docs/add_an_algorithm.md: it conforms, its oracles hold and can fail, it is in the house style."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coterie.algorithms import registry
from coterie.algorithms.base import Algorithm
from tests import conformance_table
from tests import test_conformance as conformance
from tests.documents import GUIDE, ROOT, only


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
    monkeypatch.setattr(task, "start", lambda self, context, state, message: _wrong(self, context, state, message))
    for oracle in oracles:
        with pytest.raises(AssertionError):
            oracle()


def _wrong(task: Any, context: Any, state: Any, message: Any) -> Any:
    w = (state["w"] + message["w"]) / 3
    return {"w": w, **task.optimiser.init(context, w)}


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
