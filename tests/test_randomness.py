"""The one source of random numbers."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from coterie.randomness import bits, fold_in, keys, lanes, normal, permutations, stream, torch_stream, uniform

# Seeds are fixed, so a test passes always or never; a sound source fails one of these bounds with this probability.
CHANCE = 1e-6


def assert_uniform(counts: Tensor | np.ndarray[Any, Any]) -> None:
    """Pearson's chi-square test that all cells are equally likely, at both ends."""
    observed = np.asarray(counts, dtype=np.float64).ravel()
    expected = observed.sum() / len(observed)
    assert expected >= 10, "too few draws for the chi-square approximation"
    statistic = ((observed - expected) ** 2 / expected).sum()
    law = scipy.stats.chi2(len(observed) - 1)
    assert law.ppf(CHANCE) <= statistic <= law.isf(CHANCE)


def clients(count: int) -> Tensor:
    return torch.arange(count)


# Host streams


@pytest.mark.parametrize("other", [(2, "a", 3, 4), (1, "b", 3, 4), (1, "a", 4, 4), (1, "a", 3, 5), (1, "a", 34, 0)])
def test_streams_depend_on_each_of_the_four_values(other: tuple[int, str, int, int]) -> None:
    mine = stream(1, "a", 3, 4).random(50)
    np.testing.assert_array_equal(mine, stream(1, "a", 3, 4).random(50))
    theirs = stream(*other).random(50)
    assert not np.isin(mine, theirs).any()
    assert abs(np.corrcoef(mine, theirs)[0, 1]) < 5 / 50**0.5


def test_streams_do_not_depend_on_the_order_of_calls() -> None:
    one, two = stream(1, "first"), stream(1, "second")
    mixed = [(one.random(), two.random()) for _ in range(5)]
    alone = stream(1, "second").random(5).tolist(), stream(1, "first").random(5).tolist()
    assert [a for a, _ in mixed] == alone[1] and [b for _, b in mixed] == alone[0]


def test_values_that_read_alike_are_different_streams() -> None:
    drawn = {stream(*arguments).integers(2**60) for arguments in [(1, "2"), (12, ""), (1, "2\x1f0"), (1, "2", 0, 1)]}
    assert len(drawn) == 4


# Keys


def test_keys_depend_on_the_client_and_on_nothing_around_it() -> None:
    everybody = keys(7, "batches", 3, clients(1000))
    order = torch.from_numpy(stream(1, "order").permutation(1000))
    assert torch.equal(keys(7, "batches", 3, order), everybody[order])
    assert torch.equal(torch.cat([keys(7, "batches", 3, part) for part in clients(1000).split(7)]), everybody)
    assert torch.equal(keys(7, "batches", 3, clients(1000).view(10, 100)), everybody.view(10, 100))
    assert torch.equal(keys(7, "batches", 3, clients(1000).int()), everybody)


def test_keys_lie_with_their_clients_whatever_the_default_device_is() -> None:
    wanted = keys(7, "batches", 3, clients(9)).tolist()
    with torch.device("meta"):  # as if it were a GPU: a tensor made there cannot be read on the host
        made = keys(7, "batches", 3, torch.arange(9, device="cpu"))
        single = keys(7, "batches", 3, torch.tensor(4, device="cpu"))
    assert made.device.type == single.device.type == "cpu"
    assert made.tolist() == wanted and single.item() == wanted[4]


def test_all_keys_differ() -> None:
    made = [
        keys(seed, purpose, number, clients(500))
        for seed in (0, 1, 2**40)
        for purpose in ("batches", "dropout", "batches ")
        for number in (0, 1, 2)
    ]
    assert len(torch.cat(made).unique()) == 27 * 500


def test_folding_in_makes_keys_that_differ_and_do_not_commute() -> None:
    base = keys(1, "fold", 0, clients(40))
    grid = fold_in(base.unsqueeze(1), torch.arange(-60, 60))
    chained = fold_in(grid, 5)
    assert len(torch.cat([base, grid.flatten(), chained.flatten()]).unique()) == 40 + 2 * 40 * 120
    for number in (-60, 0, 59):
        assert torch.equal(fold_in(base, number), grid[:, number + 60])
    assert torch.equal(fold_in(base, 2**40), fold_in(base, torch.tensor(2**40)))
    assert not torch.isin(fold_in(fold_in(base, 1), 2), fold_in(fold_in(base, 2), 1)).any()


# Numbers


def split_mix(key: int, count: int) -> list[int]:
    """SplitMix64 in Python's own integers, as signed 64-bit results."""
    out = []
    for k in range(1, count + 1):
        z = (key + k * 0x9E3779B97F4A7C15) % 2**64
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
        z ^= z >> 31
        out.append(z - 2**64 if z >= 2**63 else z)
    return out


@given(key=st.integers(-(2**63), 2**63 - 1), count=st.integers(0, 9))
@settings(max_examples=80, deadline=None)
def test_bits_are_split_mix_64(key: int, count: int) -> None:
    assert bits(torch.tensor(key), count).tolist() == split_mix(key, count)


def test_bits_from_a_known_vector() -> None:
    # The first outputs of SplitMix64 from state 1234567, as published with the algorithm's test vectors.
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821]
    assert [value % 2**64 for value in bits(torch.tensor(1234567), 5).tolist()] == known


@pytest.mark.parametrize("draw", [bits, uniform])
def test_the_first_numbers_do_not_depend_on_how_many_are_drawn(draw: Any) -> None:
    key = keys(1, "width", 0, clients(6))
    assert torch.equal(draw(key, 5), draw(key, 900)[:, :5])
    assert torch.equal(draw(key[2], 5), draw(key, 5)[2])
    assert torch.equal(draw(key.view(2, 3), 5), draw(key, 5).view(2, 3, 5))


@pytest.mark.parametrize(("dtype", "digits"), [(torch.float32, 24), (torch.float64, 53)])
def test_uniforms_are_multiples_within_the_unit_interval(dtype: torch.dtype, digits: int) -> None:
    drawn = uniform(keys(2, "unit", 0, clients(50)), 2000, dtype)
    assert drawn.dtype == dtype and float(drawn.min()) >= 0 and float(drawn.max()) < 1
    scaled = drawn.double() * 2.0**digits
    assert torch.equal(scaled, scaled.floor())
    assert bool((scaled % 2 == 1).any()), "the last digit is used"
    # Of either type they are the leading digits of the same integers.
    leading = bits(keys(2, "unit", 0, clients(50)), 2000).numpy().view(np.uint64) >> np.uint64(64 - digits)
    np.testing.assert_array_equal(scaled.numpy(), leading.astype(np.float64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniforms_are_uniform_within_a_key_and_across_keys(dtype: torch.dtype) -> None:
    within = uniform(keys(3, "uniform", 1, torch.tensor([5])), 2**16, dtype)[0]
    across = uniform(keys(3, "uniform", 1, clients(2**16)), 1, dtype)[:, 0]
    folded = uniform(fold_in(keys(3, "uniform", 1, torch.tensor(5)), clients(2**16)), 1, dtype)[:, 0]
    for drawn in (within, across, folded):
        assert_uniform(torch.bincount((drawn.double() * 256).long(), minlength=256))
        # Neighbours are independent: pairs fill the square evenly.
        pairs = (drawn[:-1:2].double() * 32).long() * 32 + (drawn[1::2].double() * 32).long()
        assert_uniform(torch.bincount(pairs, minlength=1024))


def test_every_bit_is_fair() -> None:
    drawn = bits(keys(3, "bits", 0, clients(64)), 1024).flatten()
    for place in range(64):
        assert_uniform(torch.bincount((drawn >> place) & 1, minlength=2))


def test_normals_are_normal() -> None:
    drawn = normal(keys(4, "normal", 0, clients(100)), 1000)
    assert drawn.shape == (100, 1000) and drawn.dtype == torch.float64
    assert normal(keys(4, "normal", 0, clients(2)), 3, torch.float32).dtype == torch.float32
    # Kolmogorov and Smirnov: the largest gap between the empirical and the true distribution function.
    assert scipy.stats.kstest(drawn.flatten().numpy(), "norm").pvalue > CHANCE
    # The two halves of a key's numbers come from the same uniforms' radius and angle: they must not be related.
    first, second = drawn[:, :500].flatten(), drawn[:, 500:].flatten()
    assert abs(float(torch.corrcoef(torch.stack([first, second]))[0, 1])) < 5 / 50000**0.5


# Permutations


@given(
    seed=st.integers(0, 2**31), lengths=st.lists(st.integers(0, 12), min_size=1, max_size=6), extra=st.integers(0, 4)
)
@settings(max_examples=60, deadline=None)
def test_permutations_are_permutations_then_padding_in_order(seed: int, lengths: list[int], extra: int) -> None:
    width = max(lengths) + extra
    key = keys(seed, "shuffle", 0, clients(len(lengths)))
    made = permutations(key, torch.tensor(lengths), width)
    assert made.shape == (len(lengths), width)
    for row, length in enumerate(lengths):
        assert sorted(made[row, :length].tolist()) == list(range(length))
        assert made[row, length:].tolist() == list(range(length, width))
        alone = permutations(key[row : row + 1], torch.tensor([length]), length)
        assert torch.equal(alone[0], made[row, :length]), "a row depends on its width or its neighbours"


def test_all_permutations_are_equally_likely() -> None:
    count = 24 * 200
    made = permutations(keys(6, "shuffle", 2, clients(count)), torch.full((count,), 4), 6)[:, :4]
    table = {order: number for number, order in enumerate(itertools.permutations(range(4)))}
    found = torch.tensor([table[tuple(row)] for row in made.tolist()])
    assert_uniform(torch.bincount(found, minlength=24))


def test_a_long_permutation_leaves_nothing_in_its_place_but_by_chance() -> None:
    # Fixed points of a random permutation are Poisson with mean 1: over 200 rows, 200 ± 5 √200.
    made = permutations(keys(6, "long", 0, clients(200)), torch.full((200,), 1000), 1000)
    fixed = int((made == torch.arange(1000)).sum())
    assert abs(fixed - 200) <= 5 * 200**0.5


# Nothing global


def global_states() -> tuple[Any, ...]:
    legacy = vars(np.random)["get_state"]()
    return (
        importlib.import_module("random").getstate(),
        legacy[1].tobytes(),
        legacy[2],
        bytes(torch.get_rng_state().numpy()),
    )


def test_no_global_generator_is_touched() -> None:
    before = global_states()
    stream(1, "a").normal(size=5)
    key = keys(1, "a", 2, clients(4))
    for draw in (bits, uniform, normal):
        draw(fold_in(key, 3), 7)
    permutations(key, torch.full((4,), 3), 3)
    with torch_stream(1, "init"):
        nn.Linear(3, 3)
    assert global_states() == before


def test_torch_stream_repeats_and_gives_back_the_generator() -> None:
    before = global_states()

    def drawn(seed: int, purpose: str) -> Tensor:
        with torch_stream(seed, purpose):
            return torch.cat([nn.Linear(4, 4).weight.detach().flatten(), torch.rand(3)])

    assert torch.equal(drawn(1, "model"), drawn(1, "model"))
    assert not torch.isin(drawn(1, "model"), drawn(2, "model")).any()
    assert not torch.isin(drawn(1, "model"), drawn(1, "other")).any()
    with torch_stream(1, "outer"):
        torch.rand(2)
        expected = torch.get_rng_state()
        drawn(1, "inner")
        assert torch.equal(torch.get_rng_state(), expected)
    with pytest.raises(ZeroDivisionError), torch_stream(1, "failing"):
        torch.rand(2)
        raise ZeroDivisionError
    assert global_states() == before


def test_lanes_are_the_same_where_memory_cannot_be_seen_as_another_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under ``vmap`` of older versions of PyTorch; each hash of 64 bits is four integers, the lowest first."""
    key = keys(3, "lanes", 1, torch.arange(4))
    wanted = lanes(key, 10)
    hashes = bits(key, 3).numpy().astype(np.uint64)
    by_hand = np.stack([(hashes >> np.uint64(16 * place)).astype(np.uint16) for place in range(4)], -1)
    assert np.array_equal(by_hand.reshape(4, 12)[:, :10].view(np.int16), wanted.numpy())
    plain = Tensor.view

    def view(tensor: Tensor, *shape: Any) -> Tensor:
        if shape == (torch.int16,):
            raise RuntimeError("Batching rule not implemented for aten::view.dtype")
        return plain(tensor, *shape)

    monkeypatch.setattr(Tensor, "view", view)
    assert torch.equal(lanes(key, 10), wanted)
