from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from coterie import data
from coterie.data.statistics import Moments
from coterie.errors import ConfigError, DataError


def save(path: Path, colour: int | tuple[int, int, int], size: tuple[int, int] = (6, 5)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path)


def test_folder_of_grey_images(tmp_path: Path) -> None:
    for shade, name in enumerate(("b/2.png", "b/1.png", "a/1.png")):
        save(tmp_path / name, 10 * shade)
    loaded = data.load(f"folder:{tmp_path}")
    assert loaded.x.shape == (3, 1, 5, 6) and loaded.x.dtype == torch.uint8  # width 6, height 5
    assert loaded.x[:, 0, 0, 0].tolist() == [20, 10, 0]  # by class, then by name
    assert loaded.y.tolist() == [0, 1, 1] and loaded.classes == ("a", "b") and loaded.train_count == 3


def test_folder_with_train_and_test_in_colour(tmp_path: Path) -> None:
    for name, colour in {"train/x/1": (9, 8, 7), "train/y/1": (1, 2, 3), "test/y/1": (4, 5, 6)}.items():
        save(tmp_path / f"{name}.png", colour)
    loaded = data.load(f"folder:{tmp_path},norm=own")
    assert loaded.x[:, :, 0, 0].tolist() == [[9, 8, 7], [1, 2, 3], [4, 5, 6]]
    assert loaded.train_count == 2 and loaded.y.tolist() == [0, 1, 1]
    assert loaded.mean == pytest.approx([5 / 255, 5 / 255, 5 / 255])  # of the training images alone
    assert loaded.std == pytest.approx([4 / 255, 3 / 255, 2 / 255])


def test_folder_options_and_refusals(tmp_path: Path) -> None:
    save(tmp_path / "a" / "1.png", (10, 10, 10))
    save(tmp_path / "b" / "1.png", 20, size=(12, 10))
    with pytest.raises(DataError, match=r"10x12.*5x6.*size="):
        data.load(f"folder:{tmp_path}")
    assert data.load(f"folder:{tmp_path},size=7x8,channels=1").x.shape == (2, 1, 7, 8)
    assert data.load("folder", path=tmp_path, size=7, channels=3).x.shape == (2, 3, 7, 7)
    with pytest.raises(ConfigError, match="size"):
        data.load(f"folder:{tmp_path},size=big")
    with pytest.raises(ConfigError, match="channels is '2'"):
        data.load(f"folder:{tmp_path},channels=2")


def test_folder_refuses_what_is_no_image_by_class(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="there is no folder"):
        data.load(f"folder:{tmp_path / 'nowhere'}")
    save(tmp_path / "a" / "1.png", 1)
    with pytest.raises(DataError, match="one for each class"):
        data.load(f"folder:{tmp_path}")
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match=r"b holds no images$"):
        data.load(f"folder:{tmp_path}")
    (tmp_path / "b" / "inside").mkdir()
    with pytest.raises(DataError, match=r"b holds no images; of folders CLIENT/CLASS say client=outer"):
        data.load(f"folder:{tmp_path}")
    (tmp_path / "b" / "inside").rmdir()
    (tmp_path / "b" / "1.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"1\.png cannot be read"):
        data.load(f"folder:{tmp_path}")
    Image.new("I;16", (6, 5), 1000).save(tmp_path / "b" / "1.png")
    with pytest.raises(DataError, match="more than 8 bits"):
        data.load(f"folder:{tmp_path}")


def test_folder_refuses_a_class_that_is_only_tested(tmp_path: Path) -> None:
    for name in ("train/x/1", "train/y/1", "test/z/1"):
        save(tmp_path / f"{name}.png", 1)
    with pytest.raises(DataError, match=r"'z'.*not in the training set"):
        data.load(f"folder:{tmp_path}")


@settings(max_examples=25, deadline=None)
@given(
    shape=st.sampled_from([(7, 3), (5, 2, 4), (3, 3, 2, 2), (3, 3, 64, 43)]),
    as_bytes=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_own_norm_is_the_mean_and_deviation_of_each_channel(shape, as_bytes: bool, seed: int) -> None:
    drawn = np.random.default_rng(seed).integers(0, 256, shape)
    x = torch.from_numpy(drawn.astype(np.uint8 if as_bytes else np.float32))
    values = np.moveaxis(drawn.astype(float) / (255 if as_bytes else 1), 1, 0).reshape(shape[1], -1)
    cut = int(np.random.default_rng(seed).integers(0, len(x) + 1))
    mine, theirs = torch.arange(len(x)).tensor_split([cut])  # of two clients, of whom one may have nothing
    found = Moments.of(x, mine) + Moments.of(x, theirs)
    assert found.count.tolist() == [values.shape[1]] * shape[1]
    assert found.mean.tolist() == pytest.approx(values.mean(1))
    assert (found.squares / found.count).sqrt().tolist() == pytest.approx(values.std(1), abs=1e-12)


def test_npz_of_images_with_clients(tmp_path: Path) -> None:
    x = np.arange(4 * 6 * 5, dtype=np.uint8).reshape(4, 6, 5)
    np.savez(tmp_path / "d.npz", x=x, y=np.array(["cat", "ant", "cat", "dog"]), client=np.array([7, 3, 3, 7]))
    loaded = data.load(f"npz:{tmp_path / 'd.npz'}")
    assert loaded.x.shape == (4, 1, 6, 5) and np.array_equal(loaded.x[:, 0].numpy(), x)
    assert loaded.y.tolist() == [1, 0, 1, 2] and loaded.classes == ("ant", "cat", "dog")
    assert loaded.owner is not None and loaded.owner.tolist() == [1, 0, 0, 1]


def test_npz_of_series_reaches_the_model_with_times_first(tmp_path: Path) -> None:
    x = np.random.default_rng(0).normal(size=(4, 6, 5)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, y=np.array([0, 1, 1, 0]))
    loaded = data.load(f"npz:{tmp_path / 'd.npz'},series=true")
    assert loaded.input_shape == (6, 5) and np.array_equal(loaded.x.numpy(), x)


def test_npz_of_vectors_for_regression(tmp_path: Path) -> None:
    np.savez_compressed(tmp_path / "d.npz", x=np.array([[1, 2], [3, 6]]), y=np.array([0.5, 1.5]))
    loaded = data.load("npz", path=tmp_path / "d.npz", task="regression", norm="own")
    assert loaded.x.dtype == torch.float32 and loaded.y.tolist() == [0.5, 1.5] and loaded.num_outputs == 1
    assert loaded.mean == (2.0, 4.0) and loaded.std == (1.0, 2.0)


@pytest.mark.parametrize(
    ("arrays", "options", "words"),
    [
        ({"y": [0, 1]}, "", "no array 'x'"),
        ({"x": [[1.0]]}, "", "no array 'y'"),
        ({"x": [[1.0], [2.0]], "y": [0, 1, 1]}, "", "one entry for each sample"),
        ({"x": [[1.0], [2.0]], "y": [0, 1], "client": [1]}, "", "one entry for each sample"),
        ({"x": [1.0, 2.0], "y": [0, 1]}, "", "one row for each sample"),
        ({"x": [["a"], ["b"]], "y": [0, 1]}, "", "not numbers"),
        ({"x": [[1.0], [np.nan]], "y": [0, 1]}, "", "missing or infinite"),
        ({"x": [[1.0], [2.0]], "y": [0.5, 1]}, "", "task=regression"),
        ({"x": [[1.0], [2.0]], "y": [0, np.inf]}, ",task=regression", "missing or infinite"),
        ({"x": [[1.0], [2.0]], "y": ["a", "b"]}, ",task=regression", "not numbers"),
        ({"x": [[1.0], [2.0]], "y": [1, 1]}, "", "1 different values"),
        ({"x": [[1.0], [2.0], [3.0]], "y": [0, 1, 2]}, ",task=binary", "3 different values"),
        ({"x": [[1.0], [2.0]], "y": [0, 1]}, ",series=true", r"series=true needs \[N, times, features\]"),
        ({"x": [[[1.0]], [[2.0]]], "y": [0, 1]}, ",series=true,norm=own", "norm=own does not fit series=true"),
        ({"x": [[[1]], [[2]]], "y": [0, 1]}, ",series=true,words=true", "exclude each other"),
    ],
)
def test_npz_refusals(tmp_path: Path, arrays: dict[str, list[object]], options: str, words: str) -> None:
    np.savez(tmp_path / "d.npz", **{key: np.array(value) for key, value in arrays.items()})
    with pytest.raises(DataError, match=words):
        data.load(f"npz:{tmp_path / 'd.npz'}{options}")


def test_npz_never_unpickles(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.array([{"a": 1}, None], dtype=object), y=np.array([0, 1]))
    with pytest.raises(DataError, match=r"d\.npz cannot be read"):
        data.load(f"npz:{tmp_path / 'd.npz'}")


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut short"])
def test_npz_that_is_damaged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "d.npz").write_bytes(content)
    with pytest.raises(DataError, match=r"d\.npz"):
        data.load(f"npz:{tmp_path / 'd.npz'}")


def test_npz_cut_short(tmp_path: Path) -> None:
    np.savez(tmp_path / "d.npz", x=np.zeros((50, 3)), y=np.arange(50) % 2)
    content = (tmp_path / "d.npz").read_bytes()
    (tmp_path / "d.npz").write_bytes(content[:-100])
    with pytest.raises(DataError, match=r"d\.npz"):
        data.load(f"npz:{tmp_path / 'd.npz'}")


FRAME = pd.DataFrame(
    {
        "hospital": ["south", "north", "north", "south"],
        "age": [30, 50, 30, 50],
        "smoker": [True, False, False, True],
        "blood": ["A", "0", "A", "B"],
        "when": ["x1", "x2", "x3", "x4"],
        "ill": ["yes", "no", "no", "yes"],
    }
)


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_table(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"patients.{ending}"
    FRAME.to_csv(path, index=False) if ending == "csv" else FRAME.to_parquet(path)
    loaded = data.load(f"table:{path},label=ill,client=hospital,drop=when,task=binary")
    assert loaded.classes == ("no", "yes") and loaded.y.tolist() == [1, 0, 0, 1] and loaded.num_outputs == 1
    assert loaded.owner is not None and loaded.owner.tolist() == [1, 0, 0, 1]
    # age, smoker, then one column for each of the texts 0, A, B
    assert loaded.x.tolist() == [[30, 1, 0, 1, 0], [50, 0, 1, 0, 0], [30, 0, 0, 1, 0], [50, 1, 0, 0, 1]]
    assert loaded.mean == (40.0, 0.0, 0.0, 0.0, 0.0) and loaded.std == (10.0, 1.0, 1.0, 1.0, 1.0)


def test_table_for_regression(tmp_path: Path) -> None:
    FRAME.to_csv(tmp_path / "t.csv", index=False)
    loaded = data.load(f"table:{tmp_path / 't.csv'},label=age,drop=when+hospital,task=regression,norm=none")
    assert loaded.y.tolist() == [30.0, 50.0, 30.0, 50.0] and loaded.classes == ()
    assert loaded.x.shape == (4, 6) and set(loaded.mean) == {0.0} and set(loaded.std) == {1.0}


@pytest.mark.parametrize(
    ("frame", "options", "words"),
    [
        (FRAME, "label=sick", "no column 'sick'"),
        (FRAME, "label=ill,client=clinic", "no column 'clinic'"),
        (FRAME, "label=ill,drop=date", "no column 'date'"),
        (FRAME.iloc[:0], "label=ill", "no rows"),
        (
            FRAME.assign(ill=["no", None, "yes", None]),
            "label=ill",
            "2 rows have no label",
        ),
        (FRAME.assign(age=[None] * 4), "label=ill", "column 'age' has no value at all: give drop=age"),
        (FRAME.assign(age=[1, 2, 3, "old"]), "label=ill", "3 numbers and 1 texts, such as 'old' in row 3"),
        (FRAME.assign(age=[1, np.inf, 3, 4]), "label=ill", "infinite value in column 'age'"),
        (FRAME[["ill"]], "label=ill", "no columns to predict from"),
        (FRAME, "label=ill,task=regression", "not numbers"),
        (FRAME, "label=blood,task=binary", "3 different values"),
    ],
)
def test_table_refusals(tmp_path: Path, frame: pd.DataFrame, options: str, words: str) -> None:
    frame.to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(DataError, match=words):
        data.load(f"table:{tmp_path / 't.csv'},{options}")


def test_table_refuses_names_as_features(tmp_path: Path) -> None:
    many = pd.DataFrame({"id": [f"p{n}" for n in range(101)], "y": [n % 2 for n in range(101)]})
    many.to_csv(tmp_path / "t.csv", index=False)
    with pytest.raises(DataError, match=r"101 different texts in column 'id'.*drop=id"):
        data.load(f"table:{tmp_path / 't.csv'},label=y")


def test_tables_that_are_not_tables(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="neither"):
        data.load(f"table:{tmp_path / 't.xlsx'},label=y")
    with pytest.raises(DataError, match="there is no file"):
        data.load(f"table:{tmp_path / 't.csv'},label=y")
    with pytest.raises(ConfigError, match="'label' must be given"):
        data.load(f"table:{tmp_path / 't.csv'}")
    for ending in ("csv", "parquet"):
        (tmp_path / f"t.{ending}").write_bytes(b"")
        with pytest.raises(DataError, match=rf"t\.{ending} cannot be read"):
            data.load(f"table:{tmp_path / f't.{ending}'},label=y")


@pytest.mark.parametrize(
    ("x", "options", "message"),
    [
        (np.ones((4, 3)), "", "must hold numbers of words"),
        (np.full((4, 3), -1), "", "must hold numbers of words"),
        (np.ones(4, dtype=int), "", "must hold numbers of words"),
        (np.ones((4, 3), dtype=int), ",norm=own", "norm=own does not fit words=true"),
    ],
)
def test_words_are_integers(x: np.ndarray, options: str, message: str, tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=x, y=[0, 1, 0, 1])
    with pytest.raises(DataError, match=message):
        data.load(f"npz:{tmp_path / 'a.npz'},words=true{options}")


def test_words_stay_as_they_are(tmp_path: Path) -> None:
    words = np.arange(12, dtype=np.int32).reshape(4, 3)
    np.savez(tmp_path / "a.npz", x=words, y=[0, 1, 0, 1])
    found = data.load(f"npz:{tmp_path / 'a.npz'},words=true").x
    assert found.dtype == torch.int64
    assert found.tolist() == words.tolist()
