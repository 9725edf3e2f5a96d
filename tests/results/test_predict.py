"""Models taken home: raw rows in, the run's own predictions out, in an environment that has no Coterie."""

from __future__ import annotations

import io
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

import coterie
from coterie.cli.app import app
from coterie.config import from_mapping
from coterie.errors import ConfigError, DataError, RunFolderError
from coterie.results.export import export, predict
from coterie.runs import launch
from tests.small_runs import finish

ROWS = 150
CASES: dict[str, dict[str, Any]] = {
    "fedacs": {"algorithm": "fedacs"},
    "local": {"algorithm": "local"},  # scaled by each client's own statistics
    "fedavg_ft": {"algorithm": "fedavg_ft", "task": "binary"},  # whose models no checkpoint has
    "fedrod": {"algorithm": "fedrod"},
    "splitgp": {"algorithm": "splitgp", "model": "mlp:hidden=6-4", "settings": {"threshold": 0.6}},
    "numbers": {"algorithm": "fedavg", "label": "days", "task": "regression"},
    "exact": {"algorithm": "ditto", "dtype": "float64", "scope": "local"},
}


def draw() -> pd.DataFrame:
    """Draw a table with columns of every kind, gaps in some of them, and hospitals with names that are no file's."""
    drawn = np.random.default_rng(5)
    table = pd.DataFrame({"hospital": np.arange(ROWS) % 3})
    table["hospital"] = table["hospital"].map({0: "St. Anna / west", 1: "north", 2: "süd"})
    table["age"] = drawn.normal(60, 12, ROWS).round(1)
    table["lab, mmol"] = drawn.lognormal(1, 0.4, ROWS)
    table["ward"] = drawn.choice(["intensive", "surgery", '0 "a"'], ROWS)
    table["smoker"] = drawn.choice(["True", "false"], ROWS)
    table["seen"] = [f"2021-0{1 + day % 9}-1{day % 10}" + (" 10:30" if day % 3 else "") for day in range(ROWS)]
    table["years"] = drawn.integers(0, 9, ROWS)
    for column, part in (("lab, mmol", 0.3), ("ward", 0.1), ("smoker", 0.1), ("seen", 0.1)):
        table.loc[drawn.random(ROWS) < part, column] = None
    risk = table["age"] / 10 + table["lab, mmol"].fillna(3) + 2 * (table["ward"] == "surgery")
    table["ill"] = np.where(risk + drawn.normal(0, 1, ROWS) > 9.5, "yes", "no")
    table["days"] = risk + drawn.normal(0, 0.1, ROWS)
    return table


@dataclass
class TakenHome:
    """A finished run whose data are gone: its folder, what it was exported to, and what it predicted itself."""

    run: Path
    folder: Path
    new: dict[str, Path]
    wanted: dict[str, torch.Tensor]


def tree(folder: Path) -> dict[str, Any]:
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in sorted([folder, *folder.rglob("*")])
    }


def take_home(folder: Path, case: str) -> TakenHome:
    folder.mkdir()
    what = {"label": "ill", "task": "multiclass", "model": "mlp:hidden=6", **CASES[case]}
    label, task = what.pop("label"), what.pop("task")
    drop = "days" if label == "ill" else "ill"
    path = folder / "table.csv"
    draw().to_csv(path, index=False)
    text = f"table:{path},label={label},client=hospital,drop={drop},task={task}"
    playing = launch.begin(from_mapping({"data": text, "rounds": 2, "threads": 1, **what}), folder / "run")
    finish(playing)
    parts = playing.parts
    simulation, shares = parts.simulation, parts.population.shares
    raw = pd.read_csv(path, dtype=str, keep_default_na=False)
    new, wanted = {}, {}
    everyone = torch.arange(3)
    with torch.no_grad():
        rows = simulation.personal(everyone, 2)
        for client, name in enumerate(shares.names):
            one = {key: value[[client]] for key, value in rows.items()}
            outputs = parts.engine.predict(simulation.algorithm.predict, one, everyone[[client]], "test")
            wanted[name] = as_probabilities(outputs, task)
            # As they would come from the hospital: without a label, in another order, with a column too many.
            theirs = raw.iloc[shares.test[client].numpy()].drop(columns=[label, drop, "hospital"])
            new[name] = folder / f"new{client}.csv"
            theirs[theirs.columns[::-1]].assign(note="x").to_csv(new[name], index=False)
    path.unlink()
    before = tree(folder / "run")
    export(folder / "run", folder / "model")
    assert tree(folder / "run") == before, "the run's folder is only read"
    return TakenHome(folder / "run", folder / "model", new, wanted)


def as_probabilities(outputs: torch.Tensor, task: str) -> torch.Tensor:
    if task == "binary":
        return torch.stack([1 - outputs[:, 0].sigmoid(), outputs[:, 0].sigmoid()], 1)
    return outputs if task == "regression" else outputs.softmax(1)


@pytest.fixture(scope="module")
def taken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TakenHome]:
    folder, made = tmp_path_factory.mktemp("taken"), dict[str, TakenHome]()

    def of(case: str) -> TakenHome:
        if case not in made:
            made[case] = take_home(folder / case, case)
        return made[case]

    return of


@pytest.fixture(scope="module")
def without_coterie(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Give a Python that has torch, numpy and safetensors, what these need, and nothing else."""
    packages = tmp_path_factory.mktemp("packages")
    waiting, seen = ["torch", "numpy", "safetensors"], set[str]()
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in seen:
            continue
        seen.add(name)
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another system
        waiting += [re.split(r"[^\w.-]", need)[0] for need in found.requires or () if "extra ==" not in need]
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (packages / top).exists():
                (packages / top).symlink_to(str(found.locate_file(top)))

    def run(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        environment = kept | {"PYTHONPATH": str(packages), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-S", "-B", *words]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, **more)

    return run


PROBE = """
import json, sys
for name in ("coterie", "pandas", "pydantic", "sklearn"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    raise SystemExit(f"there is a {name} here")
out = {}
for case, (folder, files) in json.load(sys.stdin).items():
    sys.path.insert(0, folder)
    import predict
    for client, file in files.items():
        model = predict.load(client)
        out.setdefault(case, {})[client] = model.probabilities(model.features(predict.read_table(file))).tolist()
    sys.path.remove(folder)
    del sys.modules["predict"]
json.dump(out, sys.stdout)
"""


def test_without_coterie_and_the_data_it_predicts_what_the_run_did(
    taken: Callable[[str], TakenHome], without_coterie: Callable[..., Any], tmp_path: Path
) -> None:
    homes = {case: taken(case) for case in CASES}
    asked = {
        case: [str(home.folder), {name: str(path) for name, path in home.new.items()}] for case, home in homes.items()
    }
    done = without_coterie("-c", PROBE, input=json.dumps(asked), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for case, home in homes.items():
        assert home.wanted.keys() == {"St. Anna / west", "north", "süd"}
        for name, wanted in home.wanted.items():
            got = torch.tensor(found[case][name], dtype=wanted.dtype)
            torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
            assert len(wanted) > 5 and wanted.std(0).min() > 1e-3  # predictions that differ from row to row


def test_the_folder_is_a_command(
    taken: Callable[[str], TakenHome], without_coterie: Callable[..., Any], tmp_path: Path
) -> None:
    home = taken("fedacs")
    shutil.copytree(home.folder, tmp_path / "model")
    words = [str(tmp_path / "model" / "predict.py"), str(home.new["north"]), "--client", "north"]
    done = without_coterie(*words, "--out", "scores.csv", cwd=tmp_path)
    assert done.returncode == 0 and not done.stderr, done.stderr
    scores = pd.read_csv(tmp_path / "scores.csv")
    assert list(scores) == ["predicted", "probability no", "probability yes"]
    torch.testing.assert_close(
        torch.tensor(scores.iloc[:, 1:].to_numpy(np.float32)), home.wanted["north"], rtol=1e-6, atol=1e-6
    )
    assert (scores["predicted"] == np.where(scores["probability yes"] > 0.5, "yes", "no")).all()
    (tmp_path / "new.csv").write_text("age,seen\nold,2020-02-30\n")
    done = without_coterie(*words[:1], "new.csv", "--client", "north", cwd=tmp_path)
    assert done.returncode == 1 and not done.stdout
    assert done.stderr.splitlines() == [
        "error: there is no column 'lab, mmol'",
        "error: there is no column 'ward'",
        "error: there is no column 'smoker'",
        "error: there is no column 'years'",
        "error: column 'age' has 'old' in row 0, which is no number",
        "error: column 'seen' has '2020-02-30' in row 0, which is no date",
    ]


def test_the_command_of_coterie_gives_the_same(taken: Callable[[str], TakenHome], tmp_path: Path) -> None:
    home = taken("local")
    out = tmp_path / "scores.csv"
    words = ["predict", str(home.folder), str(home.new["süd"]), "--client", "süd"]
    done = CliRunner().invoke(app, [*words, "--out", str(out)], catch_exceptions=False)
    assert done.exit_code == 0 and "scores: " in done.stderr
    scores = pd.read_csv(out)
    np.testing.assert_allclose(scores.iloc[:, 1:].to_numpy(), home.wanted["süd"].numpy(), rtol=1e-6, atol=1e-6)
    printed = CliRunner().invoke(app, words, catch_exceptions=False)
    assert printed.stdout == out.read_text()
    frame = pd.read_csv(home.new["süd"])
    pd.testing.assert_frame_equal(predict(home.folder, frame, "süd"), predict(home.folder, home.new["süd"], "süd"))
    frame.to_parquet(tmp_path / "new.parquet")
    pd.testing.assert_frame_equal(predict(home.folder, frame, 2), predict(home.folder, tmp_path / "new.parquet", 2))
    with pytest.raises(ConfigError, match="cannot be written"):
        CliRunner().invoke(app, [*words, "--out", str(tmp_path / "no" / "scores.csv")], catch_exceptions=False)


def test_tables_and_arrays_in_memory_are_taken_as_files_are(taken: Callable[[str], TakenHome], tmp_path: Path) -> None:
    home = taken("local")
    text = pd.read_csv(home.new["süd"], dtype=str, keep_default_na=False)
    frame = pd.read_csv(home.new["süd"])
    assert frame.isna().any().any() and frame["smoker"].dtype != text["smoker"].dtype
    load = runpy.run_path(str(home.folder / "predict.py"))["load"]
    wanted = load("süd").scores({name: list(text[name]) for name in text})
    assert load("süd").scores(frame) == wanted
    assert load("süd").scores(frame.convert_dtypes()) == wanted  # whose gaps are pandas.NA
    drawn = np.random.default_rng(3).integers(256, size=(40, 1, 8, 8)).astype(np.uint8)
    np.savez(tmp_path / "images.npz", x=drawn, y=np.arange(40) % 3)
    what: dict[str, Any] = {"data": f"npz:{tmp_path / 'images.npz'}", "clients": 2, "rounds": 1, "model": "linear"}
    run = coterie.run("local", **what, progress=False, out=tmp_path / "run")
    model = runpy.run_path(str(export(run.path, tmp_path / "model", clients=1).folder / "predict.py"))["load"]()
    images = np.arange(3 * 64, dtype=np.uint8).reshape(3, 1, 8, 8)
    wanted = model.scores(torch.from_numpy(images))
    assert model.scores(images) == wanted and model.scores(images.astype(np.float32)) != wanted
    assert model.scores((images / 255).tolist())["predicted"] == wanted["predicted"]
    assert model.scores(images.tolist()) == model.scores(images.astype(">i4")) == wanted  # whole numbers are bytes
    with pytest.raises(ValueError, match="samples are bytes, 0 to 255"):
        model.scores(images.astype(int) + 200)
    for nothing, why in ((images[:0], "there are no rows"), ([["a"]], "samples must be numbers in an array")):
        with pytest.raises(ValueError, match=why):
            model.scores(nothing)


def test_all_that_does_not_fit_is_told_at_once(taken: Callable[[str], TakenHome], tmp_path: Path) -> None:
    home = taken("fedacs")
    good = pd.read_csv(home.new["north"])
    with pytest.raises(DataError) as refused:
        predict(home.folder, good.drop(columns=["ward", "age"]).assign(years="many", seen="soon"), "north")
    assert str(refused.value) == (
        "the rows cannot be predicted from: 4 problems: there is no column 'age'; there is no column 'ward'; "
        "column 'seen' has 'soon' in row 0, which is no date; column 'years' has 'many' in row 0, which is no number"
    )
    with pytest.raises(DataError, match="column 'age' has a gap in row 0, but had none in training"):
        predict(home.folder, good.assign(age=None), "north")
    with pytest.raises(DataError, match="infinite value in column 'age', row 0"):
        predict(home.folder, good.assign(age="inf"), "north")
    with pytest.raises(DataError, match=r"one must be chosen \(--client\): St. Anna / west, north, süd"):
        predict(home.folder, good)
    with pytest.raises(DataError, match=r"there is no model of a client 'east': there are St. Anna / west, north, süd"):
        predict(home.folder, good, "east")
    with pytest.raises(DataError, match="there are no rows"):
        predict(home.folder, good.iloc[:0], "north")
    for text, sentence in (
        ("", "the table is empty"),
        ("a,a\n1,2\n", "there are two columns 'a'"),
        ("a\n1,2\n", "row 0 has 2 fields, but the header has 1"),
    ):
        (tmp_path / "new.csv").write_text(text)
        with pytest.raises(DataError, match=sentence):
            predict(home.folder, tmp_path / "new.csv", "north")
    with pytest.raises(DataError, match=r"cannot be read \(No such file"):
        predict(home.folder, tmp_path / "no.csv", "north")
    with pytest.raises(RunFolderError, match="there is no exported model in"):
        predict(home.run, tmp_path / "new.csv", "north")


def test_a_category_that_was_never_seen_is_none_of_those_that_were(taken: Callable[[str], TakenHome]) -> None:
    home = taken("fedacs")
    about = json.loads((home.folder / "model.json").read_text())
    assert about["columns"]["ward"] == {
        "kind": "category",
        "gaps": "own",
        "indicator": True,
        "categories": ['0 "a"', "intensive", "surgery"],
        "missing": [],
    }
    from coterie.results.export.predicting import _code_of

    code = _code_of(home.folder)
    model = code.load("north", home.folder)
    row = {"age": ["50"], "lab, mmol": ["NA"], "ward": ["maternity"], "smoker": ["TRUE"], "seen": [""], "years": ["3"]}
    features = dict(zip(about["features"], model.features(row)[0].tolist(), strict=True))
    wards = [value for name, value in features.items() if name.startswith("ward")]
    assert wards == [0.0, 0.0, 0.0, 0.0] and features["smoker"] == 1.0 and features["seen is missing"] == 1.0
    wards = model.features(row | {"ward": ["None"]})[0].tolist()
    assert dict(zip(about["features"], wards, strict=True))["ward is missing"] == 1.0
    # Filled, then scaled: what fills the gap is the mean of the others, which stays the mean with the gaps filled.
    prepared = dict(zip(about["features"], model.prepare(model.features(row))[0].tolist(), strict=True))
    assert prepared["lab, mmol"] == pytest.approx(0, abs=1e-5) and prepared["lab, mmol is missing"] == 1.0


def test_signs_that_stood_for_gaps_in_training_do_so_in_new_rows(tmp_path: Path) -> None:
    ages = ["30", "?", "50", " ", "70", "90"] * 4
    rows = "".join(f"{age},{'-' if k % 5 == 0 else 'ab'[k % 2]},{k % 2}\n" for k, age in enumerate(ages))
    (tmp_path / "odd.csv").write_text("age,ward,died\n" + rows)
    table = f"table:{tmp_path}/odd.csv,label=died,missing=?+-"
    coterie.run("local", data=table, partition="iid", clients=2, rounds=1, model="linear", out=tmp_path / "run")
    export(tmp_path / "run", tmp_path / "model", clients=0)
    signs = pd.DataFrame({"age": ["?", " ", "50"], "ward": ["-", "a", " - "]})
    empty = pd.DataFrame({"age": [None, None, "50"], "ward": [None, "a", None]})
    assert predict(tmp_path / "model", signs).equals(predict(tmp_path / "model", empty))


def test_gaps_are_what_pandas_takes_for_gaps() -> None:
    from pandas._libs.parsers import STR_NA_VALUES

    from coterie.results.export.standalone import predict as standalone

    assert set(STR_NA_VALUES) == standalone.GAPS


@pytest.mark.parametrize(
    "text",
    ["1970-01-02", "1969-12-31 12:00", "2024-02-29T23:59:59.5", "2024-02-29T23:59:59+02:00", "2024-02-29 01:02:03Z"],
)
def test_dates_are_the_days_that_they_are_in_training(text: str) -> None:
    from coterie.data.table_schema import ColumnSchema, TableSchema, encode
    from coterie.results.export.standalone import predict as standalone

    schema = TableSchema(columns={"day": ColumnSchema(kind="date")})
    (feature,), problems = encode(pd.DataFrame({"day": [text]}), schema)
    assert not problems and feature.values[0] == pytest.approx(standalone.as_days(text), abs=1e-9)


def test_categories_that_are_numbers_are_the_same_with_and_without_gaps_beside_them() -> None:
    from coterie.data.table_schema import ColumnSchema, TableSchema, encode
    from coterie.results.export.standalone import predict as standalone

    column = ColumnSchema(kind="category", gaps="own", indicator=False, categories=("1", "2"))
    for values in ([1, 2, 3], [1.0, 2.0, None], ["1", "2", "x"]):
        features, problems = encode(pd.DataFrame({"a": values}), TableSchema(columns={"a": column}))
        assert not problems
        assert [each.values.tolist() for each in features] == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    for texts in (["1", "2", "3"], ["1.0", "2.0", ""], ["01", "2", "x"]):
        made = standalone.one_hot(texts, [text == "" for text in texts], column.categories)
        assert made == [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]
    truths = ("False", "True")
    assert standalone.one_hot(["true", "FALSE"], [False, False], truths) == [[0.0, 1.0], [1.0, 0.0]]
    wards = ("01", "1", "a")  # texts of which not all are numbers are told apart as they are written
    assert standalone.one_hot(["1", "01"], [False, False], wards) == [[0.0, 1.0], [1.0, 0.0], [0.0, 0.0]]


class Doubting(torch.nn.Module):
    """A module of a notebook: nobody finds its source."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.inner, self.drop = torch.nn.Linear(features, 3), torch.nn.Dropout(0.3)
        self.last = torch.nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.drop(torch.tanh(self.inner(x))))


def test_a_module_that_was_an_object_is_taken_home_as_what_it_computes(
    tmp_path: Path, without_coterie: Callable[..., Any]
) -> None:
    table = draw().drop(columns="days")
    what: dict[str, Any] = {"rounds": 2, "threads": 1, "progress": False, "out": tmp_path / "run"}
    run = coterie.run("local", data=table, label="ill", client="hospital", model=Doubting(12), **what)
    found = export(run.path, tmp_path / "model", clients="north")
    north = table[table["hospital"] == "north"].drop(columns=["ill", "hospital"])
    scores = predict(found.folder, north)
    assert 0.1 < scores["probability yes"].mean() < 0.9 and scores["probability yes"].std() > 0.01
    north.to_csv(tmp_path / "new.csv", index=False)
    done = without_coterie(str(found.folder / "predict.py"), str(tmp_path / "new.csv"))
    assert done.returncode == 0, done.stderr
    alone = pd.read_csv(io.StringIO(done.stdout))
    np.testing.assert_allclose(alone["probability yes"], scores["probability yes"], rtol=1e-6)
    answers = run.answers
    assert answers is not None
    kept = answers[(answers["client"] == 1) & (answers["model"] == "personal")]["answer"].abs()
    best = scores[["probability no", "probability yes"]].max(axis=1).to_numpy()
    assert all(np.abs(best - answer).min() < 1e-5 for answer in kept), "among its rows are those that the run answered"


PACKING = """
import torch
from torch import nn

class Packing(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.layer = nn.GRU(6, 4, batch_first=True)
        self.head = nn.Linear(4, outputs)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x.unsqueeze(1), torch.ones(len(x)), batch_first=True)
        return self.head(self.layer(packed)[1][-1])
"""


def test_a_model_that_only_the_loop_runs_is_taken_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "coterie_packing.py").write_text(PACKING)
    monkeypatch.syspath_prepend(str(tmp_path))
    data = "synthetic:clients=4,samples=20,features=6,classes=3"
    what: dict[str, Any] = {"data": data, "partition": "natural", "clients": 4, "rounds": 1, "progress": False}
    run = coterie.run("fedavg", model="import:coterie_packing:Packing", engine="loop", **what, out=tmp_path / "run")
    found = export(run.path, tmp_path / "model", clients=1)
    samples = torch.linspace(-2, 2, 30).view(5, 6)
    scores = runpy.run_path(str(found.folder / "predict.py"))["load"]().scores(samples)
    assert len(set(scores["probability 0"])) == 5


# ----------------------------------------------------------------------------------------------------------------- ONNX


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_onnx_without_its_packages_is_refused_before_anything_is_written(
    package: str, taken: Callable[[str], TakenHome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnx", ModuleType("onnx"))
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as refused:
        export(taken("fedacs").run, tmp_path / "model", onnx=True)
    assert str(refused.value) == f"onnx needs {package}, which is not installed: install coterie[onnx]"
    assert not list(tmp_path.iterdir())


def test_a_module_that_onnx_cannot_say_is_one_sentence(
    taken: Callable[[str], TakenHome], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("step 3/3\nnext steps") from ValueError("no function for aten.view\nat all")

    for package in ("onnx", "onnxscript"):
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
    monkeypatch.setattr(torch.onnx, "export", refusing)
    with pytest.raises(ConfigError) as refused:
        export(taken("fedacs").run, tmp_path / "model", onnx=True)
    assert str(refused.value) == "the model 'mlp:hidden=6' cannot be written as ONNX (no function for aten.view)"
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore")  # what the exporter warns of is its own
@pytest.mark.parametrize("case", ["fedavg_ft", "local", "fedrod", "splitgp", "numbers"])
def test_an_onnx_file_takes_raw_columns(case: str, taken: Callable[[str], TakenHome], tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason=f"{package} is not installed: install coterie[onnx] to test it")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: the ONNX file cannot be run")
    home = taken(case)
    found = export(home.run, tmp_path / "model", clients="north", onnx=True)
    assert found.onnx == (tmp_path / "model" / "north.onnx",)
    session = runtime.InferenceSession(str(found.onnx[0]))
    about = json.loads(session.get_modelmeta().custom_metadata_map["coterie"])
    assert about["name"] == "north" and about["columns"].keys() == found.about["columns"].keys()
    table = pd.read_csv(home.new["north"])
    given: dict[str, Any] = {}
    for name, column in found.about["columns"].items():
        if column["kind"] == "category":
            given[name] = table[name].fillna("").to_numpy(dtype=object)
        elif column["kind"] == "date":
            when = pd.to_datetime(table[name], format="ISO8601", utc=True)
            given[name] = ((when - pd.Timestamp(0, tz="UTC")) / pd.Timedelta(days=1)).to_numpy(np.float32)
        else:
            given[name] = table[name].astype(float).to_numpy(np.float32)
    assert {each.name for each in session.get_inputs()} == set(given)
    for count in (1, 2, len(table)):
        (got,) = session.run(None, {name: values[:count] for name, values in given.items()})
        np.testing.assert_allclose(got, home.wanted["north"][:count].numpy(), rtol=1e-5, atol=1e-6)
    unseen = {**given, "ward": np.array(["maternity"] * len(table), dtype=object)}
    if case != "splitgp":  # whose two exits need not differ by the ward
        frame = table.assign(ward="maternity")
        known = predict(found.folder, frame, "north").select_dtypes("number").to_numpy()
        np.testing.assert_allclose(session.run(None, unseen)[0], known, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", ["mlp", "cnn_small"])
def test_an_onnx_file_of_images_takes_bytes(model: str, tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package, reason=f"{package} is not installed: install coterie[onnx] to test it")
    runtime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: the ONNX file cannot be run")
    what = {"algorithm": "local", "data": "digits", "partition": "iid", "clients": 3, "rounds": 1, "threads": 1}
    playing = launch.begin(from_mapping({**what, "model": model}), tmp_path / "run")
    finish(playing)
    found = export(tmp_path / "run", tmp_path / "model", clients=1, onnx=True)
    population = playing.parts.population
    samples = population.dataset.x[population.shares.test[1]].numpy()
    np.save(tmp_path / "new.npy", samples)
    (got,) = runtime.InferenceSession(str(found.onnx[0])).run(["probabilities"], {"x": samples})
    wanted = predict(found.folder, tmp_path / "new.npy").select_dtypes("number").to_numpy()
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)
