"""Properties of every scheme, on random labels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coterie.data import Dataset
from coterie.data.partitions import SCHEMES, SamplePool, Shares, describe, parse, share_out
from coterie.data.partitions.dirichlet import Dirichlet, quantities
from coterie.data.partitions.label_skew import Pathological
from coterie.data.partitions.scheme import apportion
from coterie.errors import ConfigError, PartitionError, UnknownName
from coterie.randomness import stream

FEW = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])

COMPLETE = [
    "iid",
    "shards:2",
    "pathological:2",
    "pathological:2,balanced=false",
    "pathological:2,order=random",
    "dirichlet:0.5",
    "dirichlet:1,balanced=true",
    "quantity:0.5",
    "quality:0.1",
    "quality:0.1,contiguous=true",
]
PARTIAL = ["q_label:2", "hybrid", "groups:2"]
BY_LABEL = ["shards:2", "pathological:2", "pathological:2,order=random", "q_label:2", "dirichlet:0.5", "groups:2"]


def make(labels: np.ndarray, classes: int, train_count: int | None = None, owner: np.ndarray | None = None) -> Dataset:
    count = len(labels)
    return Dataset(
        name="made",
        x=torch.zeros(count, 1),
        y=torch.from_numpy(labels.astype(np.int64)),
        train_count=train_count or count,
        task="multiclass",
        classes=tuple(map(str, range(classes))),
        mean=(0.0,),
        std=(1.0,),
        owner=None if owner is None else torch.from_numpy(owner),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[Dataset, int, int]:
    """A data set of 2 to 6 unequal classes in random order, clients enough to hold two of each, and a seed."""
    classes = draw(st.integers(2, 6))
    sizes = draw(st.lists(st.integers(40, 90), min_size=classes, max_size=classes))
    clients = draw(st.integers(max(2, -(-classes // 2)), 7))
    seed = draw(st.integers(0, 2**32))
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(classes), sizes))
    return make(labels, classes), clients, seed


def parts(shares: Shares) -> list[torch.Tensor]:
    return [
        torch.cat([shares.train[client], shares.validation[client], shares.test[client]])
        for client in range(len(shares))
    ]


def class_counts(shares: Shares, dataset: Dataset) -> list[list[int]]:
    return [dataset.y[part].bincount(minlength=len(dataset.classes)).tolist() for part in parts(shares)]


@pytest.mark.parametrize("scheme", COMPLETE)
@FEW
@given(case=cases())
def test_all_samples_are_dealt_once(scheme: str, case) -> None:
    dataset, clients, seed = case
    shares = share_out(dataset, scheme, clients=clients, seed=seed)
    assert torch.cat(parts(shares)).sort().values.tolist() == list(range(len(dataset)))


@pytest.mark.parametrize("scheme", PARTIAL)
@FEW
@given(case=cases())
def test_training_samples_are_dealt_at_most_once_and_never_tested_on(scheme: str, case) -> None:
    dataset, clients, seed = case
    shares = share_out(dataset, scheme, clients=clients, seed=seed)
    trained = torch.cat([shares.train.flat, shares.validation.flat])
    assert len(trained.unique()) == len(trained)
    assert not set(trained.tolist()) & set(shares.test.flat.tolist())
    for client in range(clients):
        assert len(shares.test[client].unique()) == len(shares.test[client])


@pytest.mark.parametrize("scheme", COMPLETE + PARTIAL)
@FEW
@given(case=cases())
def test_every_client_can_train_and_be_tested(scheme: str, case) -> None:
    dataset, clients, seed = case
    shares = share_out(dataset, scheme, clients=clients, seed=seed)
    assert len(shares) == len(shares.train) == len(shares.validation) == len(shares.test) == clients
    assert int(shares.train.sizes.min()) >= 1 and int(shares.test.sizes.min()) >= 1


@pytest.mark.parametrize("scheme", COMPLETE + PARTIAL)
def test_the_seed_decides(scheme: str) -> None:
    dataset = make(np.arange(400) % 5, 5)
    first, again, other = (share_out(dataset, scheme, clients=5, seed=seed) for seed in (1, 1, 2))
    for one, two in ((first.train, again.train), (first.validation, again.validation), (first.test, again.test)):
        assert torch.equal(one.flat, two.flat) and torch.equal(one.offsets, two.offsets)
    assert first.train.flat.tolist() != other.train.flat.tolist()


@pytest.mark.parametrize("scheme", BY_LABEL)
@FEW
@given(case=cases())
def test_who_gets_how_many_of_a_class_does_not_depend_on_the_order_of_samples(scheme: str, case) -> None:
    dataset, clients, seed = case
    turned = make(dataset.y.flip(0).numpy(), len(dataset.classes))
    first, second = (share_out(one, scheme, clients=clients, seed=seed) for one in (dataset, turned))
    assert class_counts(first, dataset) == class_counts(second, turned)


@pytest.mark.parametrize("scheme", ["iid", "quality"])
@FEW
@given(case=cases())
def test_even_parts_differ_by_at_most_one(scheme: str, case) -> None:
    dataset, clients, seed = case
    sizes = [len(part) for part in parts(share_out(dataset, scheme, clients=clients, seed=seed))]
    assert max(sizes) - min(sizes) <= 1


@FEW
@given(case=cases(), per_client=st.integers(1, 2), order=st.sampled_from(["client", "random"]), balanced=st.booleans())
def test_pathological_support(case, per_client: int, order: str, balanced: bool) -> None:
    dataset, clients, seed = case
    classes = len(dataset.classes)
    scheme = Pathological(classes=per_client, order=order, balanced=balanced)
    if clients * per_client < classes:
        with pytest.raises(PartitionError, match=f"at least {-(-classes // per_client)} clients"):
            share_out(dataset, scheme, clients=clients, seed=seed)
        return
    held = np.array(class_counts(share_out(dataset, scheme, clients=clients, seed=seed), dataset)) > 0
    assert (held.sum(1) == per_client).all()
    assert set(held.sum(0)) <= {clients * per_client // classes, -(-clients * per_client // classes)}


def test_a_piece_of_random_size_is_enough_for_a_client_that_has_no_other() -> None:
    dataset = make(np.arange(80) % 2, 2)  # 40 of a class for 3 or 4 clients: pieces from 1 sample on are drawn
    sizes = [
        [len(part) for part in parts(share_out(dataset, "pathological:1,balanced=false", clients=7, seed=seed))]
        for seed in range(100)
    ]
    assert min(min(each) for each in sizes) == 2 and all(sum(each) == 80 for each in sizes)
    with pytest.raises(PartitionError, match="class '0' has 5 samples for 3 clients"):
        share_out(make(np.arange(10) % 2, 2), "pathological:1", clients=5, seed=1)


def test_pathological_in_the_paper_s_shape() -> None:
    dataset = make(np.arange(20_000) % 10, 10)
    counts = np.array(class_counts(share_out(dataset, "pathological:2", clients=100, seed=3), dataset))
    assert set(counts[counts > 0]) == {100}  # 2,000 of a class in 20 equal pieces
    assert (counts[:20, 0] > 0).all() and (counts[20:, 0] == 0).all()  # a class goes to clients in order
    emnist = make(np.arange(62 * 20) % 62, 62)
    held = np.array(class_counts(share_out(emnist, "pathological:2", clients=62, seed=3), emnist)) > 0
    assert (held.sum(0) == 2).all() and (held.sum(1) == 2).all()


def test_unbalanced_pieces_lie_in_their_range() -> None:
    dataset = make(np.arange(10_000) % 10, 10)
    shares = share_out(dataset, "pathological:2,balanced=false", clients=50, seed=1)
    counts = np.array(class_counts(shares, dataset))
    for label in range(10):  # 1,000 samples for 10 clients: 100 each
        pieces = counts[:, label][counts[:, label] > 0]
        assert len(pieces) == 10 and (pieces[:-1] >= 10).all() and (pieces[:-1] < 100).all()
        assert pieces[-1] == 1000 - pieces[:-1].sum()
    assert len(set(counts[counts > 0])) > 20


def test_random_order_makes_other_pairs_than_client_order() -> None:
    dataset = make(np.arange(4000) % 10, 10)
    shares = share_out(dataset, "pathological:2,order=random", clients=40, seed=1)
    held = np.array(class_counts(shares, dataset)) > 0
    assert len({tuple(row) for row in held}) > 5  # in client order there are 5 pairs


def test_shards_that_fit_the_classes_hold_one_class_each() -> None:
    dataset = make(np.arange(1200) % 6, 6)
    held = np.array(class_counts(share_out(dataset, "shards:2", clients=12, seed=1), dataset)) > 0
    assert (held.sum(1) <= 2).all() and held.sum() > 12


def pairs_of_classes(scheme: str, seeds: int) -> np.ndarray:
    """How many of ``seeds`` times 100 clients hold each pair of ten equal classes: the diagonal is one class twice."""
    dataset, found = make(np.arange(2000) % 10, 10), np.zeros((10, 10))
    for seed in range(seeds):
        for counts in class_counts(share_out(dataset, scheme, clients=100, seed=seed, test_fraction=0.5), dataset):
            held = np.flatnonzero(counts)
            found[held[0], held[-1]] += 1
    return found


def test_shards_make_the_two_classes_of_a_client_independent() -> None:
    """Two of 200 shards, twenty of each class: two are of one class with 19/199, else of any pair alike."""
    seeds = 40
    found = pairs_of_classes("shards:2", seeds)
    upper = np.triu_indices(10, 1)
    expected = np.concatenate([np.full(45, 2 * 0.1 * 20 / 199), np.full(10, 0.1 * 19 / 199)]) * 100 * seeds
    assert expected.sum() == pytest.approx(100 * seeds)
    counts = np.concatenate([found[upper], np.diag(found)])
    # Chi squared with 54 degrees of freedom, mean 54 and deviation 10.4; fewer than free draws, without replacement.
    assert ((counts - expected) ** 2 / expected).sum() < 54 + 5 * 10.4
    # In client order there are five pairs and no other, each for a group of twenty identical clients.
    grouped = pairs_of_classes("pathological:2", 2)
    assert np.count_nonzero(grouped) == 5 and set(grouped[grouped > 0]) == {2 * 20}


@FEW
@given(case=cases(), q=st.integers(1, 3))
def test_q_label_pieces(case, q: int) -> None:
    dataset, clients, seed = case
    counts = np.array(class_counts(share_out(dataset, f"q_label:{q}", clients=clients, seed=seed), dataset))
    assert ((counts > 0).sum(1) <= q).all()
    pieces = -(-q * clients // len(dataset.classes))
    dropped = len(dataset.classes) * pieces - q * clients
    largest = dataset.y.bincount().max().item() // pieces + 1
    assert len(dataset) - counts.sum() <= dropped * largest


def test_q_label_drops_nothing_when_pieces_come_out_even() -> None:
    dataset = make(np.arange(1000) % 10, 10)
    assert np.sum(class_counts(share_out(dataset, "q_label:2", clients=10, seed=1), dataset)) == 1000


def test_dirichlet_shares_have_the_law_s_variance() -> None:
    clients, beta, classes, each = 5, 0.5, 400, 500
    pool = SamplePool("made", np.repeat(np.arange(classes), each), tuple(map(str, range(classes))), classes * each, 0.2)
    dealt = Dirichlet(beta=beta).assign(pool, clients, 1).parts
    shares = np.stack([np.bincount(part // each, minlength=classes) / each for part in dealt])
    assert shares.mean(1) == pytest.approx(1 / clients, abs=0.05)
    # Var p_i = (1/m)(1 - 1/m)/(m beta + 1); 2,000 shares estimate it to a few per cent.
    assert shares.var() == pytest.approx((1 / clients) * (1 - 1 / clients) / (clients * beta + 1), rel=0.15)


def test_dirichlet_of_large_beta_is_an_equal_split() -> None:
    dataset = make(np.arange(1000) % 4, 4)
    counts = np.array(class_counts(share_out(dataset, "dirichlet:1e9", clients=7, seed=1), dataset))
    assert np.abs(counts - 250 / 7).max() < 1.1


@FEW
@given(case=cases(), part=st.integers(3, 8))
def test_dirichlet_draws_until_every_client_has_enough(case, part: int) -> None:
    dataset, clients, seed = case
    least = max(2, len(dataset) // (part * clients))  # close to an equal share there may be no such draw
    for shares in (
        share_out(dataset, f"dirichlet:0.5,min_samples={least}", clients=clients, seed=seed),
        share_out(dataset, "dirichlet:0.5", clients=clients, seed=seed, min_samples=least),
    ):
        assert min(len(part) for part in parts(shares)) >= least


@FEW
@given(case=cases())
def test_balanced_dirichlet_gives_no_more_to_who_has_an_equal_share(case) -> None:
    dataset, clients, seed = case
    sizes = [len(part) for part in parts(share_out(dataset, "dirichlet:0.3,balanced=true", clients=clients, seed=seed))]
    # Whoever got a sample of a class was below an equal share before that class.
    assert max(sizes) < len(dataset) / clients + int(dataset.y.bincount().max())
    assert min(sizes) >= min(len(dataset.classes), len(dataset) // (4 * clients))


def test_dirichlet_that_cannot_be_says_why() -> None:
    dataset = make(np.arange(200) % 2, 2)
    with pytest.raises(PartitionError, match=r"client \d+ had \d+\); use a larger beta, fewer clients, or balanced"):
        share_out(dataset, "dirichlet:0.02", clients=20, seed=1)
    with pytest.raises(PartitionError, match=r"fewer than 9 samples .* a smaller min_samples"):
        share_out(dataset, "dirichlet:0.5,min_samples=9", clients=20, seed=1)
    with pytest.raises(PartitionError, match="20 clients cannot have 11 of 200 samples each"):
        share_out(dataset, "dirichlet:0.5,min_samples=11", clients=20, seed=1)


def test_dirichlet_takes_the_best_draw_when_nobody_asked_for_more() -> None:
    dataset = make(np.arange(2000) % 2, 2)
    sizes = [len(part) for part in parts(share_out(dataset, "dirichlet:0.3", clients=40, seed=1))]
    assert 2 <= min(sizes) < 10  # ten each are as good as impossible here: size i is about Gamma(0.6) of mean 50


@pytest.mark.parametrize("scheme", ["dirichlet:0.5,overlap=true", "quantity:0.5,overlap=true"])
def test_overlapping_clients_share_samples_but_hold_none_twice(scheme: str) -> None:
    dataset = make(np.arange(1000) % 4, 4)
    dealt = parts(share_out(dataset, scheme, clients=6, seed=1))
    assert all(len(part.unique()) == len(part) for part in dealt)
    assert len(torch.cat(dealt).unique()) < len(torch.cat(dealt))
    apart = parts(share_out(dataset, scheme.replace("true", "false"), clients=6, seed=1))
    assert [len(part) for part in dealt] == [len(part) for part in apart]


@FEW
@given(
    total=st.integers(50, 5000), clients=st.integers(1, 20), beta=st.floats(0.05, 5), seed=st.integers(0, 2**32),
    fill=st.floats(0, 1),
)  # fmt: skip
def test_quantities_are_shares_with_a_floor(total: int, clients: int, beta: float, seed: int, fill: float) -> None:
    least = int(fill * total / clients)
    sizes = quantities(total, clients, beta, least, stream(seed, "test"))
    assert sizes.sum() == total and sizes.min() >= least
    # The sizes max(least, t p_i) that sum to the total, with t by bisection.
    shares = stream(seed, "test").dirichlet(np.full(clients, beta))
    low, high = 0.0, 1e12
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if np.maximum(least, middle * shares).sum() < total else (low, middle)
    if low < 1e11:  # otherwise the shares of all others have underflown
        assert np.abs(sizes - np.maximum(least, low * shares)).max() <= 1 + 1e-6


@FEW
@given(shares=st.lists(st.floats(0, 1), min_size=1, max_size=12), total=st.integers(0, 10_000))
def test_apportioned_numbers_sum_up_and_are_near_their_share(shares: list[float], total: int) -> None:
    weights = np.array(shares) + 1e-9
    sizes = apportion(weights / weights.sum(), total)
    assert sizes.sum() == total and sizes.min() >= 0
    assert np.abs(sizes - total * weights / weights.sum()).max() <= 1 + 1e-6


def test_quality_noise_grows_with_the_client() -> None:
    dataset = make(np.arange(100) % 2, 2)
    level = np.arange(5) * 0.2 / 5
    as_run = share_out(dataset, "quality:0.2", clients=5, seed=1)
    assert as_run.noise is not None and not as_run.redraw_noise
    assert as_run.noise.numpy() == pytest.approx(level)
    as_printed = share_out(dataset, "quality:0.2,variance=true,redraw=true", clients=5, seed=1)
    assert as_printed.noise is not None and as_printed.redraw_noise
    assert as_printed.noise.numpy() == pytest.approx(np.sqrt(level))
    assert share_out(dataset, "iid", clients=5, seed=1).noise is None


def test_contiguous_parts_keep_the_stored_order() -> None:
    dataset = make(np.arange(100) // 20, 5)
    sliced = share_out(dataset, "quality:0.1,contiguous=true", clients=5, seed=1)
    assert [sorted(part.tolist()) for part in parts(sliced)] == [list(range(20 * i, 20 * i + 20)) for i in range(5)]


def test_natural_clients_are_whole_owners_in_order() -> None:
    owner = np.random.default_rng(0).permutation(np.repeat(np.arange(7), 10))
    dataset = make(np.arange(70) % 2, 2, owner=owner)
    each = parts(share_out(dataset, "natural", clients=7, seed=1))
    assert [set(owner[part]) for part in each] == [{client} for client in range(7)]
    # Two owners a client; the seventh is left out, as was asked for.
    pairs = parts(share_out(dataset, "natural:2", clients=3, seed=1))
    assert [set(owner[part]) for part in pairs] == [{0, 1}, {2, 3}, {4, 5}]
    single = parts(share_out(dataset, "natural:1", clients=3, seed=1))
    assert [set(owner[part]) for part in single] == [{0}, {1}, {2}]


def test_natural_leaves_small_owners_out() -> None:
    owner = np.repeat(np.arange(4), [10, 1, 10, 10])
    dataset = make(np.arange(31) % 2, 2, owner=owner)
    kept = parts(share_out(dataset, "natural:least=5", clients=3, seed=1))
    assert [set(owner[part]) for part in kept] == [{0}, {2}, {3}]
    with pytest.raises(PartitionError, match="client 1 would have 1 samples"):
        share_out(dataset, "natural", clients=4, seed=1)


def test_natural_refusals() -> None:
    labels = np.arange(40) % 2
    with pytest.raises(PartitionError, match="does not say whose"):
        share_out(make(labels, 2), "natural", clients=2, seed=1)
    owned = make(labels, 2, owner=np.arange(40) % 4)
    with pytest.raises(PartitionError, match="4 natural clients, which is too few for 5 clients; use at most 4"):
        share_out(owned, "natural", clients=5, seed=1)
    with pytest.raises(PartitionError, match="too few for 2 clients of 3 each; use at most 1"):
        share_out(owned, "natural:3", clients=2, seed=1)
    with pytest.raises(PartitionError, match=r"has 4 natural clients, but clients is 3; .*merge=true"):
        share_out(owned, "natural", clients=3, seed=1)
    with pytest.raises(PartitionError, match="owners and merge contradict"):
        share_out(owned, "natural:2,merge=true", clients=2, seed=1)


def test_merging_leaves_no_owner_out_and_joins_names() -> None:
    owner = np.arange(70) % 7
    dataset = replace(make(np.arange(70) % 2, 2, owner=owner), owner_names=tuple("abcdefg"))
    merged = share_out(dataset, "natural:merge=true", clients=3, seed=1)
    # 7 = 3 + 2 + 2 neighbours, and all 70 samples are dealt out.
    assert [set(owner[part]) for part in parts(merged)] == [{0, 1, 2}, {3, 4}, {5, 6}]
    assert sum(len(part) for part in parts(merged)) == 70
    assert merged.names == ("a + b + c", "d + e", "f + g")
    assert share_out(dataset, "iid", clients=3, seed=1).names == ()


@FEW
@given(case=cases())
def test_hybrid_halves_share_no_reserve(case) -> None:
    dataset, clients, seed = case
    counts = np.array(class_counts(share_out(dataset, "hybrid:q=1", clients=clients, seed=seed), dataset))
    first = -(-clients // 2)
    totals = dataset.y.bincount().numpy()
    assert ((counts[:first] > 0).sum(1) == 1).all()
    assert (counts[:first].sum(0) <= -(-totals // 2)).all()
    assert (counts[first:].sum(0) == totals // 2).all()  # the second half deals all that is reserved for it


def test_hybrid_in_the_paper_s_shape_owns_two_whole_classes() -> None:
    dataset = make(np.arange(4000) % 10, 10)
    counts = np.array(class_counts(share_out(dataset, "hybrid", clients=10, seed=1), dataset))[:5]
    assert set(counts[counts > 0]) <= {200} and counts.sum() == 2000


def test_hybrid_needs_two_clients() -> None:
    with pytest.raises(PartitionError, match="at least 2 clients"):
        share_out(make(np.arange(40) % 2, 2), "hybrid", clients=1, seed=1)


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_one_client_gets_data_or_a_reason(name: str) -> None:
    dataset = make(np.arange(60) % 2, 2, owner=np.zeros(60, dtype=np.int64))
    try:
        shares = share_out(dataset, name, clients=1, seed=1)
    except PartitionError as error:
        assert "use" in str(error)
    else:
        assert len(shares.train[0]) > len(shares.test[0]) > 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dirichlet:-1", "beta is '-1'"),
        ("dirichlet:0.5,alpha=1", "no parameter 'alpha'"),
        ("pathological:0", "classes is '0'"),
        ("pathological:2,order=any", "client or random"),
        ("quality:0", "sigma"),
        ("groups:1", "groups is '1'"),
        ("groups:dominating=1.5", "dominating"),
        ("iid:3", "key=value"),
        ("shards:x", "per_client is 'x'"),
    ],
)
def test_wrong_parameters(text: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse(text)


def test_unknown_scheme() -> None:
    with pytest.raises(UnknownName, match="did you mean 'dirichlet'"):
        parse("dirichlett:0.5")


@pytest.mark.parametrize("text", [*COMPLETE, *PARTIAL, "natural:2", "groups:3,members=1+2+3,train=9+8+7"])
def test_text_reads_back(text: str) -> None:
    assert parse(parse(text).text()) == parse(text)


def test_every_scheme_is_described() -> None:
    described = describe()
    assert [info.name for info in described] == list(SCHEMES)
    assert len(SCHEMES) == 10
    for info in described:
        assert info.doc and info.citation and all(parameter.doc for parameter in info.parameters)


@pytest.mark.parametrize("name", [name for name, scheme in SCHEMES.items() if scheme.by_label])
def test_label_schemes_refuse_regression(name: str) -> None:
    dataset = Dataset("targets", torch.zeros(50, 1), torch.zeros(50), 50, "regression", (), (0.0,), (1.0,))
    with pytest.raises(PartitionError, match="regression task without any: use iid, quantity, quality or natural"):
        share_out(dataset, name, clients=2, seed=1)


@pytest.mark.parametrize("name", ["iid", "quantity", "quality"])
def test_other_schemes_take_regression(name: str) -> None:
    dataset = Dataset("targets", torch.zeros(50, 1), torch.zeros(50), 50, "regression", (), (0.0,), (1.0,))
    assert len(torch.cat(parts(share_out(dataset, name, clients=3, seed=1))).unique()) == 50
