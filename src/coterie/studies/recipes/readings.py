"""The numbers of a part, put together from those of its runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from coterie import evaluation
from coterie.studies.comparison import ComparisonPlan, Tuned
from coterie.studies.comparison.standings import choose
from coterie.studies.recipes.cells import CellName
from coterie.studies.recipes.plans import settings_of
from coterie.studies.recipes.run_numbers import Floats, RunNumbers
from coterie.studies.recipes.schema import Reading, RecipePart


@dataclass(frozen=True)
class Value:
    """Our number in a cell.

    Parameters
    ----------
    mean
        Mean over seeds.
    std
        Deviation over seeds (divisor: one less than the seeds) or, for a reading that says so, mean deviation over
        clients; NaN where there is none.
    seeds
        How many seeds there are.
    each
        What each seed gives, in the seeds' order, as far as an interval over seeds can be taken from it: of a cell that
        holds a deviation, jackknife's pseudo-values; nothing for the p of a test that pools the seeds.
    """

    mean: float
    std: float
    seeds: int
    each: tuple[float, ...] = ()


@dataclass(frozen=True)
class PartValues:
    """The numbers of a part's runs.

    Parameters
    ----------
    values
        Numbers by cell; a model that a method does not have leaves no number.
    diverged
        Pairs of setting and method of which a run became NaN or infinite.
    tuned
        What tuning chose.
    """

    values: dict[CellName, Value] = field(default_factory=dict)
    diverged: frozenset[tuple[str, str]] = frozenset()
    tuned: tuple[Tuned, ...] = ()


def read_values(
    part: RecipePart, plan: ComparisonPlan, numbers: Mapping[str, RunNumbers | None], unit: str
) -> PartValues:
    """Put all numbers of a part together from its runs' by name, ``None`` for one that diverged."""
    values: dict[CellName, Value] = {}
    diverged: set[tuple[str, str]] = set()
    tuned: list[Tuned] = []
    for label, setting in settings_of(part, plan).items():
        runs: dict[str, dict[int, RunNumbers]] = {}
        for method in plan.methods:
            counted, choice = choose(plan, numbers, setting, method, _on_validation, lambda run: run.higher_is_better)
            runs[method] = dict(zip(plan.seeds, counted, strict=True)) if counted else {}
            tuned += [] if choice is None else [choice]
            if not runs[method]:
                diverged.add((label, method))
        for name, reading in part.readings.items():
            for method in plan.methods:
                found = _value(name, reading, method, runs)
                if found is not None:
                    factor = factor_of(reading, unit)
                    cell = CellName(part.name, label, method, name)
                    each = tuple(number * factor for number in found.each)
                    values[cell] = Value(found.mean * factor, found.std * factor, found.seeds, each)
    return PartValues(values, frozenset(diverged), tuple(tuned))


def _on_validation(run: RunNumbers) -> float:
    assert run.validation is not None  # every run of a method that is tuned has it
    return run.validation


def factor_of(reading: Reading, unit: str) -> float:
    """Give the factor from what runs record to what tables show: 100 for accuracies in percent, as a rule."""
    if reading.scale is not None:
        return reading.scale
    accuracy = reading.metric != "loss" and reading.weights is None and reading.paired in (None, "difference")
    if unit != "percent" or not accuracy:
        return 1.0
    return 100.0**2 if reading.over == "variance" else 100.0


def _value(name: str, reading: Reading, method: str, runs: Mapping[str, Mapping[int, RunNumbers]]) -> Value | None:
    mine = runs[method]
    if not mine:
        return None
    if reading.paired is not None and reading.against is not None:
        theirs = runs.get(reading.against)
        return _paired(name, reading.paired, mine, theirs) if theirs and reading.against != method else None
    found = [run.readings.get(name) for run in mine.values()]
    numbers = _over_seeds([None if each is None else each[0] for each in found])
    if numbers is not None and reading.of_seeds == "std":
        return Value(numbers.std, math.nan, numbers.seeds, _pseudo_values(numbers.each))
    if numbers is None or reading.spread == "seeds" or reading.weights is not None:
        return numbers
    deviation = float(np.mean([each[1] for each in found if each is not None]))
    return Value(numbers.mean, deviation, numbers.seeds, numbers.each)


def _over_seeds(found: Sequence[float | None]) -> Value | None:
    numbers = [each for each in found if each is not None]
    if len(numbers) < len(found):
        return None
    with np.errstate(invalid="ignore"):  # two infinite contrasts have no deviation
        spread = float(np.std(numbers, ddof=1)) if len(numbers) > 1 else math.nan
    return Value(float(np.mean(numbers)), spread, len(numbers), tuple(numbers))


def _pseudo_values(numbers: Sequence[float]) -> tuple[float, ...]:
    """Give jackknife's pseudo-values of the deviation, which vary over seeds as a mean's own numbers do."""
    count = len(numbers)
    if count < 3:
        return ()
    whole = float(np.std(numbers, ddof=1))
    without = (float(np.std([*numbers[:place], *numbers[place + 1 :]], ddof=1)) for place in range(count))
    return tuple(count * whole - (count - 1) * each for each in without)


def _paired(name: str, kind: str, mine: Mapping[int, RunNumbers], theirs: Mapping[int, RunNumbers]) -> Value | None:
    """Pair the clients of all seeds: another seed deals samples out anew, so its clients are others.

    A share or a difference is that of all of them, too, and each seed's is kept beside it.
    """
    if any(name not in run.scores for run in (*mine.values(), *theirs.values())):  # one of the two has no such model
        return None
    sign = 1.0 if next(iter(mine.values())).higher_is_better else -1.0
    pairs = [_pairs(run.scores[name], theirs[seed].scores[name]) for seed, run in mine.items()]
    pooled = _compared(kind, np.concatenate(pairs), sign)
    if kind == "pvalue":
        return Value(pooled, math.nan, len(mine))
    each = tuple(_compared(kind, found, sign) for found in pairs)
    return Value(pooled, float(np.std(each, ddof=1)) if len(each) > 1 else math.nan, len(each), each)


def _pairs(mine: Mapping[int, float], theirs: Mapping[int, float]) -> Floats:
    both = [(score, theirs[client]) for client, score in mine.items() if client in theirs]
    return np.array(both, dtype=np.float64).reshape(-1, 2)


def _compared(kind: str, both: Floats, sign: float) -> float:
    if kind == "ahead":
        return float(np.mean(np.heaviside(np.round(sign * (both[:, 0] - both[:, 1]), 12), 0.5)))
    test = evaluation.wilcoxon(both[:, 0], both[:, 1])
    return test.pvalue if kind == "pvalue" else test.median_difference
