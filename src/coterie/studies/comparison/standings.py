"""The result of a comparison: means over seeds, the best of each column, and who differs from it beyond chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import numpy as np
import pandas as pd

from coterie import evaluation
from coterie.algorithms import registry
from coterie.errors import ConfigError
from coterie.results import MODELS, At, ClientGains, Result, client_scores, gains, over_seeds
from coterie.results.client_gains import REFERENCES
from coterie.results.result import columns_of
from coterie.studies.comparison.plan import ComparisonPlan

Run = TypeVar("Run")

SHOWN = tuple(model for model in MODELS if not model.endswith("oracle"))
"""Models that have a column: what was chosen on test data has none."""

MARKS = ((0.001, "***"), (0.01, "**"), (0.05, "*"))
"""Below which p-value a number carries which mark."""


@dataclass(frozen=True)
class MethodScore:
    """The result of one model of a method.

    Parameters
    ----------
    mean
        Mean over seeds of the mean over clients.
    std
        Standard deviation over seeds (divisor: one less than the seeds), NaN for one.
    best
        Whether no other method has a better mean.
    pvalue
        Of the two-sided Wilcoxon test against the best, over all clients of all seeds; NaN for the best itself.
    clients
        Over how many clients, of all seeds together, the mean after the last round is.
    of_clients
        How many clients have test samples; for some of them the metric may be undefined.
    """

    mean: float
    std: float
    best: bool
    pvalue: float
    clients: int = 0
    of_clients: int = 0

    @property
    def mark(self) -> str:
        """Stars for a difference from the best that chance hardly explains."""
        return next((mark for below, mark in MARKS if self.pvalue < below), "")


@dataclass(frozen=True)
class Tuned:
    """What tuning chose for one method at one point of the grid.

    Parameters
    ----------
    setting
        The point of the grid.
    method
        The method, as people see it called.
    chosen
        The values that were taken; ``None`` if every candidate diverged.
    scores
        For each candidate its values and its mean on validation data over clients and seeds, NaN if it diverged.
    """

    setting: dict[str, Any]
    method: str
    chosen: dict[str, Any] | None
    scores: list[tuple[dict[str, Any], float]]

    def sentence(self) -> str:
        """Say what was chosen, and from what.

        Returns
        -------
        str
            One line.
        """
        where = f" at {format_values(self.setting)}" if self.setting else ""
        found = ", ".join(
            f"{format_values(values)}: {'diverged' if math.isnan(score) else f'{score:.4f}'}"
            for values, score in self.scores
        )
        chosen = "nothing" if self.chosen is None else format_values(self.chosen)
        edges = "".join(f"; {edge}" for edge in self.edges)
        return f"{self.method}{where}: chose {chosen} on validation data ({found}){edges}"

    @property
    def edges(self) -> tuple[str, ...]:
        """Which chosen numbers are the least or the greatest that were tried: a better one may lie beyond."""
        found = []
        for name, value in (self.chosen or {}).items():
            tried = [values[name] for values, _ in self.scores]
            in_order = all(isinstance(each, int | float) and not isinstance(each, bool) for each in tried)
            if in_order and min(tried) < max(tried) and value in (min(tried), max(tried)):
                which = "least" if value == min(tried) else "greatest"
                found.append(f"{name}={value} is the {which} that was tried")
        return tuple(found)


@dataclass(frozen=True)
class Standing:
    """The result of one method at one point of the grid.

    Parameters
    ----------
    setting
        The point of the grid.
    method
        The method's name in the plan.
    title
        What people see it called.
    metric
        What was measured; empty if every run diverged.
    tuned
        Parameters that tuning chose.
    scores
        The result of each model that the method has; none if it diverged.
    gains
        What clients gain over each reference in the comparison (``local``, ``fedavg_ft``), by the reference's title;
        of the personal models, or of the global one where there are none.
    runs
        The runs that count, one for each seed.
    """

    setting: dict[str, Any]
    method: str
    title: str
    metric: str
    tuned: dict[str, Any]
    scores: dict[str, MethodScore]
    gains: dict[str, ClientGains] = field(default_factory=dict)
    runs: list[Result] = field(default_factory=list)

    @property
    def place(self) -> str:
        """Which row it is: the method's title, and the point of the grid."""
        return f"{self.title} at {format_values(self.setting)}" if self.setting else self.title


@dataclass(frozen=True)
class Standings:
    """A comparison's result.

    Parameters
    ----------
    rows
        A row for each method at each point of the grid, by point and then by method.
    tuning
        What was tuned.
    seeds
        How many seeds there are.
    at
        At which round the numbers are.
    diverged
        Of each method that has no result in a setting, by :attr:`Standing.place`, how a run of it diverged.
    failed
        Likewise what a run of it failed with.
    """

    rows: list[Standing]
    tuning: list[Tuned]
    seeds: int
    at: At
    diverged: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def models(self) -> list[str]:
        """The models that some method has, in the order of columns."""
        return [model for model in SHOWN if any(model in row.scores for row in self.rows)]

    @property
    def references(self) -> list[str]:
        """The titles of the methods that others are compared with client by client."""
        # A method that is no reference itself is compared with all of them, in their order.
        rows = sorted(self.rows, key=lambda row: -len(row.gains))
        return list(dict.fromkeys(reference for row in rows for reference in row.gains))


def format_values(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in values.items())


def standings(plan: ComparisonPlan, results: Mapping[str, Result | None], at: At = "final") -> Standings:
    """Compute the result of a comparison from its runs by name, ``None`` for one that diverged."""
    rows, tuning = [], []
    for setting in plan.settings:
        runs: dict[str, list[Result]] = {}
        tuned: dict[str, dict[str, Any]] = {}
        for method in plan.methods:
            runs[method], choice = chosen_runs(plan, results, setting, method, at)
            tuning += [] if choice is None else [choice]
            tuned[method] = {} if choice is None else choice.chosen or {}
        scores, won = _scores(runs, at), _gains(plan, runs, at)
        for method, found in runs.items():
            metric = found[0].summary["metric"] if found else ""
            rows.append(
                Standing(
                    setting, method, plan.titles[method], metric, tuned[method], scores[method], won[method], found
                )
            )
    return Standings(rows, tuning, len(plan.seeds), at)


def chosen_runs(
    plan: ComparisonPlan,
    results: Mapping[str, Result | None],
    setting: Mapping[str, Any],
    method: str,
    at: At = "final",
) -> tuple[list[Result], Tuned | None]:
    """Give the runs that count for a method at one point of the grid.

    Parameters
    ----------
    plan
        The plan.
    results
        Its runs by name, ``None`` for one that diverged.
    setting
        The point of the grid.
    method
        The method's name in the plan.
    at
        At which round candidates are compared, where there are several.

    Returns
    -------
    runs
        One for each seed, of the candidate that tuning chose; none if a seed of every candidate diverged.
    tuned
        What was chosen, ``None`` if there was nothing to choose.
    """
    return choose(
        plan, results, setting, method, partial(validation_score, at=at), lambda run: run.summary["higher_is_better"]
    )


def choose(
    plan: ComparisonPlan,
    runs: Mapping[str, Run | None],
    setting: Mapping[str, Any],
    method: str,
    validation: Callable[[Run], float],
    higher_is_better: Callable[[Run], bool],
) -> tuple[list[Run], Tuned | None]:
    """Give the runs that count for a method as :func:`chosen_runs` does, of whatever is known of each run."""
    candidates = {key: [runs[run.name] for run in found] for key, found in plan.of(dict(setting), method).items()}
    whole = {key: [run for run in found if run is not None] for key, found in candidates.items() if None not in found}
    key = next(iter(whole), None)
    tuned = None
    if () not in candidates:
        scored = {key: float(np.mean([validation(run) for run in found])) for key, found in whole.items()}
        if scored:  # the first of equals
            sign = 1.0 if higher_is_better(next(iter(whole.values()))[0]) else -1.0
            key = max(scored, key=lambda each: sign * scored[each])
        scores = [(dict(each), scored.get(each, math.nan)) for each in candidates]
        tuned = Tuned(dict(setting), plan.titles[method], None if key is None else dict(key), scores)
    return ([] if key is None else whole[key]), tuned


def validation_score(result: Result, at: At, wanted: str | None = None) -> float:
    """Give the mean over honest clients on validation data at the round that is shown.

    Of the model that is wanted; of the method's first one if none is, or the method has no such model.
    """
    summary = result.summary
    model = next(model for model in (wanted, *SHOWN) if model is not None and summary.get(model))
    honest = result.shares.loc[result.shares["role"] == "honest", "client"].to_numpy()
    measured = columns_of(result).where(model=model, split="validation", metric=summary["metric"], clients=honest)
    if not len(measured):
        raise ConfigError(f"the run in {result.path} has no validation data to choose by: its clients hold too little")
    number = int(measured.round.max()) if at == "final" else summary[model][at]["round"]
    return float(np.mean(measured.after(number).value))


def _scores(runs: Mapping[str, list[Result]], at: At) -> dict[str, dict[str, MethodScore]]:
    scores: dict[str, dict[str, MethodScore]] = {method: {} for method in runs}
    for model in SHOWN:
        having = {method: found for method, found in runs.items() if found and all(_has(r, model, at) for r in found)}
        if not having:
            continue
        sums = {method: over_seeds(found, model, at) for method, found in having.items()}
        sign = 1.0 if next(iter(having.values()))[0].summary["higher_is_better"] else -1.0
        top = max(sign * found.mean for found in sums.values())
        winners = [method for method, found in sums.items() if sign * found.mean == top]
        best = _pooled(having[winners[0]], model, at)
        for method, found in having.items():
            pvalue = math.nan if method in winners else _pvalue(_pooled(found, model, at), best)
            counted, there = (sum(r.summary[model].get(key, 0) for r in found) for key in ("clients", "of_clients"))
            scores[method][model] = MethodScore(
                sums[method].mean, sums[method].std, method in winners, pvalue, counted, there
            )
    return scores


def _gains(plan: ComparisonPlan, runs: Mapping[str, list[Result]], at: At) -> dict[str, dict[str, ClientGains]]:
    """Compare every method with the references among them, at one point of the grid."""
    algorithms = {run.method: registry.get(run.config.algorithm).name for run in plan.runs}
    found: dict[str, dict[str, ClientGains]] = {method: {} for method in runs}
    for reference in REFERENCES:
        # Where a plan has several forms of one, the first is the reference.
        against = next((method for method in runs if algorithms[method] == reference and runs[method]), None)
        for method, own in runs.items():
            if against is not None and method != against and own:
                found[method][plan.titles[against]] = gains(own, runs[against], at=at)
    return found


def _has(result: Result, model: str, at: At) -> bool:
    found = (result.summary.get(model) or {}).get(at)
    return found is not None and found["mean"] is not None


def _pooled(results: Sequence[Result], model: str, at: At) -> dict[int, pd.Series[float]]:
    """Give each client's score by seed: another one deals samples out anew, so its clients are others."""
    return {int(result.config["seed"]): client_scores(result, model, at) for result in results}


def _pvalue(one: Mapping[int, pd.Series[float]], best: Mapping[int, pd.Series[float]]) -> float:
    """Compare two methods over the clients of all seeds that have a score of both."""
    pairs = []
    for seed in sorted(one.keys() & best.keys()):
        own, other = one[seed], best[seed]
        _, mine, theirs = np.intersect1d(own.index.to_numpy(), other.index.to_numpy(), return_indices=True)
        pairs.append((own.to_numpy()[mine], other.to_numpy()[theirs]))
    first, second = (np.concatenate(side) for side in zip(*pairs, strict=True)) if pairs else (np.zeros(0),) * 2
    return evaluation.wilcoxon(first, second).pvalue
