"""Attacks: who, what and how strongly; and nothing at all at fraction 0."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from coterie.errors import ConfigError, UnknownName
from coterie.simulation import attacks
from coterie.simulation.attacks import Gaussian, LabelPoisoning, SameValue, SignFlip, choose_attackers, parse

MESSAGES = [SameValue(fraction=0.2), SignFlip(fraction=0.2), Gaussian(fraction=0.2)]


def replies(clients: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = np.random.default_rng(clients)
    return {
        "model": torch.from_numpy(generator.normal(size=(clients, 50))).to(dtype),
        "loss": torch.from_numpy(generator.random(clients)).to(dtype),
        "head": torch.from_numpy(generator.normal(size=(clients, 3, 4))).to(dtype),
        "samples": torch.arange(clients) * 10,
        "seen": torch.arange(clients) % 2 == 0,
    }


def same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.dtype == second.dtype and first.numpy().tobytes() == second.numpy().tobytes()


def run(attack, rows, clients, mask, round_number=3, exchange=0):
    return attack.apply(rows, clients, mask, seed=1, round_number=round_number, exchange=exchange)


@pytest.mark.parametrize("attack", MESSAGES, ids=lambda a: a.kind)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_only_attackers_and_only_fractions(attack, dtype):
    rows, clients = replies(6, dtype), torch.tensor([3, 4, 8, 9, 20, 21])
    before = {name: value.clone() for name, value in rows.items()}
    mask = torch.tensor([False, True, False, False, True, False])
    out = run(attack, rows, clients, mask)
    assert list(out) == list(rows)
    for name, value in rows.items():
        assert same_bits(value, before[name])  # inputs are left as they are
        assert same_bits(out[name][~mask], value[~mask])
        assert out[name].shape == value.shape
        changed = not same_bits(out[name][mask], value[mask])
        assert changed == value.is_floating_point()


@pytest.mark.parametrize("attack", MESSAGES, ids=lambda a: a.kind)
def test_nothing_changes_without_attackers(attack):
    rows = replies(4)
    out = run(attack, rows, torch.arange(4), torch.zeros(4, dtype=torch.bool))
    assert out is not rows
    assert all(same_bits(out[name], value) for name, value in rows.items())


@pytest.mark.parametrize("attack", MESSAGES, ids=lambda a: a.kind)
@given(order=st.permutations(range(7)), cut=st.integers(1, 6))
@settings(max_examples=10, deadline=None)
def test_results_do_not_depend_on_order_or_chunks(attack, order, cut):
    rows, clients = replies(7), torch.tensor([5, 2, 9, 30, 11, 0, 7])
    mask = torch.tensor([True, True, False, True, True, False, True])
    whole = run(attack, rows, clients, mask)
    index = torch.tensor(order)
    for part in (index[:cut], index[cut:]):
        out = run(attack, {name: value[part] for name, value in rows.items()}, clients[part], mask[part])
        assert all(same_bits(out[name], whole[name][part]) for name in rows)
    backwards = run(attack, dict(reversed(rows.items())), clients, mask)
    assert all(same_bits(backwards[name], whole[name]) for name in rows)


@pytest.mark.parametrize("attack", MESSAGES, ids=lambda a: a.kind)
def test_drawn_anew_each_round_exchange_client_and_seed(attack):
    rows, clients = {"model": torch.ones(2, 5)}, torch.tensor([1, 2])
    mask = torch.ones(2, dtype=torch.bool)
    first = run(attack, rows, clients, mask)["model"]
    assert same_bits(first, run(attack, rows, clients, mask)["model"])
    assert not same_bits(first[0], first[1])
    assert not same_bits(first, run(attack, rows, clients, mask, round_number=4)["model"])
    assert not same_bits(first, run(attack, rows, clients, mask, exchange=1)["model"])
    other_seed = attack.apply(rows, clients, mask, seed=2, round_number=3)["model"]
    assert not same_bits(first, other_seed)


def test_same_value_is_one_number_for_the_whole_reply():
    rows = replies(3, torch.float64)
    out = run(SameValue(fraction=0.5), rows, torch.arange(3), torch.tensor([True, False, True]))
    for client in (0, 2):
        value = out["loss"][client]
        assert bool((out["model"][client] == value).all())
        assert bool((out["head"][client] == value).all())


def test_sign_flip_turns_and_scales_by_one_factor():
    rows = replies(3, torch.float64)
    out = run(SignFlip(fraction=0.5), rows, torch.arange(3), torch.tensor([False, True, True]))
    for client in (1, 2):
        factor = float(out["loss"][client] / rows["loss"][client])
        assert factor < 0
        for name in ("model", "head"):
            torch.testing.assert_close(out[name][client], factor * rows[name][client], rtol=1e-13, atol=0)


def test_gaussian_draws_each_tensor_apart():
    rows = {name: torch.zeros(1, 8) for name in ("first", "second")}
    out = run(Gaussian(fraction=0.5), rows, torch.tensor([4]), torch.tensor([True]))
    assert not bool((out["first"] == out["second"]).any())


@pytest.mark.parametrize("variance", [0.1, 4.0])
@pytest.mark.parametrize("kind", [SameValue, SignFlip, Gaussian])
def test_strength_is_the_variance(kind, variance):
    clients = 4000
    attack = kind(fraction=0.5, variance=variance)
    rows = {"model": torch.full((clients, 2), -1.0, dtype=torch.float64)}
    drawn = run(attack, rows, torch.arange(clients), torch.ones(clients, dtype=torch.bool))["model"]
    independent = drawn.flatten() if kind is Gaussian else drawn[:, 0]
    # E p^2 = variance for all three; its sample mean has relative deviation sqrt(2 / n), here below 2.3%.
    assert float(independent.square().mean()) == pytest.approx(variance, rel=0.11)
    # SignFlip of -1 is |p|, whose mean is sqrt(2 variance / pi); the others have mean 0.
    wanted = math.sqrt(2 * variance / math.pi) if kind is SignFlip else 0.0
    assert float(independent.mean()) == pytest.approx(wanted, abs=5 * math.sqrt(variance / clients))


def test_gaussian_is_the_same_in_small_blocks(monkeypatch):
    rows, clients, mask = replies(5), torch.arange(5), torch.ones(5, dtype=torch.bool)
    whole = run(Gaussian(fraction=0.5), rows, clients, mask)
    monkeypatch.setattr(attacks, "_BLOCK_ELEMENTS", 60)
    assert all(same_bits(run(Gaussian(fraction=0.5), rows, clients, mask)[name], whole[name]) for name in rows)


@given(st.integers(2, 8), st.integers(0, 60), st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_label_poisoning(classes, count, seed):
    generator = np.random.default_rng(count)
    labels = torch.from_numpy(generator.integers(classes, size=80))
    before, index = labels.clone(), torch.from_numpy(generator.permutation(80)[:count])
    poison = LabelPoisoning(fraction=0.2).poison
    out = poison(labels, index, classes, seed)
    assert torch.equal(labels, before)
    rest = torch.ones(80, dtype=torch.bool)
    rest[index] = False
    assert torch.equal(out[rest], labels[rest])
    assert bool(((out >= 0) & (out < classes)).all())
    assert torch.equal(out, poison(labels, index.flip(0), classes, seed))  # drawn by sample, in any order
    halves = poison(poison(labels, index[: count // 2], classes, seed), index[count // 2 :], classes, seed)
    assert torch.equal(out, halves)
    as_numpy = poison(labels.numpy(), index.numpy(), classes, seed)
    assert isinstance(as_numpy, np.ndarray)
    assert as_numpy.tolist() == out.tolist()


def test_poisoned_labels_are_uniform_over_all_classes():
    out = LabelPoisoning.draw(torch.arange(12_000), 6, seed=3)
    counts = torch.bincount(out, minlength=6)
    # chi-squared with 5 degrees of freedom: above 30 with chance 1.5e-5
    assert len(counts) == 6
    assert float(((counts - 2000.0) ** 2 / 2000).sum()) < 30
    assert not torch.equal(out, LabelPoisoning.draw(torch.arange(12_000), 6, seed=4))


def test_label_poisoning_needs_classes():
    with pytest.raises(ConfigError, match="at least two classes, not 1"):
        LabelPoisoning.draw(torch.arange(3), 1, seed=0)


@pytest.mark.parametrize(
    ("clients", "fraction", "count"), [(50, 0.0, 0), (50, 0.2, 10), (50, 0.5, 25), (50, 0.8, 40), (10, 0.1, 1)]
)
def test_attackers_are_as_many_as_asked(clients, fraction, count):
    chosen = choose_attackers(clients, fraction, seed=1)
    assert len(chosen) == count
    assert list(chosen) == sorted(set(chosen))
    assert all(0 <= client < clients for client in chosen)
    assert chosen == choose_attackers(clients, fraction, seed=1)


def test_fraction_29_of_100_is_29():
    assert 0.29 * 100 < 29  # truncation would lose one
    assert len(choose_attackers(100, 0.29, seed=0)) == 29


@given(st.integers(5, 60), st.sampled_from([0.0, 0.2, 0.3]), st.sampled_from([0.4, 0.5, 0.8]), st.integers(0, 9))
def test_more_attackers_include_the_fewer(clients, small, large, seed):
    assert set(choose_attackers(clients, small, seed)) <= set(choose_attackers(clients, large, seed))


def test_attackers_differ_by_seed():
    assert len({choose_attackers(50, 0.2, seed) for seed in range(10)}) == 10


@pytest.mark.parametrize(("clients", "fraction"), [(10, 1.0), (10, -0.1), (10, math.nan), (10, 0.01), (10, 0.99)])
def test_fractions_that_cannot_be(clients, fraction):
    with pytest.raises(ConfigError, match=r"fraction of|attackers"):
        choose_attackers(clients, fraction, seed=0)


@pytest.mark.parametrize(
    ("text", "attack"),
    [
        ("gaussian:0.2", Gaussian(fraction=0.2, variance=0.1)),
        ("gaussian:0", Gaussian(fraction=0.0)),
        ("sign_flip:0.5,variance=2", SignFlip(fraction=0.5, variance=2.0)),
        ("same_value: 0.8 , variance = 0.3", SameValue(fraction=0.8, variance=0.3)),
        ("label_poisoning:0.2", LabelPoisoning(fraction=0.2)),
        ("gaussian:0.2,preset=paper", Gaussian(fraction=0.2, variance=0.1)),
        ("gaussian:0.2,preset=code", Gaussian(fraction=0.2, variance=1.0)),
        ("sign_flip:0.2,preset=code", SignFlip(fraction=0.2, variance=1.0)),
        ("same_value:0.2,preset=code", SameValue(fraction=0.2, variance=1e-4)),
    ],
)
def test_parse(text, attack):
    assert parse(text) == attack


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gaussian", "does not say which fraction"),
        ("gaussian:", "does not say which fraction"),
        ("gaussian:many", "fraction='many'"),
        ("gaussian:1.0", "less than 1"),
        ("gaussian:-0.1", "greater than or equal to 0"),
        ("gaussian:nan", "fraction='nan'"),
        ("gaussian:0.2,variance=0", "variance='0'"),
        ("gaussian:0.2,variance", "must be key=value"),
        ("gaussian:0.2,variance=1,variance=2", "each key once"),
        ("gaussian:0.2,fraction=0.3", "each key once"),
        ("gaussian:0.2,power=3", "power='3'"),
        ("gaussian:0.2,preset=mine", "preset must be paper or code"),
        ("gaussian:0.2,preset=code,variance=1", "in the place of variance"),
        ("label_poisoning:0.2,variance=1", "variance='1'"),
        ("label_poisoning:0.2,preset=code", "preset='code'"),
    ],
)
def test_parse_refuses_in_one_sentence(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        parse(text)
    assert "\n" not in str(caught.value)


def test_unknown_attack_says_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'gaussian'"):
        parse("gausian:0.2")


def test_frozen_and_described():
    with pytest.raises(ValidationError, match="frozen"):
        Gaussian(fraction=0.2).fraction = 0.3
    described = {entry.name: entry for entry in attacks.describe()}
    assert tuple(described) == attacks.names() == ("same_value", "sign_flip", "gaussian", "label_poisoning")
    assert described["gaussian"].options == {"variance": 0.1}
    assert described["label_poisoning"].options == {}
