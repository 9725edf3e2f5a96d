"""Contenders on the same samples, against exact distributions and closed forms in float64."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import optimize, stats

from coterie.errors import ConfigError
from coterie.evaluation import (
    better_than_reference,
    combined_pvalue,
    mean_interval,
    paired_interval,
    share_of_firsts,
    stratified_mean,
)
from coterie.randomness import stream

DRAWS = 20_000
Z = 1.959963984540054


def within(found: float, exact: float, draws: int = DRAWS) -> bool:
    """Whether a drawn share is as near to the exact one as 4.5 standard errors, and one draw."""
    return abs(found - exact) <= 4.5 * math.sqrt(max(exact * (1 - exact), 0.0) / draws) + 1.0 / draws


def column(gained: int, lost: int, same: int) -> NDArray[np.float64]:
    return np.array([1.0] * gained + [-1.0] * lost + [0.0] * same)


# ---------------------------------------------------------------------------------------------- better than a reference


@pytest.mark.parametrize(("gained", "lost"), [(9, 2), (5, 5), (3, 0), (2, 6)])
def test_one_contender_in_one_stratum_is_mcnemars_test_one_sided(gained: int, lost: int) -> None:
    values = column(gained, lost, 7)[:, None]
    found = better_than_reference(values, np.zeros(len(values)), stream(1, "test"), draws=DRAWS)
    assert within(found.pvalues[0], stats.binom.sf(gained - 1, gained + lost, 0.5))
    assert found.gains[0] == pytest.approx((gained - lost) / (gained + lost + 7))


def test_every_client_counts_the_same_however_many_samples_it_has() -> None:
    """All turnings of seven differences, with the weights 1/(2·4), 1/(2·3), written out."""
    values, strata = np.array([1.0, 1.0, 0.0, -1.0, 1.0, 1.0, -1.0]), np.array([5, 5, 5, 5, 2, 2, 2])
    weights = np.array([1 / 8] * 4 + [1 / 6] * 3)
    observed = weights @ values
    turned = [weights @ (values * np.array(signs)) for signs in itertools.product([-1, 1], repeat=7)]
    exact = float(np.mean(np.array(turned) >= observed - 1e-12))
    found = better_than_reference(values[:, None], strata, stream(2, "test"), draws=DRAWS)
    assert within(found.pvalues[0], exact)
    assert found.gains[0] == pytest.approx((1 / 4 + 1 / 3) / 2)
    assert stratified_mean(values[:, None], strata)[0] == pytest.approx((1 / 4 + 1 / 3) / 2)


def test_the_best_of_contenders_that_depend_on_nothing_common() -> None:
    """Three contenders that differ on samples of their own: the best reaches t with probability 1 - (1 - p)^3."""
    own = column(7, 2, 0)
    values = np.zeros((27, 3))
    for place in range(3):
        values[9 * place : 9 * (place + 1), place] = own
    found = better_than_reference(values, np.zeros(27), stream(3, "test"), draws=DRAWS)
    single = stats.binom.sf(6, 9, 0.5)
    for pvalue in found.pvalues:
        assert within(pvalue, 1 - (1 - single) ** 3)


def test_contenders_that_are_one_do_not_count_twice() -> None:
    values = column(8, 3, 4)[:, None]
    found = better_than_reference(np.repeat(values, 5, axis=1), np.zeros(15), stream(4, "test"), draws=DRAWS)
    assert within(found.pvalues[0], stats.binom.sf(7, 11, 0.5))


def test_one_that_never_differs_is_never_better_and_in_nobodys_way() -> None:
    values = np.column_stack([column(6, 1, 3), np.zeros(10)])
    found = better_than_reference(values, np.zeros(10), stream(5, "test"), draws=DRAWS)
    assert found.pvalues[1] == 1.0 and found.detectable[1] == 0.0
    assert within(found.pvalues[0], stats.binom.sf(5, 7, 0.5))


def test_what_is_detectable_is_the_least_gain_beyond_chance() -> None:
    """Sixteen samples of a hundred differ: beyond chance at 5 % is 12 to 4, since P(Bin(16, 1/2) >= 12) = 0.038."""
    assert stats.binom.sf(11, 16, 0.5) < 0.05 < stats.binom.sf(10, 16, 0.5)
    found = better_than_reference(column(8, 8, 84)[:, None], np.zeros(100), stream(6, "test"), draws=DRAWS)
    assert 6 / 100 <= found.detectable[0] <= 8 / 100 + 1e-12  # 11 to 5 is not enough, 12 to 4 is


def test_the_level_is_kept_where_the_best_of_many_is_picked() -> None:
    """300 times ten contenders that are as good as the reference: at most 5 % of the best are called better."""
    draw, called = stream(7, "null"), 0
    strata = np.repeat(np.arange(6), 10)
    for number in range(300):
        values = draw.choice([-1.0, 0.0, 1.0], size=(60, 10), p=[0.15, 0.7, 0.15])
        found = better_than_reference(values, strata, stream(number, "test"), draws=400)
        called += found.pvalues[np.argmax(found.gains)] < 0.05
    assert called <= stats.binom.ppf(0.9999, 300, 0.05)


# -------------------------------------------------------------------------------------------------------- staying first


@pytest.mark.parametrize(("first", "second"), [(0.1, 0.02), (1.0, 0.04), (0.5, 0.5), (1.0, 1.0)])
def test_two_pvalues_together_are_fishers(first: float, second: float) -> None:
    assert combined_pvalue(first, second) == pytest.approx(stats.combine_pvalues([first, second]).pvalue)


def test_how_often_one_of_two_stays_first_is_a_sum_over_trinomials() -> None:
    gained, lost, samples = 6, 3, 20
    scores = np.zeros((samples, 2))
    scores[:gained, 0], scores[gained : gained + lost, 1] = 1.0, 1.0
    exact = sum(
        stats.multinomial.pmf([a, b, samples - a - b], samples, [gained / 20, lost / 20, 11 / 20])
        for a in range(samples + 1)
        for b in range(samples + 1 - a)
        if a >= b
    )
    first, second = share_of_firsts(scores, np.zeros(samples), [0, 1], stream(8, "test"), draws=DRAWS)
    assert within(first, exact)
    ties = sum(
        stats.multinomial.pmf([a, a, samples - 2 * a], samples, [6 / 20, 3 / 20, 11 / 20])
        for a in range(samples // 2 + 1)
    )
    assert within(second, 1 - exact + ties)


def test_samples_are_drawn_within_their_clients() -> None:
    """Client 0 always favours the first by 1/2 of its mean, client 1 the second by 1/2, whatever is drawn: equals."""
    scores = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert share_of_firsts(scores, np.array([0, 0, 1]), [0, 1], stream(9, "test"), draws=500).tolist() == [1.0, 1.0]


def test_equals_are_all_first_and_groups_stand_by_their_best() -> None:
    scores = np.array([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    shares = share_of_firsts(scores, np.zeros(2), [0, 1, 2], stream(10, "test"), draws=DRAWS)
    assert shares[0] == shares[1] == 1.0
    assert within(shares[2], 1 / 4)  # only where the second sample is drawn twice
    assert share_of_firsts(scores, np.zeros(2), [0, 1, 1], stream(10, "test"), draws=500)[1] == 1.0


# ------------------------------------------------------------------------------------------------------------ intervals


def score(gained: int, lost: int, samples: int, difference: float) -> float:
    """The score statistic, with the nuisance parameter found by maximising the likelihood and not by a formula."""

    def unlikely(second: float) -> float:
        parts = ((gained, second + difference), (lost, second), (samples - gained - lost, 1 - 2 * second - difference))
        return -sum(count * math.log(max(chance, 1e-300)) for count, chance in parts if count)

    low, high = max(0.0, -difference), (1 - difference) / 2
    found = optimize.minimize_scalar(unlikely, bounds=(low, high), method="bounded", options={"xatol": 1e-12}).x
    variance = samples * (2 * found + difference * (1 - difference))
    return (gained - lost - samples * difference) / math.sqrt(variance)


@pytest.mark.parametrize(("gained", "lost", "samples"), [(7, 2, 40), (1, 0, 12), (30, 45, 200), (3, 3, 10), (0, 5, 9)])
def test_the_ends_of_an_interval_are_where_the_score_test_refuses(gained: int, lost: int, samples: int) -> None:
    (low,), (high,) = (each.tolist() for each in paired_interval([gained], [lost], [samples]))
    assert low < (gained - lost) / samples < high
    assert score(gained, lost, samples, low) == pytest.approx(Z, abs=1e-4)
    assert score(gained, lost, samples, high) == pytest.approx(-Z, abs=1e-4)


def test_where_no_sample_differs_the_interval_has_a_closed_form() -> None:
    """With g = l = 0 the score is -n Δ / sqrt(n Δ (1 - Δ)), which is -z at z² / (n + z²)."""
    low, high = paired_interval([0, 0], [0, 0], [10, 500])
    np.testing.assert_allclose(high, [Z**2 / (10 + Z**2), Z**2 / (500 + Z**2)], rtol=0, atol=1e-9)
    np.testing.assert_allclose(low, -high, rtol=0, atol=1e-12)


def test_intervals_turn_with_the_models_and_end_at_one() -> None:
    low, high = paired_interval([7, 12], [2, 0], [40, 12])
    turned_low, turned_high = paired_interval([2, 0], [7, 12], [40, 12])
    np.testing.assert_allclose(low, -turned_high, rtol=0, atol=1e-11)
    np.testing.assert_allclose(high, -turned_low, rtol=0, atol=1e-11)
    assert high[1] == 1.0 and np.isnan(paired_interval([0], [0], [0])[0][0])
    with pytest.raises(ConfigError, match="than there are"):
        paired_interval([2], [2], [3])


@pytest.mark.parametrize(("first", "second"), [(0.1, 0.1), (0.3, 0.1), (0.05, 0.02), (0.5, 0.2)])
def test_an_interval_holds_the_truth_as_often_as_it_says(first: float, second: float) -> None:
    """Summed exactly over all outcomes of 40 samples."""
    samples, held = 40, 0.0
    outcomes = [(a, b) for a in range(samples + 1) for b in range(samples + 1 - a)]
    gained, lost = (np.array(each) for each in zip(*outcomes, strict=True))
    chance = stats.multinomial.pmf(
        np.column_stack([gained, lost, samples - gained - lost]), samples, [first, second, 1 - first - second]
    )
    low, high = paired_interval(gained, lost, np.full(len(gained), samples))
    held = float(chance[(low <= first - second) & (first - second <= high)].sum())
    assert 0.935 <= held <= 0.99  # outcomes are few, and it errs on the safe side where models rarely differ


def test_the_mean_of_equal_intervals_is_narrower_by_the_root_of_their_number() -> None:
    mean, low, high = mean_interval([0.2] * 9, [0.05] * 9, [0.5] * 9)
    assert (mean, low, high) == pytest.approx((0.2, 0.2 - 0.15 / 3, 0.2 + 0.3 / 3))
    assert mean_interval([0.1], [-0.2], [0.3]) == pytest.approx((0.1, -0.2, 0.3))
    assert all(math.isnan(each) for each in mean_interval([], [], []))


def test_the_interval_of_a_mean_holds_the_truth_as_often_as_it_says() -> None:
    """Eight clients with 5 to 60 samples and gains of their own, drawn 2000 times: within four standard errors."""
    draw, held, times = stream(11, "coverage"), 0, 2000
    sizes = np.array([5, 8, 10, 12, 20, 30, 40, 60])
    first, second = np.linspace(0.05, 0.35, 8), np.linspace(0.2, 0.05, 8)
    truth = float(np.mean(first - second))
    for _ in range(times):
        counts = np.array(
            [draw.multinomial(n, [a, b, 1 - a - b]) for n, a, b in zip(sizes, first, second, strict=True)]
        )
        low, high = paired_interval(counts[:, 0], counts[:, 1], sizes)
        _, lower, upper = mean_interval((counts[:, 0] - counts[:, 1]) / sizes, low, high)
        held += lower <= truth <= upper
    assert abs(held / times - 0.95) <= 4 * math.sqrt(0.95 * 0.05 / times) + 0.01


def test_shapes_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="a row of scores for each unit"):
        stratified_mean(np.zeros((3, 2)), np.zeros(2))
