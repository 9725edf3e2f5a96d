"""The split inside the clients, and what is shown of it."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from coterie.data import Dataset, load
from coterie.data.partitions import Ragged, Shares, plot, share_out
from coterie.errors import ConfigError, PartitionError


def make(count: int, train_count: int | None = None, classes: int = 2) -> Dataset:
    return Dataset(
        name="made",
        x=torch.zeros(count, 1),
        y=torch.arange(count) % classes,
        train_count=train_count or count,
        task="multiclass",
        classes=tuple(map(str, range(classes))),
        mean=(0.0,),
        std=(1.0,),
    )


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(4, 300),
    clients=st.integers(1, 12),
    test=st.floats(0.01, 0.99),
    validation=st.floats(0, 0.99),
    seed=st.integers(0, 2**40),
)
def test_sizes_of_the_split(count: int, clients: int, test: float, validation: float, seed: int) -> None:
    clients = min(clients, count // 2)
    shares = share_out(make(count), "iid", clients=clients, seed=seed, test_fraction=test, validation=validation)
    for client in range(clients):
        all_of_it = count // clients + (client < count % clients)
        tested = min(max(1, round(test * all_of_it)), all_of_it - 1)
        trained = all_of_it - tested
        held_back = min(max(1, round(validation * trained)), trained - 1) if validation else 0
        assert int(shares.test.sizes[client]) == tested
        assert int(shares.validation.sizes[client]) == held_back
        assert int(shares.train.sizes[client]) == trained - held_back >= 1


def test_the_default_fraction_is_the_data_set_s_own() -> None:
    seven = share_out(make(700, 600), "iid", clients=10, seed=1)
    assert seven.test.sizes.tolist() == [10] * 10  # 1/7 of 70
    none = share_out(make(700), "iid", clients=10, seed=1)
    assert none.test.sizes.tolist() == [14] * 10  # 0.2 of 70


def test_all_data_are_pooled() -> None:
    shares = share_out(make(700, 600), "iid", clients=10, seed=1)
    assert int(shares.train.flat.max()) >= 600 and int(shares.test.flat.min()) < 600


def test_no_validation() -> None:
    shares = share_out(make(100), "iid", clients=4, seed=1, validation=0)
    assert shares.validation.sizes.tolist() == [0] * 4 and len(shares.validation[2]) == 0


@pytest.mark.parametrize("scheme", ["dirichlet:0.5", "groups:2"])
def test_scarcity_keeps_a_part_of_the_training_samples_and_all_test_samples(scheme: str) -> None:
    dataset = make(600, 500, classes=4)
    plenty = share_out(dataset, scheme, clients=5, seed=1)
    scarce = share_out(dataset, scheme, clients=5, seed=1, scarcity=12)
    assert torch.equal(plenty.test.flat, scarce.test.flat)
    for client in range(5):
        had = set(plenty.train[client].tolist()) | set(plenty.validation[client].tolist())
        kept = set(scarce.train[client].tolist()) | set(scarce.validation[client].tolist())
        assert kept <= had and len(kept) == min(12, len(had))
    assert len(scarce.validation[0]) == 1


def test_test_samples_can_be_limited() -> None:
    dataset = make(1000)
    whole = share_out(dataset, "iid", clients=2, seed=1)
    limited = share_out(dataset, "iid", clients=2, seed=1, max_test=30)
    assert limited.test.sizes.tolist() == [30, 30] and torch.equal(whole.train.flat, limited.train.flat)
    assert set(limited.test.flat.tolist()) <= set(whole.test.flat.tolist())


def test_indices_of_a_client_are_in_order() -> None:
    shares = share_out(load("digits"), "dirichlet:0.5", clients=10, seed=1)
    for part in (shares.train, shares.validation, shares.test):
        assert all((part[client].diff() > 0).all() for client in range(10))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"clients": 0}, "clients is 0"),
        ({"clients": 2, "test_fraction": 0.0}, "test_fraction is 0.0"),
        ({"clients": 2, "test_fraction": 1.0}, "test_fraction"),
        ({"clients": 2, "validation": 1.0}, "validation is 1.0"),
        ({"clients": 2, "validation": -0.1}, "validation"),
        ({"clients": 2, "validation": float("nan")}, "validation"),
        ({"clients": 2, "scarcity": 0}, "scarcity is 0"),
        ({"clients": 2, "max_test": 0}, "max_test is 0"),
        ({"clients": 2, "min_samples": 1}, "min_samples is 1"),
    ],
)
def test_wrong_options(options: dict[str, float], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        share_out(make(50), "iid", seed=1, **options)  # type: ignore[arg-type]


def test_more_clients_than_samples() -> None:
    with pytest.raises(PartitionError, match=r"26 clients cannot share 50 samples.*at most 25"):
        share_out(make(50), "iid", clients=26, seed=1)
    assert len(share_out(make(50), "iid", clients=25, seed=1)) == 25


def test_a_client_that_gets_too_little_is_named() -> None:
    with pytest.raises(PartitionError, match=r"client 2 would have 16 samples and needs 17: use fewer clients"):
        share_out(make(50), "iid", clients=3, seed=1, min_samples=17)


def test_five_hundred_clients() -> None:
    shares = share_out(make(70_000, 60_000, classes=10), "dirichlet:0.5", clients=500, seed=1)
    assert len(shares) == 500 and int(shares.train.sizes.min()) > 0


def test_ragged() -> None:
    ragged = Ragged.of([np.array([3, 1]), np.array([], dtype=np.int64), np.array([7])])
    assert len(ragged) == 3 and ragged.sizes.tolist() == [2, 0, 1] and ragged.offsets.tolist() == [0, 2, 2, 3]
    assert [part.tolist() for part in ragged] == [[3, 1], [], [7]]
    assert ragged[-1].tolist() == [7] and ragged.clients.tolist() == [0, 0, 2]
    assert ragged[0].data_ptr() == ragged.flat.data_ptr()  # a view, not a copy
    with pytest.raises(IndexError):
        ragged[3]


def shown(shares: Shares, dataset: Dataset, **options: int) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(shares.table(dataset.y, dataset.classes, **options))
    return capture.get()


def test_counts_and_table() -> None:
    digits = load("digits")
    shares = share_out(digits, "pathological:2", clients=5, seed=1)
    counts = shares.counts(digits.y, 10)
    assert counts.sum(1).tolist() == shares.train.sizes.tolist()
    assert int(counts[3, 3]) == int((digits.y[shares.train[3]] == 3).sum()) > 0
    lines = shown(shares, digits).splitlines()
    assert "5 clients, pathological:2" in lines[0]
    row = next(line.split() for line in lines if line.split()[:1] == ["3"])
    numbers = [int(shares.train.sizes[3]), int(shares.validation.sizes[3]), int(shares.test.sizes[3])]
    assert row == ["3", *map(str, numbers), *(str(int(count)) if count else "·" for count in counts[3])]


def test_long_and_wide_tables_stay_readable() -> None:
    dataset = make(3000, classes=30)
    text = shown(share_out(dataset, "dirichlet:0.5", clients=60, seed=1), dataset, limit=5)
    assert "largest class" in text and "…" in text and len(text.splitlines()) < 16


def test_names_of_classes_are_not_broken() -> None:
    dataset = make(600, classes=4)
    shares = share_out(dataset, "iid", clients=3, seed=1)
    text = shares.table(dataset.y, ("complication", "transferred", "readmitted soon", "discharged")).text(40)
    assert all(word in text.split() for word in ("complication", "transferred", "readmitted", "discharged"))
    assert max(map(len, text.splitlines())) <= 40


def test_table_of_noise_groups_and_targets() -> None:
    made = load("synthetic:task=regression", seed=1)
    assert "noise" in shown(share_out(made, "quality:0.1", clients=4, seed=1), made)
    text = shown(share_out(made, "natural", clients=30, seed=1), made)
    assert "group" in text and "class" not in text


@pytest.mark.parametrize(("clients", "bubbles"), [(12, True), (120, False)])
def test_plot(clients: int, bubbles: bool) -> None:
    dataset = make(3600, classes=10)
    shares = share_out(dataset, "dirichlet:0.5", clients=clients, seed=1)
    figure = plot(shares, dataset.y, dataset.classes)
    above, below = figure.axes[:2]
    heights = sum(container.patches[0].get_height() for container in above.containers)
    assert heights == sum(int(part.sizes[0]) for part in (shares.train, shares.validation, shares.test))
    assert bool(below.collections) == bubbles and bool(below.images) != bubbles
    if not bubbles:
        drawn = np.nan_to_num(np.asarray(below.images[0].get_array().filled(0)))  # type: ignore[union-attr]
        assert np.array_equal(drawn.T, shares.counts(dataset.y, 10).numpy())
    figure.canvas.draw()


def test_plot_of_targets_shows_sizes_alone() -> None:
    made = load("synthetic:task=regression", seed=1)
    assert len(plot(share_out(made, "iid", clients=4, seed=1), made.y).axes) == 1


def test_plot_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = make(40)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"coterie\[plots\]"):
        plot(share_out(dataset, "iid", clients=2, seed=1), dataset.y)
