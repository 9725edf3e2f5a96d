"""Mistakes in a comparison, on the command line and in a file: one sentence, and nothing is begun."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.errors import ConfigError, CoterieError
from coterie.studies.comparison import make_plan

MISTAKES: dict[str, tuple[list[str], str]] = {
    "a number without --seeds": (["fedavg", "10"], "'10' is no method: give seeds as --seeds 10"),
    "a seed that is none": (["fedavg", "--seeds", "one"], "--seeds has 'one'"),
    "a seed twice": (["fedavg", "--seeds", "1,1"], "each must be given once"),
    "a method twice": (["fedavg", "fedavg"], "methods has 'fedavg' twice"),
    "an unknown method": (["fedavgg"], "did you mean 'fedavg'?"),
    "an unknown parameter to tune": (
        ["fedavg", "--tune", "q=1,2"],
        "there is no parameter of these methods called 'q'",
    ),
    "no values to tune": (["fedavg", "--tune", "lr"], "--tune is 'lr'"),
    "no validation data": (["fedavg", "--tune", "lr=0.1,0.2", "--validation", "0"], "validation is 0"),
    "no validation data for best": (["fedavg", "--at", "best", "--validation", "0"], "validation is 0"),
    "another round": (["fedavg", "--at", "worst"], "at is 'worst', but must be final, best or best_oracle"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_mistakes_are_one_sentence(case: str, tmp_path: Path) -> None:
    words, sentence = MISTAKES[case]
    with pytest.raises(CoterieError) as refused:
        CliRunner().invoke(app, ["compare", *words, "--out", str(tmp_path / "all")], catch_exceptions=False)
    assert sentence in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "all").exists()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"methods": []}, "methods is []"),
        ({"methods": [{"algorithm": "fedavg", "clients": 3}]}, "there is no entry of a method called 'clients'"),
        ({"methods": ["fedavg"], "seed": 1}, "seed is 1, but a comparison takes seeds"),
        ({"methods": ["fedavg"], "grid": {"lr": [0.1]}, "tune": {"lr": [0.1]}}, "both in grid and in tune"),
        ({"methods": [{"algorithm": "fedavg", "lr": 0.1}], "tune": {"lr": [0.1]}}, "sets lr, which tune varies"),
        ({"methods": ["fedavg"], "grid": {"seed": [1]}}, "grid has 'seed'"),
        ({"methods": ["fedavg"], "grid": {"rounds": 3}}, "grid has 3 for rounds"),
    ],
)
def test_plans_that_are_refused(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        make_plan(values)
