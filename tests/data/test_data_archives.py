"""The official file formats, on tiny files that the tests write themselves."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from coterie import data
from coterie.data.cifar import Cifar10, Cifar100
from coterie.data.emnist import Emnist
from coterie.data.femnist import Femnist
from coterie.data.medical_mnist import MedicalMnist
from coterie.data.mnist import FILES, FashionMnist, Mnist
from coterie.errors import DataError


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def idx(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(np.uint8).tobytes()


def pictures(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 28, 28), dtype=np.uint8)


@pytest.fixture(params=["mnist", "fashion_mnist"])
def small_mnist(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Twelve training and five test images in the four official files, two of them compressed."""
    source = {"mnist": Mnist, "fashion_mnist": FashionMnist}[request.param]
    images = np.concatenate([pictures(12, 0), pictures(5, 1)])
    labels = np.arange(17) % 10
    contents = [idx(images[:12]), idx(labels[:12]), idx(images[12:]), idx(labels[12:])]
    folder = tmp_path / source.folder
    folder.mkdir(parents=True)
    for number, (name, content) in enumerate(zip(FILES, contents, strict=True)):
        if number % 2:
            (folder / name).write_bytes(content)
        else:
            (folder / f"{name}.gz").write_bytes(gzip.compress(content))
    monkeypatch.setattr(source, "counts", (12, 5))
    monkeypatch.setattr(source, "checksums", {name: md5(c) for name, c in zip(FILES, contents, strict=True)})
    return source, folder, images, labels


def test_mnist_is_read_as_stored(small_mnist, tmp_path: Path) -> None:
    source, _, images, labels = small_mnist
    loaded = data.load(source.name, data_dir=tmp_path)
    assert loaded.x.dtype == torch.uint8
    assert loaded.x.shape == (17, 1, 28, 28)
    assert np.array_equal(loaded.x[:, 0].numpy(), images)
    assert np.array_equal(loaded.y.numpy(), labels)
    assert loaded.train_count == 12
    assert (loaded.mean, loaded.std) == ((0.1307,), (0.3081,))


def test_fashion_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    contents = [idx(pictures(2, 0)), idx(np.array([0, 1])), idx(pictures(1, 0)), idx(np.array([2]))]
    folder = tmp_path / FashionMnist.folder
    folder.mkdir(parents=True)
    for name, content in zip(FILES, contents, strict=True):
        (folder / name).write_bytes(content)
    monkeypatch.setattr(FashionMnist, "counts", (2, 1))
    monkeypatch.setattr(FashionMnist, "checksums", {})
    found = {norm: data.load(f"fashion_mnist:norm={norm}", data_dir=tmp_path) for norm in ("own", "fedpg", "flame")}
    assert {norm: (*made.mean, *made.std) for norm, made in found.items()} == {
        "own": (0.286, 0.353),
        "fedpg": (0.0, 1.0),
        "flame": (0.1307, 0.3081),
    }


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("spoil", [_truncate, _flip, _lengthen], ids=["cut short", "altered", "too long"])
@pytest.mark.parametrize("number", range(4))
def test_damaged_mnist_is_refused_with_the_file_name(small_mnist, tmp_path: Path, spoil, number: int) -> None:
    source, folder, _, _ = small_mnist
    path = folder / (FILES[number] if number % 2 else f"{FILES[number]}.gz")
    spoil(path)
    if path.suffix == ".gz" and spoil is _lengthen:
        path.write_bytes(gzip.compress(gzip.decompress(path.read_bytes()) + b"\0"))
    with pytest.raises(DataError, match=path.name):
        data.load(source.name, data_dir=tmp_path)
    state = next(state for state in data.status(tmp_path) if state.name == source.name)
    assert state.state == "damaged" and path.name in state.damaged[0]


def test_a_header_that_promises_more_is_refused_before_memory_is_taken(small_mnist, tmp_path: Path) -> None:
    source, folder, _, _ = small_mnist
    (folder / FILES[0]).write_bytes(bytes([0, 0, 8, 3]) + struct.pack(">3I", 2**31, 28, 28))
    with pytest.raises(DataError, match=r"2147483648 x 28 x 28 bytes, not 12 x 28 x 28"):
        data.load(source.name, data_dir=tmp_path)


def test_a_file_of_another_kind_is_refused(small_mnist, tmp_path: Path) -> None:
    source, folder, _, _ = small_mnist
    (folder / FILES[1]).write_bytes(b"<html>not found</html>")
    with pytest.raises(DataError, match="not an idx file"):
        data.load(source.name, data_dir=tmp_path)


def test_a_missing_file_is_named_with_its_place(small_mnist, tmp_path: Path) -> None:
    source, folder, _, _ = small_mnist
    (folder / FILES[3]).unlink()
    with pytest.raises(DataError, match=rf"{FILES[3]}.*coterie data fetch {source.name}"):
        data.load(source.name, data_dir=tmp_path)
    state = next(state for state in data.status(tmp_path) if state.name == source.name)
    assert (state.state, state.missing) == ("incomplete", (f"{source.folder}/{FILES[3]}",))


def test_status_of_an_empty_folder(tmp_path: Path) -> None:
    states = {state.name: state.state for state in data.status(tmp_path)}
    assert states["digits"] == "built in" and states["folder"] == "your own"
    assert {states[name] for name in ("mnist", "emnist", "cifar10", "medical_mnist", "femnist")} == {"missing"}


def _write_emnist(folder: Path, split: str, images: np.ndarray, labels: np.ndarray, train: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stored = images.transpose(0, 2, 1)  # EMNIST's files hold every image column by column
    contents = [idx(stored[:train]), idx(labels[:train]), idx(stored[train:]), idx(labels[train:])]
    for name, content in zip(Emnist.files_of(split), contents, strict=True):
        (folder / f"{name}.gz").write_bytes(gzip.compress(content))


@pytest.mark.parametrize(
    ("split", "classes", "first"), [("byclass", 62, 0), ("balanced", 47, 0), ("letters", 26, 1), ("digits", 10, 0)]
)
def test_emnist_is_turned_upright(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, split: str, classes: int, first: int
) -> None:
    images, labels = pictures(classes + 3, 2), np.arange(classes + 3) % classes
    _write_emnist(tmp_path / Emnist.folder, split, images, labels + first, classes)
    monkeypatch.setattr(Emnist, "splits", {split: (classes, 3)})
    loaded = data.load(f"emnist:split={split}", data_dir=tmp_path)
    assert np.array_equal(loaded.x[:, 0].numpy(), images)
    assert np.array_equal(loaded.y.numpy(), labels)
    assert loaded.train_count == classes and len(loaded.classes) == classes
    assert next(state.state for state in data.status(tmp_path) if state.name == "emnist") == "whole"


def test_emnist_class_names_and_families() -> None:
    assert Emnist.class_names["byclass"][10] == "A" and Emnist.class_names["byclass"][36] == "a"
    assert [len(names) for names in Emnist.class_names.values()] == [62, 47, 26, 10]
    assert sum(Emnist.splits["byclass"]) == 814_255 and sum(Emnist.splits["balanced"]) == 131_600


def test_emnist_letters_numbered_from_zero_are_not_the_official_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _write_emnist(tmp_path / Emnist.folder, "letters", pictures(27, 2), np.arange(27) % 26, 26)
    monkeypatch.setattr(Emnist, "splits", {"letters": (26, 1)})
    with pytest.raises(DataError, match=r"labels -1\.\.24"):
        data.load("emnist:split=letters", data_dir=tmp_path)


def test_emnist_with_another_number_of_samples_is_refused(tmp_path: Path) -> None:
    _write_emnist(tmp_path / Emnist.folder, "digits", pictures(20, 2), np.arange(20) % 10, 12)
    with pytest.raises(DataError, match=r"12 x 28 x 28 bytes, not 240000"):
        data.load("emnist:split=digits", data_dir=tmp_path)
    state = next(state for state in data.status(tmp_path) if state.name == "emnist")
    assert state.state == "damaged"


@pytest.fixture
def small_cifar10(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (18, 3, 32, 32), dtype=np.uint8)
    labels = np.arange(18) % 10
    folder = tmp_path / Cifar10.folder
    folder.mkdir()
    sums = {}
    for number, name in enumerate(Cifar10.checksums):
        part = slice(3 * number, 3 * number + 3)
        rows = np.concatenate([labels[part, None].astype(np.uint8), images[part].reshape(3, 3072)], 1)
        (folder / name).write_bytes(rows.tobytes())
        sums[name] = md5(rows.tobytes())
    monkeypatch.setattr(Cifar10, "counts", dict.fromkeys(sums, 3))
    monkeypatch.setattr(Cifar10, "checksums", sums)
    return folder, images, labels


def test_cifar10(small_cifar10, tmp_path: Path) -> None:
    _, images, labels = small_cifar10
    loaded = data.load("cifar10:norm=fedpg", data_dir=tmp_path)
    assert np.array_equal(loaded.x.numpy(), images) and np.array_equal(loaded.y.numpy(), labels)
    assert loaded.train_count == 15
    assert (loaded.mean, loaded.std) == ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))


@pytest.mark.parametrize("spoil", [_truncate, _flip, _lengthen])
def test_damaged_cifar10(small_cifar10, tmp_path: Path, spoil) -> None:
    spoil(small_cifar10[0] / "data_batch_3.bin")
    with pytest.raises(DataError, match=r"data_batch_3\.bin"):
        data.load("cifar10", data_dir=tmp_path)


def test_cifar100(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (8, 3, 32, 32), dtype=np.uint8)
    fine = np.array([0, 98, 4, 30, 8, 12, 55, 72])
    coarse = np.array([4, 14, 0, 0, 18, 9, 0, 0])
    folder = tmp_path / Cifar100.folder
    folder.mkdir()
    rows = np.concatenate([coarse[:, None], fine[:, None], images.reshape(8, 3072)], 1).astype(np.uint8)
    (folder / "train.bin").write_bytes(rows[:6].tobytes())
    (folder / "test.bin").write_bytes(rows[6:].tobytes())
    monkeypatch.setattr(Cifar100, "counts", {"train.bin": 6, "test.bin": 2})
    monkeypatch.setattr(Cifar100, "checksums", {})
    loaded = data.load("cifar100", data_dir=tmp_path)
    assert np.array_equal(loaded.x.numpy(), images) and np.array_equal(loaded.y.numpy(), fine)
    # The published pairs: apple is a fruit, woman a person, beaver/dolphin/otter/seal aquatic, bicycle a vehicle.
    assert [loaded.superclasses[label] for label in fine] == coarse.tolist()
    assert [loaded.classes[label] for label in (0, 98, 8)] == ["apple", "woman", "bicycle"]
    by_family = data.load("cifar100:labels=coarse", data_dir=tmp_path)
    assert np.array_equal(by_family.y.numpy(), coarse) and len(by_family.classes) == 20


def test_cifar100_names() -> None:
    fine = [name for members in Cifar100.families.values() for name in members]
    assert len(fine) == len(set(fine)) == 100 and {len(members) for members in Cifar100.families.values()} == {5}
    assert list(Cifar100.families) == sorted(Cifar100.families)


@pytest.fixture
def small_medical(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    counts = {"AbdomenCT": 2, "BreastMRI": 1, "CXR": 2}
    shades = iter(range(10, 200, 20))
    for name, count in counts.items():
        (tmp_path / MedicalMnist.folder / name).mkdir(parents=True)
        for number in range(count):
            Image.new("L", (64, 64), next(shades)).save(tmp_path / MedicalMnist.folder / name / f"{number:06d}.jpeg")
    monkeypatch.setattr(MedicalMnist, "counts", counts)
    return tmp_path


def test_medical_mnist(small_medical: Path) -> None:
    loaded = data.load("medical_mnist", data_dir=small_medical)
    assert loaded.x.shape == (5, 3, 64, 64) and loaded.x.dtype == torch.uint8
    assert loaded.x[:, :, 7, 9].tolist() == [[shade] * 3 for shade in (10, 30, 50, 70, 90)]
    assert loaded.y.tolist() == [0, 0, 1, 2, 2] and (loaded.mean, loaded.std) == ((0.3,), (0.3,))
    assert loaded.x.untyped_storage().nbytes() == 5 * 64 * 64  # three channels, one in memory
    assert loaded.x.index_select(0, torch.tensor([4, 0])).shape == (2, 3, 64, 64)


def test_medical_mnist_refusals(small_medical: Path) -> None:
    image = small_medical / MedicalMnist.folder / "CXR" / "000001.jpeg"
    content = image.read_bytes()
    image.write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"000001\.jpeg"):
        data.load("medical_mnist", data_dir=small_medical)
    image.unlink()
    with pytest.raises(DataError, match=r"CXR holds 1 images, not 2"):
        data.load("medical_mnist", data_dir=small_medical)
    image.write_bytes(content)
    (small_medical / MedicalMnist.folder / "AbdomenCT").rename(small_medical / "elsewhere")
    with pytest.raises(DataError, match="Kaggle"):
        data.load("medical_mnist", data_dir=small_medical)


def _leaf(writers: dict[str, tuple[np.ndarray, list[int]]]) -> dict[str, object]:
    return {
        "users": list(writers),
        "num_samples": [len(labels) for _, labels in writers.values()],
        "user_data": {
            user: {"x": (images.reshape(-1, 784) / 255).tolist(), "y": labels}
            for user, (images, labels) in writers.items()
        },
    }


@pytest.fixture
def small_femnist(tmp_path: Path):
    writers = {
        "train": {"f02": (pictures(3, 0), [1, 40, 2]), "f01": (pictures(2, 1), [0, 9])},
        "test": {"f02": (pictures(1, 2), [3]), "f01": (pictures(2, 3), [61, 5])},
    }
    for part, content in writers.items():
        (tmp_path / "FEMNIST" / part).mkdir(parents=True)
        for number, (user, drawn) in enumerate(content.items()):
            path = tmp_path / "FEMNIST" / part / f"all_data_{number}.json"
            path.write_text(json.dumps(_leaf({user: drawn}), indent=number))
    return tmp_path, writers


def test_femnist_all(small_femnist) -> None:
    folder, writers = small_femnist
    loaded = data.load("femnist:labels=all", data_dir=folder)
    drawn = [*writers["train"].values(), *writers["test"].values()]
    assert np.array_equal(loaded.x[:, 0].numpy(), np.concatenate([images for images, _ in drawn]))
    assert loaded.y.tolist() == [1, 40, 2, 0, 9, 3, 61, 5]
    assert loaded.train_count == 5 and len(loaded.classes) == 62
    assert loaded.owner is not None and loaded.owner.tolist() == [1, 1, 1, 0, 0, 1, 0, 0]


def test_femnist_digits(small_femnist) -> None:
    loaded = data.load("femnist", data_dir=small_femnist[0])
    assert loaded.y.tolist() == [1, 2, 0, 9, 3, 5] and loaded.train_count == 4 and len(loaded.classes) == 10
    assert loaded.owner is not None and loaded.owner.tolist() == [1, 1, 0, 0, 1, 0]


def _change(**facts: object):
    def spoil(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | facts))

    return spoil


def _grey(path: Path) -> None:
    content = json.loads(path.read_text())
    content["user_data"]["f02"]["x"][0][0] = 0.5001
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text(path.read_text()[:-30]),
        lambda path: path.write_text(path.read_text() + "]"),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text(""),
        _change(num_samples=[4]),
        _change(users=["f03"]),
        _change(user_data={"f02": {"x": [[0.0] * 783], "y": [1]}}),
        _change(user_data={"f02": {"x": [], "y": [1]}}),
        _change(user_data={"f02": {"y": [1]}}),
        _grey,
    ],
)
def test_damaged_femnist_is_refused_with_the_file_name(small_femnist, spoil) -> None:
    folder, _ = small_femnist
    spoil(folder / "FEMNIST" / "train" / "all_data_0.json")
    with pytest.raises(DataError, match=r"all_data_0\.json"):
        data.load("femnist", data_dir=folder)


def test_femnist_says_how_to_come_by_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"FEMNIST/train.*LEAF"):
        data.load("femnist", data_dir=tmp_path)
    assert Femnist.by_hand


def test_absent_says_what_is_missing_without_reading_it(tmp_path: Path) -> None:
    for name, said in (
        ("mnist", r"'mnist' needs the file .*train-images.*coterie data fetch mnist"),
        ("emnist:split=letters", r"'emnist' needs the file .*emnist-letters-train-images"),
        ("medical_mnist", r"'medical_mnist' needs .*MedicalMNIST/AbdomenCT"),
        ("femnist", r"'femnist' needs .*FEMNIST/train.*LEAF"),
    ):
        assert re.search(said, data.absent(name, tmp_path))
    assert data.absent("digits", tmp_path) == data.absent("synthetic:clients=3", tmp_path) == ""
    (tmp_path / "EMNIST/raw").mkdir(parents=True)
    for name in Emnist.files_of("letters"):
        (tmp_path / "EMNIST/raw" / f"{name}.gz").write_bytes(b"not looked at")
    assert data.absent("emnist:split=letters", tmp_path) == "" != data.absent("emnist", tmp_path)
