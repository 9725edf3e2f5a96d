"""What a part's table takes from one run: a few numbers, small enough to be kept with the results.

Runs of a part that were played at different times are joined by these numbers, where their folders are long gone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.errors import ConfigError, RunFolderError
from coterie.evaluation import METRICS
from coterie.evaluation.fairness import worst_decile
from coterie.results import At, Result, client_scores, collaboration
from coterie.studies.comparison import ComparisonPlan, PlannedRun
from coterie.studies.comparison.standings import validation_score
from coterie.studies.recipes.schema import Reading, RecipePart

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RunNumbers:
    """The numbers of one run.

    Parameters
    ----------
    higher_is_better
        Whether the metric is one that should grow.
    validation
        What tuning compares candidates by; ``None`` for a method that is not tuned.
    readings
        For each reading the statistic over clients, and their deviation; nothing of a model that the method lacks.
    scores
        For each reading that pairs methods the score of every client.
    """

    higher_is_better: bool
    validation: float | None = None
    readings: dict[str, tuple[float, float]] = field(default_factory=dict)
    scores: dict[str, dict[int, float]] = field(default_factory=dict)

    def plain(self) -> dict[str, Any]:
        """Give them as plain JSON types, in which ``parse`` finds them again bit for bit."""
        return {
            "higher_is_better": self.higher_is_better,
            **({} if self.validation is None else {"validation": _written(self.validation)}),
            "readings": {name: [_written(value) for value in pair] for name, pair in self.readings.items()},
            **({"scores": self.scores} if self.scores else {}),
        }

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> RunNumbers:
        """Read what ``plain`` gave."""
        validation = values.get("validation")
        return cls(
            bool(values["higher_is_better"]),
            None if validation is None else float(validation),
            {name: (float(number), float(spread)) for name, (number, spread) in values["readings"].items()},
            {
                name: {int(client): float(score) for client, score in found.items()}
                for name, found in values.get("scores", {}).items()
            },
        )


def _written(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)  # JSON has no other word for an infinite contrast


def numbers_of_runs(
    part: RecipePart, plan: ComparisonPlan, results: Mapping[str, Result | None]
) -> dict[str, RunNumbers | None]:
    """Read the numbers of those of a part's runs that there are, by name, ``None`` for one that diverged."""
    there = [run for run in plan.runs if run.name in results]
    return {run.name: None if (found := results[run.name]) is None else _numbers(part, run, found) for run in there}


def _numbers(part: RecipePart, run: PlannedRun, result: Result) -> RunNumbers:
    readings: dict[str, tuple[float, float]] = {}
    scores: dict[str, dict[int, float]] = {}
    for name, reading in part.readings.items():
        when, model = part.at if reading.at is None else reading.at, reading.models.get(run.method, reading.model)
        if reading.weights is not None:
            weight = _weights(reading.weights, result)
            found = None if weight is None else (weight, math.nan)
        elif reading.paired is not None and reading.against is not None:
            scores |= _scores(name, result, model, when)
            continue
        else:
            found = _statistics(reading, result, model, when)
        readings |= {} if found is None else {name: found}
    first = next(iter(part.readings.values()))
    tuned_by = part.tuned_by or first.models.get(run.method, first.model)
    validation = validation_score(result, part.at, tuned_by) if run.candidate else None
    return RunNumbers(bool(result.summary["higher_is_better"]), validation, readings, scores)


def _scores(name: str, result: Result, model: str, when: At | str | float) -> dict[str, dict[int, float]]:
    """Give every client's score, under the reading's name; nothing where the method has no such model."""
    if when not in ("final", "best", "best_oracle"):
        return {}
    try:
        found = client_scores(result, model, when)
    except ConfigError:
        return {}
    return {name: dict(zip(map(int, found.index), map(float, found), strict=True))}


def _weights(kind: str, result: Result) -> float | None:
    try:
        found = collaboration(result)
    except (ConfigError, RunFolderError):  # the method weighs nobody, or nobody knows groups
        return None
    return found.contrast if kind == "contrast" else found.recovery


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
