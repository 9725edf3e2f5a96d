from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from coterie import data
from coterie.data import Dataset
from coterie.data import digits as digits_module
from coterie.errors import ConfigError, DataError, UnknownName


def test_digits() -> None:
    digits = data.load("digits")
    assert digits.x.shape == (1797, 1, 8, 8)
    assert digits.x.dtype == torch.float32
    assert (float(digits.x.min()), float(digits.x.max())) == (0.0, 1.0)
    assert digits.input_shape == (1, 8, 8)
    assert digits.num_outputs == 10
    # The counts that the UCI repository publishes for the test part of optdigits.
    assert digits.y.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels, labels = load_digits(return_X_y=True)
    read = [data.load("digits")]
    monkeypatch.setattr(digits_module, "_PLACE", "moved.csv.gz")  # by a version that keeps its file elsewhere
    read.append(data.load("digits"))
    for digits in read:
        assert torch.equal(digits.x.double().flatten(1), torch.from_numpy(pixels) / 16)
        assert digits.y.tolist() == labels.tolist()


@settings(max_examples=20, deadline=None)
@given(
    clients=st.integers(1, 9),
    groups=st.integers(1, 9),
    samples=st.integers(2, 12),
    features=st.integers(1, 6),
    classes=st.integers(2, 5),
    hidden=st.sampled_from([0, 3]),
    seed=st.integers(0, 2**31),
)
def test_synthetic_shapes_and_owners(clients, groups, samples, features, classes, hidden, seed) -> None:
    options = {
        "groups": min(groups, clients),
        "samples": samples,
        "features": features,
        "classes": classes,
        "hidden": hidden,
    }
    made = data.load("synthetic", seed=seed, clients=clients, **options)
    assert made.x.shape == (clients * samples, features)
    assert made.owner is not None and made.groups is not None
    assert made.owner.bincount().tolist() == [samples] * clients
    sizes = made.groups.bincount()
    assert len(sizes) == min(groups, clients) and sizes.max() - sizes.min() <= 1
    assert (made.groups.diff() >= 0).all()


def test_synthetic_is_a_function_of_the_seed() -> None:
    first, again, other = (data.load("synthetic", seed=seed) for seed in (3, 3, 4))
    assert torch.equal(first.x, again.x) and torch.equal(first.y, again.y)
    assert not torch.equal(first.x, other.x)


def test_a_client_does_not_depend_on_how_many_follow() -> None:
    few, many = (data.load("synthetic", seed=1, clients=clients, groups=1) for clients in (2, 5))
    assert torch.equal(few.x, many.x[: len(few.x)]) and torch.equal(few.y, many.y[: len(few.y)])


def _least_squares_accuracy(train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]) -> float:
    targets = np.eye(4)[train[1]]
    weights = np.linalg.lstsq(train[0].T @ train[0] + np.eye(20), train[0].T @ targets, rcond=None)[0]
    return float(((test[0] @ weights).argmax(1) == test[1]).mean())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_collaboration_helps_within_a_group_and_hurts_across(seed: int) -> None:
    made = data.load("synthetic", seed=seed)
    x, y = made.x.double().numpy().reshape(30, 60, 20), made.y.numpy().reshape(30, 60)
    group = made.groups.numpy()

    def pooled(members: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return x[members, :48].reshape(-1, 20), y[members, :48].reshape(-1)

    alone, together, everybody = [], [], []
    for client in range(30):
        test = x[client, 48:], y[client, 48:]
        alone.append(_least_squares_accuracy(pooled(np.array([client])), test))
        together.append(_least_squares_accuracy(pooled(np.flatnonzero(group == group[client])), test))
        everybody.append(_least_squares_accuracy(pooled(np.arange(30)), test))
    assert np.mean(together) > np.mean(alone) + 0.1
    assert np.mean(everybody) < np.mean(alone) - 0.03


def test_without_variation_or_noise_a_group_has_one_linear_teacher() -> None:
    made = data.load("synthetic:clients=4,groups=2,variation=0,noise=0,task=regression,samples=40", seed=5)
    x, y = made.x.double().reshape(4, 40, 20), made.y.double().reshape(4, 40)
    teachers = torch.stack(
        [torch.linalg.lstsq(x[client], y[client].unsqueeze(1)).solution[:, 0] for client in range(4)]
    )
    assert torch.allclose(teachers[0], teachers[1], atol=1e-5) and torch.allclose(teachers[2], teachers[3], atol=1e-5)
    assert (teachers[0] - teachers[2]).norm() > 0.5


@pytest.mark.parametrize(("task", "outputs", "kind"), [("binary", 1, torch.int64), ("regression", 1, torch.float32)])
def test_other_tasks(task: str, outputs: int, kind: torch.dtype) -> None:
    made = data.load("synthetic", task=task)
    assert made.task == task and made.num_outputs == outputs and made.y.dtype == kind
    assert len(made.classes) == (2 if task == "binary" else 0)


def test_options_in_the_name_and_as_keywords_are_one() -> None:
    both = data.load("synthetic:clients=4,groups=2", samples=7)
    assert both.name == "synthetic:clients=4,groups=2,samples=7"
    assert torch.equal(both.x, data.load(both.name).x)
    with pytest.raises(ConfigError, match="twice"):
        data.load("synthetic:clients=4", clients=5)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("synthetic:groups=31", "groups is 31, but there are only 30 clients"),
        ("synthetic:samples=1", "samples is '1', but must be integer ≥ 2"),
        ("synthetic:variation=2", "variation"),
        ("digits:8", "key=value"),
        ("digits:a=1", "no parameter 'a'"),
    ],
)
def test_wrong_options(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        data.load(name)


def test_unknown_data_set() -> None:
    with pytest.raises(UnknownName, match="did you mean 'fashion_mnist'"):
        data.load("fashion-mnist")


def test_every_name_is_described() -> None:
    described = data.describe()
    assert [info.name for info in described] == data.names()
    assert all(info.samples and info.shape and info.obtained and info.doc and info.citation for info in described)
    assert {"digits", "synthetic", "mnist", "emnist", "cifar100", "femnist", "folder", "npz", "table"} <= set(
        data.names()
    )


def test_data_folder_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COTERIE_DATA", str(tmp_path / "environment"))
    assert data.data_folder(tmp_path / "given") == tmp_path / "given"
    assert data.data_folder() == tmp_path / "environment"
    monkeypatch.delenv("COTERIE_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "coterie" in str(data.data_folder()).lower()


_GOOD = {
    "name": "x",
    "x": torch.zeros(4, 2),
    "y": torch.tensor([0, 1, 0, 1]),
    "train_count": 4,
    "task": "multiclass",
    "classes": ("a", "b"),
    "mean": (0.0,),
    "std": (1.0,),
}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"y": torch.tensor([0, 1, 0])}, "4 inputs but 3 labels"),
        ({"y": torch.tensor([0, 1, 0, 2])}, "labels 0..2 for 2 classes"),
        ({"y": torch.tensor([0, -1, 0, 1])}, "labels -1..1"),
        ({"y": torch.zeros(4)}, "labels are torch.float32"),
        ({"x": torch.zeros(4, 2).double()}, "torch.float64"),
        ({"x": torch.zeros(0, 2), "y": torch.zeros(0).long()}, "no samples"),
        ({"task": "ranking"}, "ranking"),
        ({"train_count": 5}, "train_count is 5"),
        ({"std": (0.0,)}, "not positive"),
        ({"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}, "3 means for 2 channels"),
        ({"task": "binary", "classes": ("a", "b", "c")}, "binary"),
        ({"owner": torch.zeros(3).long()}, "owner"),
    ],
)
def test_a_data_set_that_contradicts_itself_is_refused(change: dict[str, object], words: str) -> None:
    Dataset(**_GOOD)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=words):
        Dataset(**(_GOOD | change))  # type: ignore[arg-type]
