"""What parties agree on, and nodes that disagree."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from coterie.data import Dataset
from coterie.data.partitions import share_out
from coterie.errors import ConfigError, DataError
from coterie.federation import agreement
from coterie.federation.party_data import load_own, own_population
from tests.federation.grid import make_agreement, parts

TEXT = """
name: hospitals
members: [{name: north}, {name: south}]
data: {input_shape: [3], classes: [ill, well]}
"""


def write(folder: Path, text: str) -> Path:
    (folder / "federation.yaml").write_text(text)
    return folder / "federation.yaml"


def test_the_digest_is_of_what_the_file_says(tmp_path: Path) -> None:
    first = agreement.read(write(tmp_path, TEXT))
    assert agreement.read(write(tmp_path, "# a comment\nversion: 1" + TEXT)).digest == first.digest
    for change in (("seed", "seed: 2"), ("model", "model: linear"), ("validation", "validation: 0.2")):
        assert agreement.read(write(tmp_path, f"{change[1]}{TEXT}")).digest != first.digest
    assert (first.number("south"), len(first.digest)) == (1, 32)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("[{name: north}, {name: south}]", "[{name: north}, {name: north}]"), "different names"),
        (("[{name: north}, {name: south}]", "[]"), "members"),
        (("[3]", "[0]"), "input_shape"),
        (("[ill, well]", "[ill]"), "classes"),
        (("[ill, well]", "[ill, ill]"), "each be named once"),
        (("name: hospitals", "name: ../x"), "name"),
        (("name: hospitals", "nam: hospitals"), "nam"),
        (("name: hospitals", "name: hospitals\nversion: 2"), "version"),
        (("name: hospitals", "- name"), "YAML"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, change: tuple[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        agreement.read(write(tmp_path, TEXT.replace(*change)))


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (("name: hospitals", "name: hospitals\nseed: 1\nseed: 2"), "seed"),
        (("{name: south}", "{name: south, key: a, key: b}"), "key"),  # whose node would be let in?
        (("classes: [ill, well]", "classes: [ill, well], input_shape: [4]"), "input_shape"),
    ],
)
def test_a_key_that_is_given_twice_is_refused(tmp_path: Path, change: tuple[str, str], key: str) -> None:
    file = write(tmp_path, TEXT.replace(*change))
    with pytest.raises(ConfigError) as told:
        agreement.read(file)
    assert str(told.value) == f"the file {str(file)!r} is not valid YAML: {key!r} is given twice"


def test_who_is_not_in_the_roster(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'east' is not in the roster of federation.yaml: members are north, south"):
        agreement.read(write(tmp_path, TEXT)).number("east")


def test_what_a_federation_cannot_run_is_one_sentence(tmp_path: Path) -> None:
    agreed = agreement.read(write(tmp_path, TEXT))
    (tmp_path / "mine.py").write_text("")
    for algorithm, others, sentence in (
        (str(tmp_path / "mine.py"), {}, "but a federation runs registered methods, not files"),
        (
            "fedavg",
            {"matrix": True},
            "matrix is true, but in a federation nobody has everybody's samples: leave it out",
        ),
    ):
        with pytest.raises(ConfigError, match=sentence) as refused:
            agreed.experiment(algorithm, {}, **others)
        assert "\n" not in str(refused.value)
    assert agreed.experiment("fedavg", {}, matrix=False).matrix is False


def test_a_node_splits_its_samples_as_a_simulation_would() -> None:
    agreed, datasets = make_agreement(), parts(3)
    x, y = (torch.cat([getattr(each, name) for each in datasets]) for name in ("x", "y"))
    owner = torch.cat([torch.full((len(each),), number) for number, each in enumerate(datasets)])
    whole = Dataset("all", x, y, len(x), "multiclass", datasets[0].classes, (0.0,), (1.0,), owner=owner)
    config = agreed.experiment("fedavg", {})
    together = share_out(
        whole, "natural", clients=3, seed=config.seed, test_fraction=config.test_fraction, validation=config.validation
    )
    offset = 0
    for client, mine in enumerate(datasets):
        alone = own_population(mine, client, config).shares
        for split in ("train", "validation", "test"):
            ours, theirs = getattr(alone, split), getattr(together, split)
            assert torch.equal(ours[client] + offset, theirs[client])
            assert len(ours.flat) == len(ours[client])  # nobody else has any
        offset += len(mine)


def test_own_classes_are_those_agreed_on(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 1, 8, 8), np.float32), y=np.array([7, 2, 7, 9]))
    found = load_own("a.npz", tmp_path, make_agreement())
    assert found.y.tolist() == [7, 2, 7, 9]
    assert found.classes == tuple("0123456789")


def test_own_tables_are_found_beside_the_node(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1.0, 2, 3, 4], "b": [0.0, 1, 0, 1], "c": [1, 2, 3, 5], "y": ["well", "ill"] * 2})
    frame.to_csv(tmp_path / "t.csv", index=False)
    agreed = agreement.read(write(tmp_path, TEXT.replace("[3],", "[3], columns: [a, b, c],")))
    found = load_own("table:path=t.csv,label=y", tmp_path, agreed)
    assert found.y.tolist() == [1, 0, 1, 0]
    assert found.mean == (0.0,)
    with pytest.raises(ConfigError, match="needs its label column"):
        load_own("t.csv", tmp_path, agreed)


WARDS = """
name: hospitals
members: [{name: north}, {name: south}]
data: {task: binary, input_shape: [4], classes: [ill, well], columns: [age, ward=a, ward=b, sex=f]}
"""


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ("age,ward,sex,y\n1,a,f,ill\n2,b,f,well", [[1, 1, 0, 1], [2, 0, 1, 1]]),
        ("sex,y,ward,age\nf,well,b,3\nf,ill,b,4", [[3, 0, 1, 1], [4, 0, 1, 1]]),  # another order, and no ward a
    ],
)
def test_columns_mean_the_same_at_every_node(tmp_path: Path, table: str, expected: list[list[float]]) -> None:
    (tmp_path / "t.csv").write_text(table)
    found = load_own("table:path=t.csv,label=y", tmp_path, agreement.read(write(tmp_path, WARDS)))
    assert found.x.tolist() == expected
    assert found.task == "binary"  # the schema's, which the table need not repeat


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ("age,ward,sex,y\n1,c,f,ill\n2,b,f,well", "has 'ward=c', which is not among the columns"),
        ("age,ward,sex,y\n1,1,f,ill\n2,2,f,well", "has 'ward', which is not among the columns"),
        ("age,sex,y\n1,f,ill\n2,f,well", "has no column for 'ward=a'"),
        ("ward,sex,y\na,f,ill\nb,f,well", "has no column for 'age'"),
    ],
)
def test_columns_that_disagree_are_told(tmp_path: Path, table: str, says: str) -> None:
    (tmp_path / "t.csv").write_text(table)
    with pytest.raises(DataError, match=says):
        load_own("table:path=t.csv,label=y", tmp_path, agreement.read(write(tmp_path, WARDS)))


def test_a_table_needs_columns_that_all_agree_on(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("age,ward,y\n1,a,ill\n2,b,well")
    with pytest.raises(DataError, match=r'agree on `columns: \["age", "ward=a", "ward=b"\]` under data'):
        load_own("table:path=t.csv,label=y", tmp_path, agreement.read(write(tmp_path, TEXT)))
    with pytest.raises(ConfigError, match="columns are 4, but input_shape is"):
        agreement.read(write(tmp_path, WARDS.replace("[4]", "[3]")))


def loader() -> Dataset:
    x = torch.zeros(6, 1, 8, 8)
    return Dataset("mine", x, torch.arange(6) % 3, 6, "multiclass", ("1", "5", "8"), (0.0,), (1.0,))


def test_a_loader_of_the_users(tmp_path: Path) -> None:
    found = load_own("import:tests.federation.test_agreement:loader", tmp_path, make_agreement())
    assert found.y.tolist() == [1, 5, 8, 1, 5, 8]
    with pytest.raises(DataError, match="'missing' is missing in"):
        load_own("import:tests.federation.test_agreement:missing", tmp_path, make_agreement())
    with pytest.raises(DataError, match="gave a "):
        load_own("import:os:getcwd", tmp_path, make_agreement())


@pytest.mark.parametrize(
    ("arrays", "says"),
    [
        ({"x": np.zeros((4, 1, 8, 7)), "y": np.arange(4)}, r"shape \[1, 8, 7\], but federation.yaml agrees on"),
        ({"x": np.zeros((4, 1, 8, 8)), "y": np.array([1, 2, 11, 3])}, "has?v?e? the class '11'"),
    ],
)
def test_data_that_disagree_are_refused(tmp_path: Path, arrays: dict[str, np.ndarray], says: str) -> None:
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=says):
        load_own("a.npz", tmp_path, make_agreement())
