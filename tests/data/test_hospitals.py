"""The table of the guide: drawn alike by the same seed, with what it promises in it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.data.hospitals import HOSPITALS, LEAST, draw_hospitals
from coterie.data.table import TableSource
from coterie.errors import ConfigError

KINDS = {
    "admitted": ("date", "none"),
    "age": ("number", "none"),
    "sex": ("category", "none"),
    "ward": ("category", "none"),
    "arrival": ("category", "own"),
    "smoker": ("boolean", "zero"),
    "stays": ("number", "none"),
    "days": ("number", "none"),
    "systolic": ("number", "mean"),
    "creatinine": ("number", "mean"),
    "haemoglobin": ("number", "mean"),
}


def test_it_has_what_it_promises() -> None:
    table = draw_hospitals(4000)
    sizes = table["hospital"].value_counts()
    whole = sum(size for _, size in HOSPITALS.values())
    assert sizes.to_dict() == {name: round(4000 * size / whole) for name, (_, size) in HOSPITALS.items()}
    assert sizes.max() > 10 * sizes.min() and len(sizes) == 12
    gaps = table.isna().mean()
    assert (gaps[["creatinine", "smoker", "haemoglobin"]] > 0.05).all() and not gaps[["age", "readmitted"]].any()
    assert table["readmitted"].isin(["yes", "no"]).all() and 0.2 < (table["readmitted"] == "yes").mean() < 0.5
    assert draw_hospitals(10)["hospital"].value_counts().eq(LEAST).all()


def test_the_seed_alone_decides_and_hospitals_do_not_depend_on_one_another() -> None:
    pd.testing.assert_frame_equal(draw_hospitals(500, 3), draw_hospitals(500, 3))
    assert not draw_hospitals(500, 3)["age"].equals(draw_hospitals(500, 4)["age"])


def test_those_of_a_kind_follow_one_rule_and_the_clinic_another() -> None:
    table = draw_hospitals(40000)
    again = table["readmitted"] == "yes"
    longer = {
        name: np.corrcoef(own["days"], again[own.index])[0, 1] for name, own in table.groupby("hospital")
    }  # staying longer speaks for coming back, but not at the clinic
    assert longer.pop("Lakeside Rehab") < -0.3 and min(longer.values()) > 0.1


def test_the_command_writes_what_describe_reads(tmp_path: Path) -> None:
    path = tmp_path / "hospitals.csv"
    done = CliRunner().invoke(app, ["data", "sample", str(path), "--rows", "1000"], catch_exceptions=False)
    assert done.exit_code == 0 and "12 hospitals" in done.stderr
    content = TableSource(path=path, label="readmitted", client="hospital").content()
    assert not content.problems
    assert {name: (column.kind, column.gaps) for name, column in content.schema.columns.items()} == KINDS
    with pytest.raises(ConfigError, match="is there already"):
        CliRunner().invoke(app, ["data", "sample", str(path)], catch_exceptions=False)
    with pytest.raises(ConfigError, match="cannot be written"):
        CliRunner().invoke(app, ["data", "sample", str(tmp_path / "no" / "a.csv")], catch_exceptions=False)
