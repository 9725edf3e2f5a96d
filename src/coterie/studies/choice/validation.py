"""How candidates do on samples: on validation samples, the only ones by which any of them is chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.evaluation import stratified_mean
from coterie.results import Result

Split = Literal["validation", "test"]

MODELS = ("personal", "global")
"""The models of a run that compete; the first of equals is taken."""

_BY_ANSWERS = "accuracy"  # the metric that is a mean of right answers, of which each is known


@dataclass(frozen=True)
class Contender:
    """A model of a candidate.

    Parameters
    ----------
    run
        The candidate's run.
    model
        Which of its models.
    score
        Its mean over clients on validation samples.
    loss
        The mean over clients of the validation loss, which decides between equals.
    """

    run: str
    model: str
    score: float
    loss: float


@dataclass(frozen=True)
class ValidationScores:
    """What all contenders gave on the same validation samples.

    Parameters
    ----------
    contenders
        The contenders.
    units
        A row for each unit, a column for each contender, such that higher is better: a sample's answer (1 if it is
        right), or a client's metric.
    strata
        The client of each sample; one stratum for all where clients are the units.
    by_samples
        Whether units are samples: so with accuracy, of which single answers are known.
    metric
        What was measured.
    sign
        1 if higher is better, else -1.
    """

    contenders: tuple[Contender, ...]
    units: NDArray[np.float64]
    strata: NDArray[np.int64]
    by_samples: bool
    metric: str
    sign: float

    @cached_property
    def best_first(self) -> list[Contender]:
        """The contenders, the best first; of equals the one with the lower loss, then the one planned first."""
        return sorted(self.contenders, key=lambda each: (-round(self.sign * each.score, 12), each.loss))

    def best(self, runs: Mapping[str, Any] | set[str]) -> Contender | None:
        """Give the best contender of some runs."""
        return next((each for each in self.best_first if each.run in runs), None)

    def place(self, contender: Contender) -> int:
        return self.contenders.index(contender)

    def ranking(self) -> list[Contender]:
        """Give the best contender of every run, the best first."""
        found: dict[str, Contender] = {}
        for each in self.best_first:
            found.setdefault(each.run, each)
        return list(found.values())


def read_scores(results: Mapping[str, Result]) -> ValidationScores:
    """Read what finished runs gave on validation samples after their last rounds; nothing else of them is looked at."""
    if not results:
        raise ConfigError("every candidate became NaN or infinite: begin anew with lower learning rates (--tune lr=…)")
    first = next(iter(results.values()))
    metric, sign = str(first.summary["metric"]), 1.0 if first.summary["higher_is_better"] else -1.0
    columns: list[pd.Series[float]] = []
    kept: list[tuple[str, str, float]] = []
    by_samples = metric == _BY_ANSWERS and all(each.validation_answers is not None for each in results.values())
    for name, result in results.items():
        for model in MODELS:
            losses = _of_clients(result, model, "validation", "loss")
            if losses.empty:
                continue
            columns.append(read_units(result, model, "validation", by_samples))
            kept.append((name, model, float(losses.mean())))
    if not columns:
        raise ConfigError(
            f"the run in {first.path} has no validation samples to choose by: hold more out (--validation), or leave "
            "clients with few samples out"
        )
    index = columns[0].index
    if any(not column.index.equals(index) for column in columns):
        raise ConfigError("the candidates were measured on different validation samples: begin anew in another folder")
    units = np.column_stack([column.to_numpy(dtype=np.float64) for column in columns]).astype(np.float64)
    strata = index.to_numpy(dtype=np.int64) if by_samples else np.zeros(len(index), dtype=np.int64)
    means = sign * stratified_mean(units, strata)
    contenders = tuple(Contender(*both[:2], float(mean), both[2]) for both, mean in zip(kept, means, strict=True))
    return ValidationScores(contenders, units, strata, by_samples, metric, sign)


def read_units(result: Result, model: str, split: Split, by_samples: bool) -> pd.Series[float]:
    """Give what a model gave after the last round, by client and such that higher is better.

    For every sample 1 if it was answered rightly, else 0; or each client's metric.
    """
    if not by_samples:
        sign = 1.0 if result.summary["higher_is_better"] else -1.0
        return sign * _of_clients(result, model, split, str(result.summary["metric"]))
    answers = result.answers if split == "test" else result.validation_answers
    assert answers is not None
    own = answers[answers["model"] == model]
    right: pd.Series[float] = (own["answer"] > 0).astype(np.float64).set_axis(own["client"].to_numpy())
    return right


def _of_clients(result: Result, model: str, split: Split, metric: str) -> pd.Series[float]:
    """Give a metric of each client's samples after the last round, by client."""
    frame = result.metrics
    own = frame[(frame["model"] == model) & (frame["split"] == split) & (frame["metric"] == metric)]
    last = own[own["round"] == int(result.summary["rounds"])]
    values: pd.Series[float] = last.set_index("client")["value"]
    return values
