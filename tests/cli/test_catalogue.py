"""The catalogue that lists are answered from says what the things themselves say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.cli import catalogue
from coterie.cli.app import app
from coterie.errors import UnknownName

METHOD = """
from coterie.algorithms.fedavg import FedAvg


class Mine(FedAvg):
    \"\"\"A method of my own.\"\"\"

    name = "mine"
    title = "Mine"
    citation = "nobody 2026"
"""


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let the file know nothing yet."""
    path = tmp_path / "catalogue.json"
    path.write_text("{" + ", ".join(f'"{kind}": []' for kind in catalogue._KINDS) + "}")
    monkeypatch.setattr(catalogue, "FILE", path)
    catalogue._read.cache_clear()
    yield
    catalogue._read.cache_clear()


def test_the_file_is_up_to_date() -> None:
    anew = "the catalogue is not what the code says: write it anew with `python -m coterie.cli.catalogue`"
    assert catalogue.FILE.read_text(encoding="utf-8") == catalogue.text(), anew


@pytest.mark.usefixtures("empty")
def test_what_is_not_in_the_file_is_described_all_the_same() -> None:
    found = {kind: list(catalogue.chosen(kind, None)) for kind in catalogue._KINDS if kind != "metric"}
    assert found == {kind: entries for kind, entries in catalogue.described().items() if kind != "metric"}
    (accuracy,) = catalogue.chosen("metric", "accuracy")
    assert accuracy.name == "accuracy" and "more is better" in accuracy.facts
    with pytest.raises(UnknownName, match="there is no metric 'accurracy': did you mean 'accuracy'"):
        list(catalogue.chosen("metric", "accurracy"))


def test_a_method_of_the_users(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(METHOD)
    shown = CliRunner().invoke(app, ["list", "algorithms", str(path)])
    assert shown.exit_code == 0 and shown.stdout.startswith("mine  Mine · nobody 2026 · gives ")
    assert "A method of my own." in shown.stdout and "lr=" in shown.stdout
