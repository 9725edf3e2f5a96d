"""Data that name their clients: a column, an array, a level of folders, a table of files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from PIL import Image
from typer.testing import CliRunner

import coterie
from coterie import data
from coterie.cli.app import app
from coterie.config import from_mapping
from coterie.data.registry import SOURCES
from coterie.errors import ConfigError, DataError
from coterie.options import resolve
from coterie.results.export import export
from coterie.runs.population import make_population


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    drawn = np.random.default_rng(3)
    frame = pd.DataFrame({"clinic": np.repeat(["west", "north", "east"], [40, 30, 20]), "age": drawn.normal(size=90)})
    frame["ill"] = (frame["age"] + drawn.normal(size=90) > 0).astype(int)
    frame.to_csv(tmp_path / "h.csv", index=False)
    return tmp_path / "h.csv"


def test_a_client_column_makes_the_clients(hospitals: Path) -> None:
    text = f"table:{hospitals},label=ill,client=clinic,task=binary"
    config = from_mapping({"algorithm": "fedavg", "data": text})
    assert (config.partition, config.clients) == ("natural", 3)
    held = make_population(config).holdings()
    assert held["name"].tolist() == ["east", "north", "west"]
    assert held[["train", "validation", "test"]].sum(axis=1).tolist() == [20, 30, 40]
    # What is given stands, and numbers that do not match are refused with both counts.
    assert from_mapping({"algorithm": "fedavg", "data": text, "partition": "iid"}).clients == 20
    few = from_mapping({"algorithm": "fedavg", "data": text, "partition": "natural:least=25"})
    assert few.clients == 2 and make_population(few).holdings()["name"].tolist() == ["north", "west"]
    with pytest.raises(coterie.errors.PartitionError, match="3 natural clients, but clients is 2"):
        make_population(from_mapping({"algorithm": "fedavg", "data": text, "clients": 2}))


def test_a_client_column_without_a_value_or_that_is_not_there(hospitals: Path) -> None:
    frame = pd.read_csv(hospitals)
    frame.loc[[4, 7], "clinic"] = None
    frame.to_csv(hospitals, index=False)
    with pytest.raises(DataError, match=r"column 'clinic', row 4.*2 rows"):
        from_mapping({"algorithm": "fedavg", "data": f"table:{hospitals},label=ill,client=clinic"})
    with pytest.raises(DataError, match="no column 'hospital'"):
        from_mapping({"algorithm": "fedavg", "data": f"table:{hospitals},label=ill,client=hospital"})


def test_names_stand_in_results_show_and_export(hospitals: Path, tmp_path: Path) -> None:
    text = f"table:{hospitals},label=ill,client=clinic,task=binary"
    result = coterie.run(
        "fedamp", data=text, model="linear", rounds=1, matrix=True, out=tmp_path / "run", progress=False
    )
    names = ["east", "north", "west"]
    assert result.client_names == dict(enumerate(names))
    assert result.weights(names=True).columns.tolist() == names and result.weights().columns.tolist() == [0, 1, 2]
    assert result.matrix(names=True).index.tolist() == names
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "run")]).output
    assert all(name in shown for name in names)
    assert sorted(result.plot_shares().to_dict()["layout"]["xaxis"]["ticktext"]) == names
    by_name = export(tmp_path / "run", tmp_path / "a", clients="north")
    by_number = export(tmp_path / "run", tmp_path / "b", clients=1)
    assert by_name.about == by_number.about and by_name.about["clients"][0]["name"] == "north"
    one, two = (found.folder / "north.safetensors" for found in (by_name, by_number))
    assert one.read_bytes() == two.read_bytes()
    with pytest.raises(ConfigError, match=r"'south'.*east, north, west"):
        export(tmp_path / "run", tmp_path / "c", clients="south")


def test_arrays_name_their_owners(tmp_path: Path) -> None:
    owner = np.array(["b", "a", "b", "c"])
    np.savez(tmp_path / "d.npz", x=np.eye(4), y=np.arange(4) % 2, ward=owner)
    loaded = data.load(f"npz:{tmp_path / 'd.npz'},client=ward")
    assert loaded.owner is not None and loaded.owner.tolist() == [1, 0, 1, 2] and loaded.owner_names == ("a", "b", "c")
    assert resolve("data set", f"npz:{tmp_path / 'd.npz'},client=ward", SOURCES).owners() == {"a": 1, "b": 2, "c": 1}
    assert resolve("data set", f"npz:{tmp_path / 'd.npz'}", SOURCES).owners() is None
    with pytest.raises(DataError, match="no array 'room'"):
        data.load(f"npz:{tmp_path / 'd.npz'},client=room")


@pytest.mark.parametrize("level", ["outer", "inner", "csv"])
def test_folders_name_their_owners(tmp_path: Path, level: str) -> None:
    kept = [("cat", "ann", 10), ("cat", "bob", 20), ("dog", "ann", 30), ("dog", "ann", 40), ("dog", "bob", 50)]
    rows = []
    for number, (kind, whose, shade) in enumerate(kept):
        where = {"outer": f"{whose}/{kind}", "inner": f"{kind}/{whose}", "csv": kind}[level]
        (tmp_path / "i" / where).mkdir(parents=True, exist_ok=True)
        Image.new("L", (3, 2), shade).save(tmp_path / "i" / where / f"{number}.png")
        rows.append((f"{where}/{number}.png", whose))
    pd.DataFrame(rows, columns=["file", "client"]).to_csv(tmp_path / "who.csv", index=False)
    client = tmp_path / "who.csv" if level == "csv" else level
    text = f"folder:{tmp_path / 'i'},client={client}"
    loaded = data.load(text)
    assert loaded.classes == ("cat", "dog") and loaded.owner_names == ("ann", "bob") and loaded.owner is not None
    found = zip(loaded.y.tolist(), loaded.owner.tolist(), loaded.x[:, 0, 0, 0].tolist(), strict=True)
    assert sorted(found) == [(0, 0, 10), (0, 1, 20), (1, 0, 30), (1, 0, 40), (1, 1, 50)]
    assert resolve("data set", text, SOURCES).owners() == {"ann": 3, "bob": 2}
    assert resolve("data set", text, SOURCES).text() == text  # what a configuration is stored as


def test_folders_that_do_not_say_whose_an_image_is(tmp_path: Path) -> None:
    for kind in ("a", "b"):
        (tmp_path / kind).mkdir()
        Image.new("L", (3, 2), 1).save(tmp_path / kind / "1.png")
    with pytest.raises(DataError, match="no folders CLIENT/CLASS"):
        data.load(f"folder:{tmp_path},client=outer")
    with pytest.raises(DataError, match=r"must be outer, inner or a \.csv"):
        data.load(f"folder:{tmp_path},client=nobody")
    (tmp_path / "who.csv").write_text("file,client\na/1.png,x\n")
    with pytest.raises(DataError, match=r"no client for the image 'b/1\.png'"):
        data.load(f"folder:{tmp_path},client={tmp_path / 'who.csv'}")


@pytest.mark.parametrize(
    ("written", "names"),
    [
        (["0042", "042", "7"], ["0042", "042", "7"]),  # three clients, which as numbers would be two
        (["100", "42", "7"], ["7", "42", "100"]),  # nothing is lost by taking these as numbers
    ],
)
def test_names_that_are_numbers_keep_the_zeros_before_them(
    written: list[str], names: list[str], tmp_path: Path
) -> None:
    rows = [f"{written[place % 3]},{place},{'ab'[place % 2]}" for place in range(60)]
    (tmp_path / "table.csv").write_text("\n".join(["unit,age,outcome", *rows]))
    source = resolve("data set", f"table:{tmp_path}/table.csv,label=outcome,client=unit", SOURCES)
    assert source.owners() == dict.fromkeys(names, 20)
    assert list(source.load(tmp_path, 1).owner_names) == names
