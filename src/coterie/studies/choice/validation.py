"""How candidates do on samples: on validation samples, the only ones by which any of them is chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.evaluation import stratified_mean
from coterie.results import Result
from coterie.results.result import columns_of
from coterie.runs.storage.answers import ANSWERS
from coterie.runs.storage.metric_columns import MetricColumns

Split = Literal["validation", "test"]

MODELS = ("personal", "global")
"""The models of a run that compete."""

_BEYOND_CHANCE = 2.0  # standard errors
_ROUNDING = 1e-12  # means of counts that are closer than this are equal but for rounding
_BY_ANSWERS = "accuracy"  # the metric that is a mean of right answers, of which each is known


@dataclass(frozen=True)
class Contender:
    """A model of a candidate after a round: how long to train is chosen like all else.

    Parameters
    ----------
    run
        The candidate's run.
    round
        The round.
    model
        Which of its models.
    score
        Its mean over clients on validation samples.
    loss
        The mean over clients of the validation loss, which decides between equals.
    """

    run: str
    round: int
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

    def best(self, runs: set[str]) -> Contender | None:
        """Give what the best of some runs stands by."""
        return next(iter(self.ranking(runs)), None)

    def ranking(self, runs: set[str] | None = None, until: int | None = None) -> list[Contender]:
        """Give what every run stands by, the best first; only some runs, and only rounds until one, if they are given.

        Samples are few, so the best score is often the best by luck. A run stands by its best, or by more rounds that
        are as good: these are how it is compared with others, which have played as many. First of all runs is, of those
        that are as good as the one with the best score, the one with the least loss, which also counts how sure answers
        were and so depends less on luck; then the same of those that are left.
        """
        own: dict[str, list[Contender]] = {}
        for each in self.contenders:
            if (runs is None or each.run in runs) and (until is None or each.round <= until):
                own.setdefault(each.run, []).append(each)
        left = [self.settled(models) for models in own.values()]
        found: list[Contender] = []
        while left:
            best = self._highest(left)
            found.append(min((each for each in left if self.as_good(each, best)), key=lambda each: each.loss))
            left.remove(found[-1])
        return found

    def settled(self, models: Sequence[Contender]) -> Contender:
        """Give the contender that a run stands by: its best, or the same model after more rounds that is as good."""
        best = self._highest(models)
        own = (each for each in models if each.model == best.model and each.round >= best.round)
        return max((each for each in own if self.as_good(each, best)), key=lambda each: each.round)

    def as_good(self, contender: Contender, best: Contender) -> bool:
        r"""Say whether a contender is behind by no more than :math:`\sqrt{\sum_i w_i^2 d_i^2}`, one standard error.

        :math:`d_i` are the differences of the two on the same units, and :math:`w_i` is what a unit counts.
        """
        ahead = self._ahead(contender, best)
        return bool(self._weights @ ahead >= -self._spread(ahead) - _ROUNDING)

    def improved(self, since: int, sides: Iterable[set[str]]) -> bool:
        """Say whether the first of any side is better than the first of the same runs was after a round.

        By two standard errors. The one was picked of as many as the other, so that the luck of being first is in both;
        a single run's own gain would mostly be that of whoever was behind.
        """
        for side in sides:
            then, now = self.ranking(side, since), self.ranking(side)
            if then and now and self._is_better(now[0], then[0]):
                return True
        return False

    def climbs(self, since: int, side: set[str]) -> bool:
        """Say whether a run that is as good as the first of its side is better than it was itself after a round."""
        first = self.best(side)
        for run in side:
            then, now = self.ranking({run}, since), self.best({run})
            if first and then and now and self.as_good(now, first) and self._is_better(now, then[0]):
                return True
        return False

    def _is_better(self, contender: Contender, other: Contender) -> bool:
        ahead = self._ahead(contender, other)
        return bool(self._weights @ ahead > _BEYOND_CHANCE * self._spread(ahead) + _ROUNDING)

    def _highest(self, contenders: Sequence[Contender]) -> Contender:
        return max(contenders, key=lambda each: (self.sign * each.score, -each.loss))

    def _spread(self, ahead: NDArray[np.float64]) -> float:
        return float(np.sqrt(self._weights**2 @ ahead**2))

    def _ahead(self, contender: Contender, other: Contender) -> NDArray[np.float64]:
        return self.units[:, self.place(contender)] - self.units[:, self.place(other)]

    @cached_property
    def _weights(self) -> NDArray[np.float64]:
        """What each unit counts in a mean over clients of their own means."""
        _, place, counts = np.unique(self.strata, return_inverse=True, return_counts=True)
        return np.asarray(1.0 / (len(counts) * counts[place]), dtype=np.float64)

    def place(self, contender: Contender) -> int:
        return self._places[contender]

    @cached_property
    def _places(self) -> dict[Contender, int]:
        return {each: number for number, each in enumerate(self.contenders)}


@dataclass
class ScoreReader:
    """Reads what finished runs gave on validation samples, wherever a stage ended; nothing else is looked at.

    Parameters
    ----------
    folder
        The folder of all runs.
    """

    folder: Path
    _read: dict[str, _ReadRun] = field(default_factory=dict)

    def read(self, names: Iterable[str]) -> ValidationScores:
        """Read what some runs gave; of one that was read before, what is new."""
        found = {}
        for name in names:
            result = Result(self.folder / name)
            before = self._read.get(name)
            if before is None or before.rounds != int(result.summary["rounds"]):
                self._read[name] = _read_run(name, result, {} if before is None else before.columns)
            found[name] = self._read[name]
        return _scores(found)


def read_scores(results: Mapping[str, Result]) -> ValidationScores:
    """Read what finished runs gave on validation samples, wherever a stage ended; nothing else is looked at."""
    return _scores({name: _read_run(name, result, {}) for name, result in results.items()})


class _Key(NamedTuple):
    run: str
    round: int
    model: str


_Column = tuple[float, "pd.Series[float]"]


@dataclass(frozen=True)
class _ReadRun:
    """What a run gave after each round on validation samples: the mean loss, and a value for each unit."""

    path: Path
    rounds: int
    metric: str
    sign: float
    by_samples: bool
    columns: dict[_Key, _Column]


def _read_run(name: str, result: Result, known: Mapping[_Key, _Column]) -> _ReadRun:
    summary = result.summary
    rounds, metric = int(summary["rounds"]), str(summary["metric"])
    by_samples = metric == _BY_ANSWERS and (result.path / ANSWERS["validation"]).exists()
    columns = dict[_Key, _Column]()
    losses = _validation_losses(columns_of(result))
    for round_number in sorted({each for each, _ in losses}):
        keys = {model: _Key(name, round_number, model) for model in MODELS if (round_number, model) in losses}
        new = [model for model, key in keys.items() if key not in known]
        units = read_units(result, round_number, new, "validation", by_samples) if new else {}
        for model, key in keys.items():
            columns[key] = known[key] if key in known else (losses[round_number, model], units[model])
    sign = 1.0 if summary["higher_is_better"] else -1.0
    return _ReadRun(result.path, rounds, metric, sign, by_samples, columns)


def _validation_losses(metrics: MetricColumns) -> dict[tuple[int, str], float]:
    """Give the mean over clients of the validation loss of each model that competes, after each round."""
    found = {}
    for model in MODELS:
        own = metrics.where(split="validation", metric="loss", model=model)
        own = own.only(~np.isnan(own.value))
        for round_number in np.unique(own.round).tolist():
            found[round_number, model] = float(own.after(round_number).value.mean())
    return found


def _scores(runs: Mapping[str, _ReadRun]) -> ValidationScores:
    if not runs:
        raise ConfigError("every candidate became NaN or infinite: begin anew with lower learning rates (--tune lr=…)")
    first = next(iter(runs.values()))
    found = {key: column for run in runs.values() for key, column in run.columns.items()}
    if not found:
        raise ConfigError(
            f"the run in {first.path} has no validation samples to choose by: hold more out (--validation), or leave "
            "clients with few samples out"
        )
    columns = [column for _, column in found.values()]
    index = columns[0].index
    if any(not column.index.equals(index) for column in columns):
        raise ConfigError("the candidates were measured on different validation samples: begin anew in another folder")
    units = np.column_stack([column.to_numpy(dtype=np.float64) for column in columns]).astype(np.float64)
    strata = index.to_numpy(dtype=np.int64) if first.by_samples else np.zeros(len(index), dtype=np.int64)
    means = first.sign * stratified_mean(units, strata)
    contenders = tuple(
        Contender(*key, float(mean), loss) for (key, (loss, _)), mean in zip(found.items(), means, strict=True)
    )
    return ValidationScores(contenders, units, strata, first.by_samples, first.metric, first.sign)


def read_units(
    result: Result, round_number: int, models: Sequence[str], split: Split, by_samples: bool
) -> dict[str, pd.Series[float]]:
    """Give what each of some models gave after a round, by client and such that higher is better.

    For every sample 1 if it was answered rightly, else 0; or each client's metric.
    """
    if not by_samples:
        sign = 1.0 if result.summary["higher_is_better"] else -1.0
        frame, metric = result.metrics, str(result.summary["metric"])
        found = frame[(frame["split"] == split) & (frame["metric"] == metric) & (frame["round"] == round_number)]
        return {model: sign * found[found["model"] == model].set_index("client")["value"] for model in models}
    answers = result.answers_after(round_number, split)
    if answers is None:
        raise ConfigError(f"the run in {result.path} has lost its answers after round {round_number}: begin anew")
    of, clients = answers["model"].to_numpy(), answers["client"].to_numpy()
    right = (answers["answer"].to_numpy() > 0).astype(np.float64)
    return {model: pd.Series(right[own], index=clients[own]) for model in models for own in (of == model,)}
