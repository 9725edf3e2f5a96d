"""Runs that differ only in how they were computed are one line, and may be averaged over seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coterie.config import ExperimentConfig, fields
from coterie.errors import ConfigError
from coterie.results import over_seeds
from coterie.results.figures import Line
from coterie.results.labels import lines_of
from tests.results.report.folders import write_run

OTHER: dict[str, Any] = {
    "checkpoint_every": 7,
    "engine": "loop",
    "device": "auto",
    "kernel": "vmap",
    "convolution": "single",
    "chunk": 3,
    "keep": "host",
    "keep_samples": "disk",
    "scratch": "/elsewhere",
    "compile": True,
    "threads": 2,
}
"""Another value than the default for each field that says how a run is computed."""


def test_there_is_another_value_for_each() -> None:
    assert OTHER.keys() == fields("how")
    assert all(ExperimentConfig.model_fields[name].default != value for name, value in OTHER.items())


@pytest.mark.parametrize("name", sorted(fields("how")))
def test_how_a_run_is_computed_tells_no_lines_apart(name: str, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "one", seed=1), write_run(tmp_path / "two", seed=2, **{name: OTHER[name]})]
    assert lines_of(runs) == [Line("FedACS"), Line("FedACS")]
    assert over_seeds(runs).seeds == 2


@pytest.mark.parametrize(("name", "value"), [("clients", 8), ("dtype", "float64"), ("metrics", ["accuracy", "auroc"])])
def test_what_is_computed_does(name: str, value: Any, tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "one", seed=1), write_run(tmp_path / "two", seed=2, **{name: value})]
    assert lines_of(runs)[0] != lines_of(runs)[1]
    with pytest.raises(ConfigError, match=f"{name} is .*: it must be the same in both"):
        over_seeds(runs)


def test_what_is_recorded_tells_no_lines_apart(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "one", seed=1), write_run(tmp_path / "two", seed=2, eval_every=2, eval_train=True)]
    assert lines_of(runs) == [Line("FedACS"), Line("FedACS")]
