"""Counts and class histograms of the real sets, as published; skipped where ``COTERIE_DATA`` has none."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from coterie import data
from coterie.data.download import status_of
from coterie.data.partitions import share_out
from coterie.data.registry import SOURCES

pytestmark = [
    pytest.mark.realdata,
    pytest.mark.skipif("COTERIE_DATA" not in os.environ, reason="COTERIE_DATA is not set"),
]

MNIST = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def load(name: str) -> data.Dataset:
    state = status_of(SOURCES[name.partition(":")[0]], Path(os.environ["COTERIE_DATA"]))
    if state.state == "missing":
        pytest.skip(f"{name} is not in COTERIE_DATA")
    assert state.state == "whole", state
    return data.load(name)


@pytest.mark.parametrize(
    ("name", "shape", "train", "test"),
    [
        ("mnist", (1, 28, 28), MNIST, MNIST_TEST),
        ("fashion_mnist", (1, 28, 28), [6000] * 10, [1000] * 10),
        ("cifar10", (3, 32, 32), [5000] * 10, [1000] * 10),
        ("cifar100", (3, 32, 32), [500] * 100, [100] * 100),
        ("cifar100:labels=coarse", (3, 32, 32), [2500] * 20, [500] * 20),
    ],
)
def test_counts(name: str, shape: tuple[int, ...], train: list[int], test: list[int]) -> None:
    loaded = load(name)
    assert loaded.input_shape == shape and loaded.x.dtype == torch.uint8
    assert loaded.y[: loaded.train_count].bincount().tolist() == train
    assert loaded.y[loaded.train_count :].bincount().tolist() == test
    # One copy, as bytes: the storage is no larger than the samples.
    assert loaded.x.untyped_storage().nbytes() == loaded.x.numel()


def test_own_norm_of_fashion_mnist_is_its_own() -> None:
    loaded = load("fashion_mnist:norm=own")
    pixels = loaded.x[: loaded.train_count].double() / 255
    assert float(pixels.mean()) == pytest.approx(loaded.mean[0], abs=1e-3)
    assert float(pixels.std()) == pytest.approx(loaded.std[0], abs=1e-3)


def test_super_classes_of_cifar100_are_its_coarse_labels() -> None:
    fine, coarse = load("cifar100"), load("cifar100:labels=coarse")
    assert torch.equal(torch.tensor(fine.superclasses)[fine.y], coarse.y)


def test_medical_mnist() -> None:
    loaded = load("medical_mnist")
    assert loaded.input_shape == (3, 64, 64) and loaded.train_count == 58_954
    assert dict(zip(loaded.classes, loaded.y.bincount().tolist(), strict=True)) == {
        "AbdomenCT": 10_000,
        "BreastMRI": 8_954,
        "CXR": 10_000,
        "ChestCT": 10_000,
        "Hand": 10_000,
        "HeadCT": 10_000,
    }
    assert loaded.x.untyped_storage().nbytes() == 58_954 * 64 * 64


@pytest.mark.parametrize(("name", "scheme"), [("mnist", "groups"), ("cifar100", "groups"), ("mnist", "pathological:2")])
def test_the_papers_partitions_can_be_dealt(name: str, scheme: str) -> None:
    loaded = load(name)
    shares = share_out(loaded, scheme, clients=100, seed=1)
    assert len(torch.cat([shares.train.flat, shares.validation.flat]).unique()) == sum(
        len(shares.train[client]) + len(shares.validation[client]) for client in range(100)
    )
    if scheme == "groups":
        assert shares.test.sizes.tolist() == [100] * 100


def test_the_fashion_mnist_check_can_be_dealt() -> None:
    loaded = load("fashion_mnist:norm=own")
    shares = share_out(
        loaded, "dirichlet:0.5,min_samples=100", clients=100, seed=1, scarcity=50, max_test=200, validation=0
    )
    assert shares.train.sizes.tolist() == [50] * 100
    assert int(shares.test.sizes.min()) >= 14 and int(shares.test.sizes.max()) <= 200
