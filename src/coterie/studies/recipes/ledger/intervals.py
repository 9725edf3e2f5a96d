"""Intervals over seeds for what is worked out of cells.

Seeds are the replicates. Where every cell keeps what each seed gave, seeds are paired: the same seed deals samples out
alike for all methods. Where a record has means and deviations alone, cells are taken for independent (Welch), which is
wider as a rule. A ratio is taken as linear around its value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtr, stdtrit

from coterie.studies.recipes.cells import CellName
from coterie.studies.recipes.demands import Estimate
from coterie.studies.recipes.readings import Value
from coterie.studies.recipes.schema import Reading

LEVEL = 0.95
"""How often such an interval holds the true value, were seeds drawn again and the numbers normal."""


@dataclass(frozen=True)
class Interval:
    """From where to where a number may lie, and the chance to find one as low if it were truly zero."""

    low: float
    high: float
    chance: float


def interval(
    estimate: Estimate, cells: Mapping[CellName, Value], readings: Mapping[CellName, Reading]
) -> Interval | None:
    """Give the interval of an estimate over seeds, ``None`` where the records do not allow one."""
    # The p of a paired test is a statement about chance already, and has no other interval.
    uncertain = {name: slope for name, slope in estimate.slopes.items() if readings[name].paired != "pvalue" and slope}
    if not uncertain:
        return _around(estimate.value, 0.0, 1)
    counts = {len(cells[name].each) for name in uncertain}
    if len(counts) == 1 and min(counts) > 1:
        each = sum(slope * np.array(cells[name].each, dtype=np.float64) for name, slope in uncertain.items())
        return _around(estimate.value, float(np.std(each, ddof=1)) / math.sqrt(min(counts)), min(counts) - 1)
    if any(not _over_seeds(cells[name], readings[name]) for name in uncertain):
        return None
    parts = [(slope * cells[name].std) ** 2 / cells[name].seeds for name, slope in uncertain.items()]
    total = sum(parts)
    if total == 0:
        return _around(estimate.value, 0.0, 1)
    freedom = total**2 / sum(
        part**2 / (cells[name].seeds - 1) for part, name in zip(parts, uncertain, strict=True) if part
    )
    return _around(estimate.value, math.sqrt(total), freedom)


def _over_seeds(value: Value, reading: Reading) -> bool:
    kept = reading.spread == "seeds" and reading.of_seeds == "mean"
    return kept and value.seeds > 1 and math.isfinite(value.std)


def _around(value: float, error: float, freedom: float) -> Interval:
    if error == 0:
        return Interval(value, value, 0.0 if value < 0 else 1.0)
    reach = float(stdtrit(freedom, (1 + LEVEL) / 2)) * error
    return Interval(value - reach, value + reach, float(stdtr(freedom, value / error)))
