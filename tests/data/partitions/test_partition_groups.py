from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.data import Dataset, load
from coterie.data.partitions import Shares, share_out
from coterie.errors import PartitionError


def make(name: str, train: list[int], test: list[int], superclasses: tuple[int, ...] = ()) -> Dataset:
    """So many training and test samples of each class, training samples first."""
    classes = range(len(train))
    labels = np.concatenate([np.repeat(classes, train), np.repeat(classes, test)]).astype(np.int64)
    names = tuple(map(str, classes))
    x = torch.zeros(len(labels), 1, dtype=torch.uint8)
    return Dataset(
        name, x, torch.from_numpy(labels), sum(train), "multiclass", names, (0.0,), (1.0,), superclasses=superclasses
    )


def law(shares: Shares, dataset: Dataset) -> tuple[np.ndarray, np.ndarray]:
    """Class counts of each client's training (with validation) and test samples."""
    rows = []
    for client in range(len(shares)):
        trained = torch.cat([shares.train[client], shares.validation[client]])
        rows.append(
            [dataset.y[part].bincount(minlength=len(dataset.classes)) for part in (trained, shares.test[client])]
        )
    return np.array([row[0].numpy() for row in rows]), np.array([row[1].numpy() for row in rows])


def test_emnist_has_the_paper_s_numbers() -> None:
    families = (0,) * 10 + (1,) * 26 + (2,) * 26
    dataset = make("emnist", [1900] * 62, [300] * 62, families)
    shares = share_out(dataset, "groups", clients=62, seed=1)
    train, test = law(shares, dataset)
    assert train.sum() == 38_600 and test.sum() == 6_200
    assert train.sum(1).tolist() == [1000] * 10 + [700] * 26 + [400] * 26
    assert shares.groups is not None and shares.groups.tolist() == [0] * 10 + [1] * 26 + [2] * 26
    dominating = [range(10), range(10, 36), range(36, 62)]
    for client, group in enumerate(shares.groups.tolist()):
        inside = train[client, dominating[group]]
        assert inside.sum() == 0.8 * train[client].sum() and inside.max() - inside.min() <= 1
        outside = np.delete(train[client], dominating[group])
        assert outside.max() - outside.min() <= 1
        assert test[client].sum() == 100 and test[client, dominating[group]].sum() == 80


def test_emnist_with_options_is_other_data() -> None:
    small = make("emnist:split=digits", [200] * 10, [50] * 10)
    assert "1000" not in share_out(small, "groups", clients=62, seed=1).scheme


@pytest.mark.parametrize("name", ["mnist", "fashion_mnist:norm=own"])
def test_mnist_has_the_given_numbers_and_they_fit_its_rarest_class(name: str) -> None:
    # The official counts of MNIST's classes; the rarest has 5,421 training samples.
    train = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    test = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    dataset = make(name, train, test)
    shares = share_out(dataset, "groups", clients=100, seed=1)
    counts, tested = law(shares, dataset)
    assert counts.sum(1).tolist() == [size for size in (500, 450, 400, 350, 300) for _ in range(20)]
    # 20*500*0.8/2 of its own group and 20*(450+400+350+300)*0.2/8 of the others
    assert counts[:, :2].sum(0) == pytest.approx([4750, 4750], abs=40)
    assert (tested.sum(1) == 100).all()
    assert (counts[:20, :2] == 200).all()


def test_cifar100_groups_are_families_of_classes() -> None:
    families = tuple(int(family) for family in np.random.default_rng(0).permutation(np.repeat(np.arange(20), 5)))
    dataset = make("cifar100", [500] * 100, [100] * 100, families)
    shares = share_out(dataset, "groups", clients=100, seed=1)
    counts, _ = law(shares, dataset)
    assert (counts.sum(0) <= 500).all()
    for group in range(5):
        mine = np.isin(families, range(4 * group, 4 * group + 4))
        assert mine.sum() == 20
        assert (counts[20 * group, mine].sum(), counts[20 * group].sum()) == (
            0.8 * counts[20 * group].sum(),
            [500, 450, 400, 350, 300][group],
        )


def test_other_classes_are_drawn_uniformly_even_where_room_differs() -> None:
    dataset = make("cifar100", [500] * 100, [100] * 100, tuple(range(20)) * 5)
    counts, _ = law(share_out(dataset, "groups", clients=100, seed=1), dataset)
    others = counts[80:, (np.arange(100) % 20) < 16]  # the last group's samples of the other groups' classes
    # 60 of 80 classes in each of 20 clients: 15 on average with deviation 2; none may be left out systematically.
    assert others.sum(0).min() >= 6 and others.sum() == 20 * 60


@settings(max_examples=30, deadline=None)
@given(
    train=st.lists(st.integers(30, 120), min_size=3, max_size=8),
    clients=st.integers(2, 9),
    groups=st.integers(2, 3),
    seed=st.integers(0, 2**32),
)
def test_scaled_groups_use_what_there_is(train: list[int], clients: int, groups: int, seed: int) -> None:
    groups = min(groups, clients)
    dataset = make("own", train, [20] * len(train))
    shares = share_out(dataset, f"groups:{groups}", clients=clients, seed=seed)
    counts, tested = law(shares, dataset)
    assert shares.groups is not None
    known = shares.groups.numpy()
    assert (np.diff(known) >= 0).all() and len(np.unique(known)) == groups
    assert (counts.sum(0) <= train).all()
    # Some class is nearly used up: its demand would exceed it if every client had two samples a class more.
    assert (counts.sum(0) + 2 * clients + 0.05 * np.array(train) >= train).any()
    for client, group in enumerate(known):
        mine = np.array_split(np.arange(len(train)), groups)[group]
        assert counts[client, mine].sum() == round(0.8 * counts[client].sum())
        assert tested[client, mine].sum() == round(0.8 * tested[client].sum())
    sizes = counts.sum(1)
    assert all(len(set(sizes[known == group])) == 1 for group in range(groups))


def test_the_text_that_was_applied_deals_the_same_again() -> None:
    digits = load("digits")
    scaled = share_out(digits, "groups", clients=10, seed=4)
    assert scaled.scheme != "groups"
    again = share_out(digits, scaled.scheme, clients=10, seed=4)
    assert torch.equal(scaled.train.flat, again.train.flat) and torch.equal(scaled.test.flat, again.test.flat)
    assert again.scheme == scaled.scheme


def test_without_a_test_set_the_pools_are_split_first() -> None:
    digits = load("digits")
    shares = share_out(digits, "groups", clients=10, seed=4)
    trained = set(shares.train.flat.tolist()) | set(shares.validation.flat.tolist())
    assert not trained & set(shares.test.flat.tolist())


def test_with_a_test_set_training_samples_come_from_the_training_set() -> None:
    dataset = make("own", [60] * 4, [30] * 4)
    shares = share_out(dataset, "groups:2", clients=4, seed=1)
    assert int(shares.train.flat.max()) < 240 <= int(shares.test.flat.min())


@pytest.mark.parametrize(
    ("scheme", "clients", "words"),
    [
        ("groups:5", 3, "do not make 5 groups; use at most 3"),
        ("groups:5", 9, "do not make 5 groups; use at most 4"),
        ("groups:members=2+2", 5, "members sum to 4, but there are 5 clients"),
        ("groups:3,members=2+3", 5, "groups is 3, but members has 2"),
        ("groups:2,train=10", 4, "train has 1 sizes for 2 groups"),
        ("groups:2,train=200+10", 4, r"class '\d' has 60 training samples in 'own', but the groups need"),
        ("groups:2,train=10+10,test=90", 4, "needs 36 test samples of class '0', of which there are 30"),
        ("groups", 1, "at least 2 clients"),
    ],
)
def test_refusals(scheme: str, clients: int, words: str) -> None:
    with pytest.raises(PartitionError, match=words):
        share_out(make("own", [60] * 4, [30] * 4), scheme, clients=clients, seed=1)


def test_a_class_too_rare_for_the_clients_is_refused() -> None:
    with pytest.raises(PartitionError, match="has 1 training samples, too few for 20 clients; use fewer clients"):
        share_out(make("own", [60, 60, 60, 1], [30] * 4), "groups", clients=20, seed=1)


def test_synthetic_clients_keep_their_groups() -> None:
    made = load("synthetic", seed=1)
    shares = share_out(made, "natural", clients=30, seed=1)
    assert shares.groups is not None and made.groups is not None
    assert torch.equal(shares.groups, made.groups)
    assert share_out(made, "natural:7", clients=4, seed=1).groups is None  # 7 owners a client mix groups
