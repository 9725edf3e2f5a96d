r"""Contenders on the same samples: who is first, how sure that is, and what is beyond chance, in float64.

Everything here is about a mean over strata (clients) of means within strata, in which each unit (a sample of a client)
counts :math:`w_i = 1 / (S\, n_{s(i)})`, so that every client counts the same however many samples it has:

.. math::

   T(x) = \sum_i w_i\, d_i(x), \qquad d_i(x) = \text{score of } x \text{ on unit } i - \text{score of the reference}.

Contenders are compared on the same units, so what units have in common cancels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.errors import ConfigError

Numbers = NDArray[np.float64]

DRAWS = 10_000
"""How often chance is drawn."""

_DECIMALS = 12  # means of counts that are closer than this are equal but for rounding
_NUMBERS = 2**20  # numbers that are drawn at a time: more would be memory that is taken and given back each time


@dataclass(frozen=True)
class MaximumTest:
    """Whether contenders are better than a reference, if one may look at all of them and pick the best.

    Parameters
    ----------
    gains
        The mean gain of each contender over the reference.
    pvalues
        One-sided, for each contender: how often chance alone would give the *best* of all contenders as large a gain,
        measured in its own spread.
    detectable
        For each contender the least gain that would have been beyond chance.
    """

    gains: Numbers
    pvalues: Numbers
    detectable: Numbers


def stratified_mean(values: ArrayLike, strata: ArrayLike) -> Numbers:
    """Give the mean over strata of the means within strata.

    Parameters
    ----------
    values
        A row for each unit, a column for each contender.
    strata
        The stratum of each unit.

    Returns
    -------
    numpy.ndarray
        A mean for each contender.
    """
    found, weights = _checked(values, strata)
    return np.round(weights @ found, _DECIMALS)


def better_than_reference(
    differences: ArrayLike, strata: ArrayLike, draw: np.random.Generator, level: float = 0.05, draws: int = DRAWS
) -> MaximumTest:
    r"""Test contenders against a reference, adjusted for their number by the distribution of the greatest.

    If contender and reference were equally good on every unit, the signs of a unit's differences could as well be the
    other way round. They are turned at random, for all contenders of a unit at once, which keeps how contenders depend
    on one another. With :math:`\sigma^2(x) = \sum_i w_i^2 d_i(x)^2`, which no turning changes, the p-value of x is how
    often :math:`\max_y T^*(y) / \sigma(y) \ge T(x) / \sigma(x)`. For one contender and one stratum that is McNemar's
    test, one-sided and drawn.

    Parameters
    ----------
    differences
        A row for each unit, a column for each contender: its score less the reference's.
    strata
        The stratum of each unit.
    draw
        Draws the signs.
    level
        The p-value below which a gain is beyond chance.
    draws
        How often signs are drawn.

    Returns
    -------
    MaximumTest
        The gains, and what chance would make of them.
    """
    found, weights = _checked(differences, strata)
    gains = weights @ found
    spread = np.sqrt(weights**2 @ found**2)
    scaled = np.divide(gains, spread, out=np.zeros_like(gains), where=spread > 0)
    # Units with the same differences in the same stratum need no sign each: how many are turned is binomial.
    patterns, counts, own = _patterns(found[found.any(1)], weights[found.any(1)])
    patterns = patterns * np.divide(1.0, spread, out=np.zeros_like(spread), where=spread > 0) * own[:, None]
    greatest = np.empty(draws)
    for part in _parts(draws, len(patterns)):
        turned = 2.0 * draw.binomial(counts, 0.5, size=(part.stop - part.start, len(counts))) - counts
        greatest[part] = np.max(turned @ patterns, axis=1, initial=-math.inf)
    reached = (greatest[:, None] >= scaled - 10.0**-_DECIMALS).sum(0)
    pvalues = np.where(spread > 0, (1 + reached) / (1 + draws), 1.0)
    quantile = np.sort(greatest)[min(draws - 1, math.ceil((1 - level) * (1 + draws)) - 1)]
    return MaximumTest(np.round(gains, _DECIMALS), pvalues, quantile * spread)


def combined_pvalue(first: float, second: float) -> float:
    r"""Put two p-values of independent samples together (Fisher).

    If nothing but chance was at work, the product of the two is at most c with a probability of at most
    :math:`c\,(1 - \ln c)`. The second may depend on what was chosen by the first's samples, if it is a p-value whatever
    was chosen.

    Parameters
    ----------
    first
        A p-value.
    second
        Another.

    Returns
    -------
    float
        The p-value of both together.

    Examples
    --------
    >>> round(combined_pvalue(0.1, 0.02), 4)
    0.0144
    """
    product = first * second
    return product * (1 - math.log(product)) if product > 0 else 0.0


def share_of_firsts(
    scores: ArrayLike, strata: ArrayLike, groups: ArrayLike, draw: np.random.Generator, draws: int = DRAWS
) -> Numbers:
    """Say in which share of bootstrap samples each group of contenders has the first of all.

    Units are drawn with replacement within their stratum, the same for all contenders.

    Parameters
    ----------
    scores
        A row for each unit, a column for each contender; higher is better.
    strata
        The stratum of each unit.
    groups
        The group of each contender, numbered from 0.
    draw
        Draws the units.
    draws
        How many bootstrap samples are drawn.

    Returns
    -------
    numpy.ndarray
        A share for each group; of equals each is first.
    """
    found, weights = _checked(scores, strata)
    _, where = np.unique(np.asarray(strata), return_inverse=True)
    means = np.zeros((draws, found.shape[1]))
    for stratum in range(int(where.max()) + 1):
        inside = where == stratum
        patterns, counts, own = _patterns(found[inside], weights[inside])
        for part in _parts(draws, len(patterns)):
            drawn = draw.multinomial(int(counts.sum()), counts / counts.sum(), size=part.stop - part.start)
            means[part] += own[0] * (drawn @ patterns)
    means = np.round(means, _DECIMALS)
    of, first = np.asarray(groups), means.max(axis=1)
    return np.array([np.mean((means[:, of == group] == first[:, None]).any(1)) for group in range(int(of.max()) + 1)])


def paired_interval(
    gained: ArrayLike, lost: ArrayLike, samples: ArrayLike, level: float = 0.95
) -> tuple[Numbers, Numbers]:
    r"""Give score intervals for differences of two accuracies on the same samples (Tango, 1998).

    The interval holds all differences :math:`\Delta` that a two-sided score test does not refuse: with q the most
    likely probability, given :math:`\Delta`, that the second model alone is right,

    .. math::

       \frac{|g - l - n\Delta|}{\sqrt{n\,(2q + \Delta(1 - \Delta))}} \le z, \qquad
       2n q^2 - \bigl(g + l + (g - l - 2n)\Delta\bigr)\, q - l\,\Delta(1 - \Delta) = 0.

    Unlike Wald's, it keeps its level where few samples differ, and it is not a point where none does.

    Parameters
    ----------
    gained
        How many samples the first model alone has right, for each client.
    lost
        How many the second alone has right.
    samples
        How many there are; without any the interval is NaN.
    level
        How often the interval holds the true difference.

    Returns
    -------
    low
        The lower ends.
    high
        The upper ends.

    Raises
    ------
    ConfigError
        If more samples differ than there are.
    """
    first, second, count = (np.asarray(each, dtype=np.float64) for each in (gained, lost, samples))
    if ((first < 0) | (second < 0) | (first + second > count)).any():
        raise ConfigError("of a client's samples no more can be answered differently than there are")
    z = NormalDist().inv_cdf((1 + level) / 2)
    with np.errstate(divide="ignore", invalid="ignore"):
        middle = (first - second) / count
        low = _root(first, second, count, z, np.full_like(middle, -1.0), middle)
        high = _root(first, second, count, -z, middle, np.full_like(middle, 1.0))
    return np.where(count > 0, low, np.nan), np.where(count > 0, high, np.nan)


def mean_interval(estimates: ArrayLike, lows: ArrayLike, highs: ArrayLike) -> tuple[float, float, float]:
    r"""Put intervals of independent estimates together to one of their mean (Zou and Donner's MOVER).

    With :math:`l_c, u_c` the ends for client c of C,
    :math:`L = \bar d - \frac1C \sqrt{\sum_c (d_c - l_c)^2}`, and U likewise: squared half-widths stand for variances,
    each side for itself, so that a client with three samples makes the interval as wide as it should.

    Parameters
    ----------
    estimates
        An estimate for each client.
    lows
        The lower ends of their intervals.
    highs
        The upper ends, of the same level.

    Returns
    -------
    mean
        The mean.
    low
        The lower end of its interval.
    high
        The upper end.
    """
    found, low, high = (np.asarray(each, dtype=np.float64) for each in (estimates, lows, highs))
    if not len(found):
        return math.nan, math.nan, math.nan
    mean = float(found.mean())
    below, above = (float(np.sqrt(np.sum((found - end) ** 2)) / len(found)) for end in (low, high))
    return mean, max(-1.0, mean - below), min(1.0, mean + above)


def _root(first: Numbers, second: Numbers, count: Numbers, z: float, low: Numbers, high: Numbers) -> Numbers:
    """Find by bisection where the score, which falls as the difference rises, is z."""
    for _ in range(60):
        middle = (low + high) / 2
        above = _score(first, second, count, middle) > z
        low, high = np.where(above, middle, low), np.where(above, high, middle)
    return np.round((low + high) / 2, _DECIMALS)


def _score(first: Numbers, second: Numbers, count: Numbers, difference: Numbers) -> Numbers:
    linear = first + second + (first - second - 2 * count) * difference
    constant = second * difference * (1 - difference)
    likely = (linear + np.sqrt(np.maximum(linear**2 + 8 * count * constant, 0.0))) / (4 * count)
    likely = np.maximum(likely, np.maximum(-difference, 0.0))
    variance = np.maximum(count * (2 * likely + difference * (1 - difference)), 0.0)
    beyond = first - second - count * difference
    score: Numbers = np.where(variance > 0, beyond / np.sqrt(variance), np.sign(beyond) * np.inf)
    return score


def _checked(values: ArrayLike, strata: ArrayLike) -> tuple[Numbers, Numbers]:
    """Give the values, and the weight of each unit."""
    found, stratum = np.asarray(values, dtype=np.float64), np.asarray(strata)
    if found.ndim != 2 or stratum.shape != found.shape[:1] or not len(found):
        raise ConfigError(
            f"a paired comparison needs a row of scores for each unit, not shapes {found.shape} and {stratum.shape}"
        )
    _, place, counts = np.unique(stratum, return_inverse=True, return_counts=True)
    return found, 1.0 / (len(counts) * counts[place])


def _patterns(values: Numbers, weights: Numbers) -> tuple[Numbers, NDArray[np.int64], Numbers]:
    """Give the different rows, how many units have each, and the weight of such a unit."""
    whole = np.column_stack([weights, values])
    rows, counts = np.unique(whole, axis=0, return_counts=True)
    return rows[:, 1:], counts.astype(np.int64), rows[:, 0]


def _parts(draws: int, width: int) -> list[slice]:
    step = max(1, _NUMBERS // max(1, width))
    return [slice(first, min(first + step, draws)) for first in range(0, draws, step)]
