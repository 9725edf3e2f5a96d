"""The numbers of a part, read off the runs of its comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from coterie import evaluation
from coterie.errors import ConfigError, RunFolderError
from coterie.evaluation import METRICS
from coterie.evaluation.fairness import worst_decile
from coterie.results import At, Result, client_scores, collaboration
from coterie.studies.comparison import ComparisonPlan, Tuned, chosen_runs
from coterie.studies.recipes.cells import CellName
from coterie.studies.recipes.plans import settings_of
from coterie.studies.recipes.schema import Reading, RecipePart

Floats = NDArray[np.float64]


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
        holds a deviation, jackknife's pseudo-values; nothing for a test that pools the seeds.
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


def read_values(part: RecipePart, plan: ComparisonPlan, results: Mapping[str, Result | None], unit: str) -> PartValues:
    """Read all numbers of a part off its runs by name, ``None`` for one that diverged."""
    values: dict[CellName, Value] = {}
    diverged: set[tuple[str, str]] = set()
    tuned: list[Tuned] = []
    for label, setting in settings_of(part, plan).items():
        runs: dict[str, list[Result]] = {}
        for method in plan.methods:
            runs[method], choice = chosen_runs(plan, results, setting, method, part.at)
            tuned += [] if choice is None else [choice]
            if not runs[method]:
                diverged.add((label, method))
        for name, reading in part.readings.items():
            for method in plan.methods:
                found = _value(reading, method, runs, part.at)
                if found is not None:
                    factor = factor_of(reading, unit)
                    cell = CellName(part.name, label, method, name)
                    each = tuple(number * factor for number in found.each)
                    values[cell] = Value(found.mean * factor, found.std * factor, found.seeds, each)
    return PartValues(values, frozenset(diverged), tuple(tuned))


def factor_of(reading: Reading, unit: str) -> float:
    """Give the factor from what runs record to what tables show: 100 for accuracies in percent, as a rule."""
    if reading.scale is not None:
        return reading.scale
    accuracy = reading.metric != "loss" and reading.weights is None and reading.paired in (None, "difference")
    if unit != "percent" or not accuracy:
        return 1.0
    return 100.0**2 if reading.over == "variance" else 100.0


def _value(reading: Reading, method: str, runs: Mapping[str, Sequence[Result]], at: At) -> Value | None:
    mine = runs[method]
    if not mine:
        return None
    if reading.weights is not None:
        return _over_seeds([_weights(reading.weights, result) for result in mine])
    when = at if reading.at is None else reading.at
    if reading.paired is not None and reading.against is not None:
        theirs = runs.get(reading.against, ())
        if reading.against == method or not theirs or not isinstance(when, str) or when == "mean":
            return None
        models = [reading.models.get(each, reading.model) for each in (method, reading.against)]
        return _paired(reading.paired, mine, theirs, models, when)
    model = reading.models.get(method, reading.model)
    found = [_statistics(reading, result, model, when) for result in mine]
    numbers = _over_seeds([None if each is None else each[0] for each in found])
    if numbers is not None and reading.of_seeds == "std":
        return Value(numbers.std, math.nan, numbers.seeds, _pseudo_values(numbers.each))
    if numbers is None or reading.spread == "seeds":
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


def _weights(kind: str, result: Result) -> float | None:
    try:
        found = collaboration(result)
    except (ConfigError, RunFolderError):  # the method weighs nobody, or nobody knows groups
        return None
    return found.contrast if kind == "contrast" else found.recovery


def _paired(kind: str, mine: Sequence[Result], theirs: Sequence[Result], models: Sequence[str], at: At) -> Value | None:
    """Pair the clients of all seeds: another seed deals samples out anew, so its clients are others."""
    try:
        one, other = (
            pd.concat({result.config["seed"]: client_scores(result, model, at) for result in results})
            for results, model in zip((mine, theirs), models, strict=True)
        )
    except ConfigError:  # one of the two has no such model
        return None
    both = pd.concat([one, other], axis=1, join="inner").to_numpy(dtype=np.float64)
    test = evaluation.wilcoxon(both[:, 0], both[:, 1])
    sign = 1.0 if mine[0].summary["higher_is_better"] else -1.0
    ahead = float(np.mean(np.heaviside(np.round(sign * (both[:, 0] - both[:, 1]), 12), 0.5)))
    number = {"pvalue": test.pvalue, "ahead": ahead, "difference": test.median_difference}[kind]
    return Value(number, math.nan, len(mine))


def _statistics(reading: Reading, result: Result, model: str, when: At | str | float) -> tuple[float, float] | None:
    """Give the statistic over a run's clients, and their deviation."""
    metric = _metric(reading, result)
    frame = result.metrics
    attackers = result.shares.loc[result.shares["role"] == "attacker", "client"]
    chosen = frame[(frame["model"] == model) & (frame["split"] == reading.split) & (frame["metric"] == metric)]
    chosen = chosen[~chosen["client"].isin(attackers)]
    numbers, values = chosen["round"].to_numpy(), chosen["value"].to_numpy(dtype=np.float64)
    by_round = {int(number): values[numbers == number] for number in np.unique(numbers)}
    if not by_round:
        return None
    rounds = sorted(by_round) if when == "mean" else [_round(result, model, when, sorted(by_round))]
    if any(number not in by_round for number in rounds):
        return None
    higher = METRICS[metric].higher_is_better if metric in METRICS else metric != "loss"
    statistics = [_over_clients(reading.over, by_round[number], higher) for number in rounds]
    return float(np.mean(statistics)), float(np.mean([np.std(by_round[number]) for number in rounds]))


def _metric(reading: Reading, result: Result) -> str:
    name = reading.metric or str(result.summary["metric"])
    kind, _, fraction = name.partition(" ")
    return f"{kind} {float(fraction)}" if fraction else name


def _round(result: Result, model: str, when: At | str | float, rounds: Sequence[int]) -> int:
    if isinstance(when, float):
        wanted = math.ceil(when * int(result.config["rounds"]) - 1e-9)
        return next((number for number in rounds if number >= wanted), rounds[-1])
    if when == "final":
        return rounds[-1]
    best = (result.summary.get(model) or {}).get(when)
    return -1 if best is None else int(best["round"])


def _over_clients(over: str, values: Floats, higher_is_better: bool) -> float:
    if over == "worst":
        return float(values.min() if higher_is_better else values.max())
    if over == "worst_tenth":
        return worst_decile(torch.tensor(values), higher_is_better)
    found = {"mean": values.mean(), "std": values.std(), "variance": values.var(), "median": np.median(values)}
    return float(found[over])
