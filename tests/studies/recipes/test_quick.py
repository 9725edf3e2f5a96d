"""A quick version of each paper, run for real: what is expected to hold in it holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.cli.app import app

ONE_OF_EACH = ("fedacs-table1", "fedamp-table3", "fedpg-table2", "flame-table3-hybrid")


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_the_quick_version(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = CliRunner(env={"COLUMNS": "80"}).invoke(app, ["recipe", "run", name, "--quick"])
    assert found.exit_code == 0, found.output
    assert "the quick version" in found.stdout and "Criteria: " in found.stdout
    folder = tmp_path / "runs" / f"{name}-quick"
    made = json.loads((folder / "recipe.json").read_text())
    assert made["recipe"] == name and made["quick"] is True
    assert all(part["cells"] and not part["absent"] and not part["failed"] for part in made["parts"])
    judged = [criterion for criterion in made["criteria"] if criterion["status"] != "left out"]
    assert judged and {criterion["status"] for criterion in judged} == {"holds"}
    assert sum((folder / file).stat().st_size for file in ("recipe.json", "recipe.md")) < 100_000
