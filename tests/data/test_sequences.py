"""Sequences of whole numbers, of any length."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from coterie import data
from coterie.cli.app import app
from coterie.data.sequences import padded
from coterie.errors import DataError


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_a_column_of_a_table_may_hold_sequences(ending: str, tmp_path: Path) -> None:
    words = [[5, 3], [7], [2, 2, 9]]
    frame = pd.DataFrame({"code": ["x", "y", "x"], "site": ["n", "n", "s"], "note": ["", "", ""]})
    if ending == "csv":
        frame.assign(words=[" ".join(map(str, row)) for row in words]).to_csv(tmp_path / "t.csv", index=False)
    else:
        frame.assign(words=words).to_parquet(tmp_path / "t.parquet")
    text = f"table:{tmp_path / 't'}.{ending},label=code,client=site,sequence=words"
    found = data.load(f"{text},padding=1")
    assert found.x.dtype == torch.int64 and found.x.tolist() == [[5, 3, 1], [7, 1, 1], [2, 2, 9]]
    assert found.classes == ("x", "y") and found.owner_names == ("n", "s") and found.preparation is None
    shown = CliRunner().invoke(app, ["data", "describe", text])
    assert shown.exit_code == 0 and "a sequence to predict from" in shown.output and "1 to 3 numbers" in shown.output
    assert data.load(f"{text},length=2").x.tolist() == [[5, 3], [7, 0], [2, 2]]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ([[1, 2], "a b"], "sequence 1 in here is 'a b', but must be whole numbers"),
        ([[1.5]], "sequence 0 in here is '[1.5]', but must be whole numbers"),
        ([[1], [-1]], "there is -1 in here, but numbers of words begin at 0"),
        ([[], ""], "all sequences in here are empty"),
    ],
)
def test_what_is_no_sequence_is_said(rows: list[object], sentence: str) -> None:
    with pytest.raises(DataError, match=re.escape(sentence)):
        padded(rows, None, 0, "here")
