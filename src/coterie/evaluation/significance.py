"""Whether two methods differ by more than chance, and the spread over seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from coterie.errors import ConfigError

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
    from scipy import stats  # takes a second to import, and few commands compare

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
    outcome = stats.wilcoxon(unequal)
    return PairedTest(float(outcome.pvalue), float(outcome.statistic), clients, ties, median)


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
