"""Tables as they are: kinds, gaps, categories, and the schema that is inferred, shown and written down."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.compose import ColumnTransformer
from sklearn.impute import MissingIndicator, SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from typer.testing import CliRunner

from coterie import data
from coterie.cli.app import app as commands
from coterie.compute.samples import Samples
from coterie.config import from_mapping
from coterie.data.table_schema import ColumnSchema, TableSchema, infer
from coterie.errors import ConfigError, DataError
from coterie.runs.population import make_population

ROWS = 60


def draw() -> pd.DataFrame:
    drawn = np.random.default_rng(11)
    frame = pd.DataFrame({"site": np.repeat(["a", "b"], [25, 35])})
    frame["age"] = drawn.normal(50, 9, ROWS).astype(np.float32).astype(float)
    frame["weight"] = drawn.normal(70, 9, ROWS).astype(np.float32).astype(float)
    frame["ward"] = drawn.choice(["icu", "medicine", "surgery"], ROWS)
    frame["smoker"] = drawn.choice(np.array([True, False], dtype=object), ROWS)
    frame["day"] = (pd.Timestamp("2021-03-01") + pd.to_timedelta(drawn.integers(0, 99, ROWS), unit="D")).strftime("%F")
    frame["ill"] = drawn.choice(["no", "yes"], ROWS)
    for column, part in {"weight": 0.3, "ward": 0.2, "smoker": 0.1}.items():
        frame.loc[drawn.random(ROWS) < part, column] = None
    return frame


def save(folder: Path, frame: pd.DataFrame, **more: object) -> str:
    frame.to_csv(folder / "t.csv", index=False)
    return "".join([f"table:{folder / 't.csv'},label=ill,client=site", *(f",{key}={it}" for key, it in more.items())])


def test_kinds_and_gaps_are_found_out() -> None:
    schema, problems = infer(draw().drop(columns=["site", "ill"]))
    assert not problems
    assert {name: (column.kind, column.gaps) for name, column in schema.columns.items()} == {
        "age": ("number", "none"),
        "weight": ("number", "mean"),
        "ward": ("category", "own"),
        "smoker": ("boolean", "zero"),
        "day": ("date", "none"),
    }
    assert schema.columns["ward"].categories == ("icu", "medicine", "surgery")


def test_columns_become_numbers(tmp_path: Path) -> None:
    frame = draw()
    loaded = data.load(save(tmp_path, frame))
    assert loaded.features == (
        *("age", "weight", "weight is missing", "ward=icu", "ward=medicine", "ward=surgery", "ward is missing"),
        *("smoker", "smoker is missing", "day"),
    )
    x = dict(zip(loaded.features, loaded.x.T.numpy(), strict=True))
    assert np.array_equal(x["weight is missing"], frame["weight"].isna())
    assert np.array_equal(np.isnan(x["weight"]), frame["weight"].isna())
    assert np.array_equal(x["ward=icu"], frame["ward"] == "icu")  # a gap is in none of the categories
    assert np.array_equal(x["ward is missing"], frame["ward"].isna())
    days = (pd.to_datetime(frame["day"]) - pd.Timestamp("1970-01-01")).dt.days
    assert np.array_equal(x["day"], days.to_numpy(np.float32))


@pytest.mark.parametrize(("fill", "scope"), [("mean", "federated"), ("mean", "local"), ("median", "local")])
def test_inputs_are_those_of_scikit_learn(tmp_path: Path, fill: str, scope: str) -> None:
    frame = draw()
    schema, _ = infer(frame.drop(columns=["site", "ill"]))
    weight = schema.columns["weight"].model_copy(update={"gaps": fill})
    TableSchema(columns={**schema.columns, "weight": weight}).write(tmp_path / "s.yaml")
    text = save(tmp_path, frame, columns=tmp_path / "s.yaml")
    found = make_population(from_mapping({"algorithm": "fedavg", "data": text, "scope": scope}))
    ours = Samples.of(found.dataset, found.shares, seed=1, dtype=torch.float64, own=found.own).x.numpy()
    frame["day"] = (pd.to_datetime(frame["day"]) - pd.Timestamp("1970-01-01")).dt.days.astype(float)
    flags = ["weight", "ward", "smoker"]
    theirs = ColumnTransformer(
        [
            ("numbers", make_pipeline(SimpleImputer(strategy=fill), StandardScaler()), ["age", "weight", "day"]),
            ("ward", OneHotEncoder(categories=[["icu", "medicine", "surgery"]], handle_unknown="ignore"), ["ward"]),
            ("smoker", SimpleImputer(strategy="constant", fill_value=0.0), ["smoker"]),
            ("gaps", MissingIndicator(features="all"), flags),
        ],
        sparse_threshold=0,
    )
    order = [0, 1, 7, 3, 4, 5, 8, 6, 9, 2]  # from their order of columns to ours
    frame["smoker"] = frame["smoker"].astype(float)
    shares = found.shares
    everyone = shares.train.flat
    for client in range(2):
        fitted = theirs.fit(frame.iloc[(shares.train[client] if scope == "local" else everyone).numpy()])
        mine = torch.cat([part[client] for part in (shares.train, shares.validation, shares.test)]).numpy()
        np.testing.assert_allclose(ours[mine], fitted.transform(frame.iloc[mine])[:, order], rtol=0, atol=1e-5)


def test_a_median_cannot_be_federated(tmp_path: Path) -> None:
    frame = draw()[["site", "weight", "ill"]]
    TableSchema(columns={"weight": ColumnSchema(kind="number", gaps="median")}).write(tmp_path / "s.yaml")
    config = from_mapping({"algorithm": "fedavg", "data": save(tmp_path, frame, columns=tmp_path / "s.yaml")})
    with pytest.raises(ConfigError, match="a median cannot be put together from what clients send"):
        make_population(config)


def test_a_schema_is_read_back_and_rules(tmp_path: Path) -> None:
    frame = draw()
    schema, _ = infer(frame.drop(columns=["site", "ill"]))
    schema.write(tmp_path / "s.yaml")
    assert TableSchema.read(tmp_path / "s.yaml") == schema
    frame.loc[3, "ward"] = "maternity"  # which the schema does not have: 0 in all of its columns, and no gap
    loaded = data.load(save(tmp_path, frame, columns=tmp_path / "s.yaml"))
    assert loaded.x[3, 3:7].tolist() == [0, 0, 0, 0]
    frame.loc[5, "age"] = None
    frame["new"] = 1
    with pytest.raises(DataError, match=r"2 problems: column 'new' is not in the schema.*'age' has a gap in row 5"):
        data.load(save(tmp_path, frame, columns=tmp_path / "s.yaml"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("columns: {age: {kind: numbr}}", "kind is 'numbr'"),
        ("columns: {age: {kind: category}}", "needs categories"),
        ("columns: {age: {kind: number, gaps: own}}", "gaps is own"),
        ("columns: {age: {kind: number, fill: 3}}", "no parameter 'fill'"),
        ("rows: 3", "no parameter 'rows'"),
    ],
)
def test_a_schema_that_is_wrong(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "s.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        TableSchema.read(tmp_path / "s.yaml")


def test_describe_shows_the_table_and_all_problems(tmp_path: Path) -> None:
    frame = draw()
    frame["id"] = [f"p{row}x" for row in range(ROWS)]
    many = pd.concat([frame, frame.assign(id=frame["id"] + "y")], ignore_index=True)
    many["height"] = np.where(np.arange(len(many)) == 7, "tall", "180")
    many.loc[2, "ill"] = None
    shown = CliRunner().invoke(commands, ["data", "describe", save(tmp_path, many)])
    assert shown.exit_code != 0 and "35" not in shown.stderr
    for words in ("rows have no label", "120 different texts in column 'id'", "such as 'tall' in row 7"):
        assert words in shown.stderr
    fine = CliRunner().invoke(
        commands, ["data", "describe", save(tmp_path, frame, drop="id"), "--write", str(tmp_path / "s.yaml")]
    )
    assert fine.exit_code == 0, fine.stderr
    for words in ("category", "boolean", "date", "2 clients, by column 'site'", "60 rows"):
        assert words in fine.stdout
    assert TableSchema.read(tmp_path / "s.yaml") == infer(frame.drop(columns=["site", "ill", "id"]))[0]


def test_numbers_in_a_column_of_objects_are_numbers() -> None:
    frame = pd.DataFrame({"a": pd.Series([1, 2.5, None], dtype=object), "b": pd.Series(["3", "4", "5"], dtype=object)})
    schema, problems = infer(frame)
    assert not problems
    assert {name: (column.kind, column.gaps) for name, column in schema.columns.items()} == {
        "a": ("number", "mean"),
        "b": ("number", "none"),
    }


ODD_GAPS = "age,seen,ward,hospital,died\n" + "".join(
    f"{age},{seen},{ward},{hospital},{died}\n"
    for age, seen, ward, hospital, died in [
        (61, "2024-01-05", "a", "north", 1),
        ("?", "2024-02-05", "-", "north", 0),
        (35, "?", " ", "north", 1),
        (" ", "2024-03-01", "b", "south", 0),
        (108, "2024-03-02", "a", "south", 1),
        (9, "2024-03-02", "a", "south", 0),
    ]
)


def test_gaps_may_be_written_in_other_ways(tmp_path: Path) -> None:
    (tmp_path / "odd.csv").write_text(ODD_GAPS)
    table = f"table:{tmp_path}/odd.csv,label=died,client=hospital"
    said = CliRunner().invoke(commands, ["data", "describe", table])
    assert said.exit_code and "4 numbers and 1 texts, such as '?' in row 1: give missing=? if" in said.stderr
    assert "column 'seen' has 5 dates and 1 texts, such as '?' in row 2: give missing=? if" in said.stderr
    found = data.load(f"{table},missing=?+-")
    assert [(column["kind"], column["gaps"]) for column in found.columns.values()] == [
        *(("number", "mean"), ("date", "mean"), ("category", "own"))
    ]
    gaps = {name: found.x[:, place].tolist() for place, name in enumerate(found.features) if name.endswith("missing")}
    assert gaps["age is missing"] == [0, 1, 0, 1, 0, 0] and gaps["ward is missing"] == [0, 1, 1, 0, 0, 0]
    assert found.x[:, 0].isnan().tolist() == [False, True, False, True, False, False]
    # Written down, the signs need not be said again.
    said = CliRunner().invoke(commands, ["data", "describe", f"{table},missing=?+-", "--write", f"{tmp_path}/s.yaml"])
    assert said.exit_code == 0
    again = CliRunner().invoke(commands, ["data", "describe", f"{table},columns={tmp_path}/s.yaml"])
    assert again.exit_code == 0 and again.stdout == said.stdout and "9 to 108" in said.stdout
    assert data.load(f"{table},columns={tmp_path}/s.yaml").columns == found.columns
