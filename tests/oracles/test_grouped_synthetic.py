"""Grouped clients whose groups are known: methods that choose whom to learn from find them, and gain from them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest

import coterie
from coterie.evaluation import block_contrast
from coterie.results import Result

SEEDS = (1, 10, 100)
GROUPS = np.repeat([0, 1, 2], 10)  # as `synthetic` documents: 30 clients in 3 groups, in order


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("grouped")


@cache
def played(folder: Path, name: str, seed: int, rounds: int) -> Result:
    """A run with the method's defaults, evaluated at the end only."""
    return coterie.run(
        name,
        data="synthetic",
        partition="natural",
        clients=30,
        model="linear",
        seed=seed,
        rounds=rounds,
        eval_every=rounds,
        checkpoint_every=rounds,
        threads=1,
        out=folder / f"{name}-{seed}-{rounds}",
        progress=False,
    )


def accuracy(folder: Path, name: str) -> float:
    """Mean personal test accuracy over the clients and the seeds."""
    return float(np.mean([played(folder, name, seed, 30).summary["personal"]["final"]["mean"] for seed in SEEDS]))


@pytest.mark.parametrize("name", ["fedamp", "heurfedamp"])
def test_message_passing_with_defaults_beats_training_alone_by_two_points(name: str, folder: Path) -> None:
    assert accuracy(folder, name) >= accuracy(folder, "local") + 0.02


@pytest.mark.parametrize("name", ["fedacs", "fedamp", "heurfedamp"])
@pytest.mark.parametrize("seed", SEEDS)
def test_recorded_weights_show_the_groups(name: str, seed: int, folder: Path) -> None:
    weights = played(folder, name, seed, 10 if name == "fedacs" else 30).weights()
    assert weights.shape == (30, 30)
    assert [int(client) for client in weights.columns] == weights.index.tolist() == list(range(30))
    np.testing.assert_allclose(weights.to_numpy().sum(1), 1, rtol=0, atol=1e-6)
    assert block_contrast(weights, GROUPS) > 1  # which it is where groups do not matter


def test_groups_by_chance_have_no_contrast(folder: Path) -> None:
    shuffled = GROUPS.reshape(3, 10).T.ravel()
    for seed in SEEDS:
        weights = played(folder, "fedacs", seed, 10).weights()
        assert block_contrast(weights, shuffled) < 0.5 * block_contrast(weights, GROUPS)
