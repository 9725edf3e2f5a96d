"""Formats: what was written in another one is refused in a sentence that says what to use."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from coterie.errors import CheckpointError, CoterieError, RunFolderError
from coterie.results import Result
from coterie.runs.storage import Checkpoints, RunFolder, read_config
from coterie.version import __version__

READS = f"Coterie {__version__} reads format 1"
SENTENCES: list[tuple[dict[str, Any], str]] = [
    ({"format": 2, "coterie": "9.1"}, f"is of a newer format, 2, and {READS}: use Coterie 9.1, which wrote it"),
    ({"format": 0, "coterie": "0.0"}, f"is of an older format, 0, and {READS}: use Coterie 0.0, which wrote it"),
    ({"format": 2, "coterie": None}, f"is of a newer format, 2, and {READS}: use the version that wrote it"),
    ({"format": "two"}, "is damaged: its format is 'two', but must be a whole number"),
    ({"format": 1.5}, "is damaged: its format is 1.5, but must be a whole number"),
    ({"format": True}, "is damaged: its format is True, but must be a whole number"),
    ({"format": None}, f"has no format, as before there were any, and {READS}: use the version that wrote it"),
]


def refused(sentence: str, error: CoterieError) -> None:
    assert str(error).endswith(sentence) and "\n" not in str(error), str(error)


def test_a_run_says_its_format_and_what_wrote_it(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, {"seed": 1}).close()
    about = json.loads((tmp_path / "run.json").read_text())
    assert datetime.fromisoformat(about.pop("created")).tzinfo is not None
    assert about.pop("python").count(".") == 2
    assert about == {"format": 1, "coterie": __version__, "torch": torch.__version__, "code": None}


@pytest.mark.parametrize(("changes", "sentence"), SENTENCES)
def test_a_run_of_another_format(changes: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    RunFolder.create(tmp_path, {"seed": 1}).close()
    about = json.loads((tmp_path / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps({**about, **changes}))
    for reader in (RunFolder.open, read_config, Result):
        with pytest.raises(RunFolderError, match=str(tmp_path)) as caught:
            reader(tmp_path)
        refused(sentence, caught.value)


def test_a_newer_run_is_told_before_its_configuration_is_read(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, {"seed": 1}).close()
    (tmp_path / "run.json").write_text('{"format": 2, "coterie": "9.1"}')
    (tmp_path / "config.yaml").write_text("not: [what, it, was")
    with pytest.raises(RunFolderError, match="newer format"):
        read_config(tmp_path)


def test_a_run_from_before_there_were_formats(tmp_path: Path) -> None:
    RunFolder.create(tmp_path, {"seed": 1}).close()
    (tmp_path / "run.json").unlink()
    with pytest.raises(RunFolderError, match="has no format, as before there were any"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"format"'])
def test_garbage_is_damage(text: str, tmp_path: Path) -> None:
    RunFolder.create(tmp_path, {"seed": 1}).close()
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"run\.json is damaged"):
        RunFolder.open(tmp_path)


@pytest.mark.parametrize("begun", ["run.json", "code"])
def test_what_a_kill_leaves_before_the_run_began_is_no_run(begun: str, tmp_path: Path) -> None:
    RunFolder.create(tmp_path, {"seed": 1}).close()
    (tmp_path / "config.yaml").unlink()
    if begun == "code":
        (tmp_path / "code").mkdir()
        (tmp_path / "code" / ".turned.py.draft").touch()
    RunFolder.create(tmp_path, {"seed": 2}).close()
    assert read_config(tmp_path) == {"seed": 2}


def test_a_folder_of_code_or_a_run_json_of_somebody_elses_is_not_taken(tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    with pytest.raises(RunFolderError, match="holds 'code'"):
        RunFolder.create(tmp_path, {"seed": 1})
    (tmp_path / "run.json").write_text('{"laps": 3}')
    with pytest.raises(RunFolderError, match="is not empty"):
        RunFolder.create(tmp_path, {"seed": 1})


def rewrite(path: Path, changes: dict[str, Any]) -> None:
    """Change a checkpoint's record as another version would have written it, with its checksum."""
    record = {**json.loads((path / "checkpoint.json").read_text()), **changes}
    del record["checksum"]
    record["checksum"] = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    (path / "checkpoint.json").write_text(json.dumps(record))


@pytest.mark.parametrize(("changes", "sentence"), SENTENCES)
def test_a_checkpoint_of_another_format_is_not_passed_over(
    changes: dict[str, Any], sentence: str, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path, "run")
    checkpoints.save(1, {"w": torch.ones(2)}, {})
    last = checkpoints.save(2, {"w": torch.ones(2)}, {})
    rewrite(last, changes)
    with pytest.raises(CheckpointError, match=str(last)) as caught:
        checkpoints.latest()
    refused(sentence, caught.value)


def test_a_damaged_format_is_damage(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, "run")
    checkpoints.save(1, {"w": torch.ones(2)}, {})
    last = checkpoints.save(2, {"w": torch.ones(2)}, {}) / "checkpoint.json"
    last.write_text(last.read_text().replace('"format": 1', '"format": 3'))
    found = checkpoints.latest()
    assert found is not None and found.round == 1
