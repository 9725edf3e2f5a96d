"""Paired tests and seeds, against exact counts."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from coterie.errors import ConfigError
from coterie.evaluation.significance import benjamini_hochberg, mcnemar, most_discordant, over_seeds, wilcoxon


def exact(differences: list[float]) -> float:
    """Count, over all signs, how often the smaller rank sum is at most the observed one (ties share their ranks)."""
    size = np.abs(differences)
    ranks = [np.mean([1 + np.sum(size < s), np.sum(size <= s)]) for s in size]
    total = sum(ranks)
    smaller = min(up := sum(r for r, d in zip(ranks, differences, strict=True) if d > 0), total - up)
    hits = 0
    for signs in itertools.product((0, 1), repeat=len(ranks)):
        rising = sum(r for r, s in zip(ranks, signs, strict=True) if s)
        hits += min(rising, total - rising) <= smaller + 1e-9
    return hits / 2 ** len(ranks)


def test_every_client_better():
    # Ten clients, all in favour: only two of the 2**10 sign patterns are as extreme.
    first = np.linspace(0.6, 0.95, 10)
    found = wilcoxon(first, first - np.linspace(0.01, 0.1, 10))
    assert found.pvalue == pytest.approx(2 / 2**10, rel=1e-12)
    assert found.statistic == 0
    assert (found.clients, found.ties, found.identical) == (10, 0, False)
    assert found.median_difference == pytest.approx(0.055, rel=1e-9)


@given(st.lists(st.integers(-6, 6).filter(bool), min_size=1, max_size=9))
@settings(max_examples=40, deadline=None)
def test_small_federations_are_exact(twentieths):
    second = np.full(len(twentieths), 0.5)
    found = wilcoxon(second + np.array(twentieths) / 20, second)
    assert found.pvalue == pytest.approx(exact(twentieths), rel=1e-9)


def test_rounding_does_not_break_ties():
    # 0.9 - 0.8 is not 0.4 - 0.3 in floating point, but both are a tenth.
    assert 0.9 - 0.8 != 0.4 - 0.3
    found = wilcoxon([0.9, 0.3, 0.7], [0.8, 0.4, 0.4])
    assert found.pvalue == pytest.approx(exact([1, -1, 3]), rel=1e-12)


def test_symmetric():
    first, second = [0.5, 0.7, 0.2, 0.9], [0.4, 0.9, 0.5, 0.85]
    one, other = wilcoxon(first, second), wilcoxon(second, first)
    assert (one.pvalue, one.statistic) == (other.pvalue, other.statistic)
    assert one.median_difference == -other.median_difference


def test_identical_methods():
    found = wilcoxon([0.5, 0.7, 0.9], [0.5, 0.7, 0.9])
    assert (found.pvalue, found.statistic, found.ties, found.identical) == (1.0, 0.0, 3, True)
    assert found.median_difference == 0


def test_equal_clients_say_nothing():
    some, none = wilcoxon([0.5, 0.7, 0.9, 1.0], [0.4, 0.5, 0.6, 1.0]), wilcoxon([0.5, 0.7, 0.9], [0.4, 0.5, 0.6])
    assert some.pvalue == none.pvalue == 2 / 2**3
    assert (some.clients, some.ties) == (4, 1)


def test_undefined_scores_are_left_out():
    assert wilcoxon([0.5, math.nan, 0.9], [0.4, 0.5, 0.6]) == wilcoxon([0.5, 0.9], [0.4, 0.6])
    nobody = wilcoxon([math.nan], [0.4])
    assert nobody.clients == 0
    assert math.isnan(nobody.pvalue)


def test_many_clients_reach_small_p_values():
    generator = np.random.default_rng(0)
    base = generator.random(100)
    found = wilcoxon(base + 0.02 + 0.01 * generator.random(100), base)
    # All 100 in favour: the normal approximation puts the rank sum 2525 / sqrt(84587.5) = 8.7 deviations out.
    assert found.pvalue < 1e-16
    same = wilcoxon(base + 0.05 * generator.normal(size=100), base)
    assert same.pvalue > 0.01


def test_shapes_are_checked():
    with pytest.raises(ConfigError, match="one score a client of both methods"):
        wilcoxon([0.1, 0.2], [0.1])


def test_seeds():
    found = over_seeds([0.8, 0.9, 1.0])
    assert (found.mean, found.seeds) == (pytest.approx(0.9, rel=1e-14), 3)
    assert found.std == pytest.approx(0.1, rel=1e-12)  # squares 0.01 + 0.01 over 3 - 1
    assert math.isnan(over_seeds([0.7]).std)
    with pytest.raises(ConfigError, match="at least one"):
        over_seeds([])


def test_mcnemar_is_the_same_whether_ways_are_counted_or_not() -> None:
    """Of 1,000 coins at most 450 are heads in Σ C(1000, k) of 2^1000 cases; one client with more has all computed."""
    gained, lost = np.array([450, 9, 0]), np.array([550, 1, 7])
    expected = [
        float(2 * Fraction(sum(comb(n, k) for k in range(m + 1)), 2**n)) for m, n in ((450, 1000), (1, 10), (0, 7))
    ]
    assert mcnemar(gained, lost).tolist() == expected  # correctly rounded
    computed = mcnemar([*gained, 600], [*lost, 600])
    np.testing.assert_allclose(computed[:3], expected, rtol=1e-10)
    assert computed[3] == 1.0


def test_mcnemar_is_the_sign_test_of_samples_that_differ() -> None:
    # 6 against 1 of 7: 2 (C(7,0) + C(7,1)) / 2^7 = 16/128; 3 against 0: 2/8; equal or none: 1.
    found = mcnemar([6, 0, 2, 0], [1, 3, 2, 0])
    np.testing.assert_allclose(found, [16 / 128, 2 / 8, 1.0, 1.0], rtol=1e-14)


@given(st.integers(0, 12), st.data())
def test_no_overlap_of_right_answers_is_less_certain_than_the_bound(samples: int, data: st.DataObject) -> None:
    right = st.lists(st.booleans(), min_size=samples, max_size=samples)
    first, second = (np.array(data.draw(right), dtype=bool) for _ in range(2))
    true = mcnemar([(first & ~second).sum()], [(second & ~first).sum()])
    gained, lost = most_discordant([first.sum()], [second.sum()], [samples])
    assert gained[0] - lost[0] == first.sum() - second.sum() and lost[0] >= 0 and gained[0] + lost[0] <= samples
    assert mcnemar(gained, lost) >= true - 1e-15


def test_benjamini_and_hochberg() -> None:
    # With m = 4 the sorted 0.005, 0.02, 0.03, 0.8 become 4/1, 4/2, 4/3 and 4/4 of themselves, and none more than the
    # next: 0.02, 0.04, 0.04, 0.8. At a rate of 0.05 the step-up rule rejects the first three, as it should.
    nan = float("nan")
    found = benjamini_hochberg([0.03, nan, 0.8, 0.005, 0.02])
    np.testing.assert_allclose(found, [0.04, nan, 0.8, 0.02, 0.04], rtol=1e-14)
    assert benjamini_hochberg([]).shape == (0,)
    assert benjamini_hochberg([nan]).tolist() != [0.0] and np.isnan(benjamini_hochberg([nan])).all()


@pytest.mark.parametrize("levels", [3, 20, 10**6])
def test_many_clients_are_compared_as_scipy_does(levels: int) -> None:
    generator = np.random.default_rng(levels)
    for count in (51, 52, 100, 499):
        first, second = generator.integers(levels, size=(2, count)) / levels
        found, unequal = wilcoxon(first, second), np.round(first - second, 12)
        expected = stats.wilcoxon(unequal[unequal != 0], method="asymptotic")
        if np.count_nonzero(unequal) > 50:
            assert (found.pvalue, found.statistic) == (expected.pvalue, expected.statistic)


@pytest.mark.parametrize("levels", [3, 20, 10**6])
def test_few_clients_are_compared_as_scipy_does(levels: int) -> None:
    generator = np.random.default_rng(levels)
    for count in (1, 2, 12, 13, 14, 30, 50):
        differences = generator.integers(1, levels + 1, size=count) * generator.choice([-1, 1], size=count) / 2**20
        found, expected = wilcoxon(differences, np.zeros(count)), stats.wilcoxon(differences)
        assert (found.pvalue, found.statistic) == (expected.pvalue, expected.statistic)
