"""Whether two methods differ by more than chance, over clients or on a client's samples, and the spread over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.errors import ConfigError

_COUNTED = 50  # differences up to which chance is counted out and not approximated
_COUNTED_WITH_TIES = 13  # the same, where some are of one size
_COUNTED_ANSWERS, _COUNTED_TERMS = 1000, 20_000  # of one client and of all, up to which ways are counted one by one
_DECIMALS = 12  # accuracies are ratios of small integers: differences closer than this are rounding, not data


@dataclass(frozen=True)
class PairedTest:
    """The outcome of a Wilcoxon signed-rank test.

    Parameters
    ----------
    pvalue
        Two-sided: how often chance alone would give a difference at least this large.
    statistic
        The smaller of the two rank sums, 0 where no client differs.
    clients
        How many clients have both scores.
    ties
        How many of them have equal scores; they say nothing about the sign and are left out of the ranks.
    median_difference
        Median over clients of the first method's score less the second's.
    """

    pvalue: float
    statistic: float
    clients: int
    ties: int
    median_difference: float

    @property
    def identical(self) -> bool:
        """Whether the two methods have the same score on every client."""
        return self.ties == self.clients


def wilcoxon(first: ArrayLike, second: ArrayLike) -> PairedTest:
    """Compare two methods client by client with the two-sided Wilcoxon signed-rank test.

    Parameters
    ----------
    first
        A score of the first method for each client; NaN where undefined.
    second
        The same of the second method, clients in the same order.

    Returns
    -------
    PairedTest
        The outcome. Where all scores are equal the p-value is 1: nothing speaks against chance. Without a client that
        has both scores it is NaN.

    Raises
    ------
    ConfigError
        If the two are not one score a client each.
    """
    one, other = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if one.ndim != 1 or one.shape != other.shape:
        raise ConfigError(
            f"a paired test needs one score a client of both methods, not shapes {one.shape} and {other.shape}"
        )
    both = ~(np.isnan(one) | np.isnan(other))
    # Without rounding, 0.9 - 0.8 and 0.4 - 0.3 would rank apart.
    difference = np.round(one[both] - other[both], _DECIMALS)
    unequal = difference[difference != 0]
    clients, ties = len(difference), len(difference) - len(unequal)
    if not clients:
        return PairedTest(math.nan, math.nan, 0, 0, math.nan)
    median = float(np.median(difference))
    if not len(unequal):
        return PairedTest(1.0, 0.0, clients, ties, median)
    pvalue, statistic = (_by_counting if len(unequal) <= _COUNTED else _by_normal)(unequal)
    return PairedTest(pvalue, statistic, clients, ties, median)


def _by_counting(differences: NDArray[np.float64]) -> tuple[float, float]:
    """Give the p-value and the smaller rank sum of few differences, of which none is 0, as ``scipy.stats`` does.

    Under chance each of the ``2ⁿ`` ways to give the ranks signs is as likely as any other, and it is counted in how
    many of them the sum of the positive ones' ranks is at most, and at least, what it is. All counts are whole numbers
    below ``2⁵³``. Where ranks are shared, this is done for few differences only.
    """
    ranks, tied = _ranks(differences)
    if len(tied) < len(ranks) and len(ranks) > _COUNTED_WITH_TIES:
        return _by_normal(differences)
    doubled = (2 * ranks).astype(np.int64)  # shared ranks are halves
    ways = np.zeros(int(doubled.sum()) + 1)
    ways[0] = 1.0
    for rank in doubled:
        ways[rank:] += ways[:-rank].copy()
    up, whole = int(doubled[differences > 0].sum()), int(doubled.sum())
    tail = min(float(ways[: up + 1].sum()), float(ways[up:].sum())) / 2.0 ** len(ranks)
    return min(1.0, 2 * tail), min(up, whole - up) / 2


def _by_normal(differences: NDArray[np.float64]) -> tuple[float, float]:
    """Give the p-value and the smaller rank sum of many differences, of which none is 0, as ``scipy.stats`` does.

    Under chance the sum of the positive ones' ranks is normal to a good approximation, with mean ``n (n + 1) / 4`` and
    variance ``(n (n + 1) (2 n + 1) − Σ (t³ − t) / 2) / 24`` for ties of t differences of one size.
    """
    from scipy.special import ndtr

    ranks, tied = _ranks(differences)
    up, count = float(ranks[differences > 0].sum()), float(len(differences))
    expected, sizes = count * (count + 1) / 4, tied.astype(np.float64)
    spread = math.sqrt((count * (count + 1) * (2 * count + 1) - float((sizes**3 - sizes).sum()) / 2) / 24)
    return 2 * float(ndtr(-abs((up - expected) / spread))), min(up, count * (count + 1) / 2 - up)


def _ranks(differences: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Rank differences by their size, equal ones by the mean of their ranks; and count those of each size."""
    _, which, tied = np.unique(np.abs(differences), return_inverse=True, return_counts=True)
    return (np.cumsum(tied) - (tied - 1) / 2)[which], tied


@dataclass(frozen=True)
class OverSeeds:
    """Mean and standard deviation over runs that differ only by seed.

    Parameters
    ----------
    mean
        Their mean.
    std
        Their standard deviation (ddof 1), NaN for one seed.
    seeds
        How many there are.
    """

    mean: float
    std: float
    seeds: int

    @property
    def reach(self) -> float:
        """How far to either side of the mean its interval of 95 % reaches; NaN for one seed."""
        return student_reach(self.std, self.seeds)


def student_reach(std: float, count: int) -> float:
    """Say how far the interval of 95 % of a mean reaches to either side, by Student's distribution.

    Parameters
    ----------
    std
        The standard deviation of what it is the mean of (ddof 1).
    count
        Of how many it is.

    Returns
    -------
    float
        Half of its width, NaN for one.
    """
    from scipy.special import stdtrit

    return float(stdtrit(count - 1, 0.975)) * std / math.sqrt(count) if count > 1 else math.nan


def over_seeds(values: Sequence[float]) -> OverSeeds:
    """Summarise runs that differ only by seed.

    Parameters
    ----------
    values
        One number a seed.

    Returns
    -------
    OverSeeds
        Mean and standard deviation.

    Raises
    ------
    ConfigError
        If there is none.
    """
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1 or not len(found):
        raise ConfigError("a summary over seeds needs at least one number")
    spread = float(np.std(found, ddof=1)) if len(found) > 1 else math.nan
    return OverSeeds(float(np.mean(found)), spread, len(found))


def mcnemar(gained: ArrayLike, lost: ArrayLike) -> NDArray[np.float64]:
    """Test whether two models differ on the same samples, by McNemar's exact two-sided test.

    Samples on which both are right, or both wrong, say nothing. If the models were equally good, each of the others
    would fall to either with probability 1/2.

    Parameters
    ----------
    gained
        How many samples the first alone has right, for each client.
    lost
        How many the second alone has right.

    Returns
    -------
    numpy.ndarray
        A p-value for each client, 1 where there is no such sample.

    Examples
    --------
    >>> mcnemar([5, 1], [0, 1]).tolist()
    [0.0625, 1.0]
    """
    one, other = np.asarray(gained, dtype=np.int64), np.asarray(lost, dtype=np.int64)
    fewer, both = np.minimum(one, other), one + other
    if both.max(initial=0) <= _COUNTED_ANSWERS and fewer.sum() <= _COUNTED_TERMS:
        each = zip(fewer.ravel().tolist(), both.ravel().tolist(), strict=True)
        tail = np.array([_half_tail(most, count) for most, count in each]).reshape(both.shape)
    else:
        from scipy.special import bdtr  # takes longer to import than the other way takes here

        tail = np.asarray(bdtr(fewer.astype(np.float64), both, 0.5), dtype=np.float64)
    return np.minimum(1.0, 2.0 * tail)


def _half_tail(most: int, count: int) -> float:
    """Give the chance of at most so many heads among so many coins, counted in whole numbers."""
    ways = total = 1
    for heads in range(most):
        ways = ways * (count - heads) // (heads + 1)
        total += ways
    return float(total / 2**count)


def most_discordant(
    first: ArrayLike, second: ArrayLike, samples: ArrayLike
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Give the most samples on which two models can differ, if only the number that each has right is known.

    With their difference fixed, McNemar's p-value rises with the number of samples on which the models differ: that of
    these numbers is one that the true one cannot exceed.

    Parameters
    ----------
    first
        How many samples the first model has right, for each client.
    second
        The same of the second.
    samples
        How many samples there are.

    Returns
    -------
    gained
        How many samples the first alone has right, at most.
    lost
        How many the second alone then has right.

    Examples
    --------
    >>> [each.tolist() for each in most_discordant([9], [8], [10])]
    [[2], [1]]
    """
    one, other, count = (np.asarray(each, dtype=np.int64) for each in (first, second, samples))
    gained = np.minimum(one, count - other)
    return gained, gained - (one - other)


def benjamini_hochberg(pvalues: ArrayLike) -> NDArray[np.float64]:
    """Adjust p-values for their number: those below q have a false discovery rate of at most q.

    Parameters
    ----------
    pvalues
        The p-values of tests that are independent or positively dependent; NaN where there was none.

    Returns
    -------
    numpy.ndarray
        The adjusted p-values, in the same order; NaN stays NaN and counts for nothing.

    Examples
    --------
    >>> benjamini_hochberg([0.01, 0.5, 0.04]).tolist()
    [0.03, 0.5, 0.06]
    """
    given = np.asarray(pvalues, dtype=np.float64)
    out = np.full(given.shape, np.nan)
    there = np.flatnonzero(~np.isnan(given))
    order = there[np.argsort(given[there], kind="stable")]
    # From the largest down: p * m / rank, but never more than what a larger p-value has.
    scaled = given[order] * len(order) / np.arange(1, len(order) + 1)
    out[order] = np.minimum(1.0, np.minimum.accumulate(scaled[::-1])[::-1])
    return out
