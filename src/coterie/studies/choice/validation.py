"""How candidates do on samples: on validation samples, the only ones by which any of them is chosen."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from coterie.errors import ConfigError
from coterie.evaluation import stratified_mean
from coterie.results import Result

Split = Literal["validation", "test"]

MODELS = ("personal", "global")
"""The models of a run that compete."""

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
        """Give the contender that the best of some runs stands by."""
        return next((each for each in self.ranking() if each.run in runs), None)

    def settled(self, best: Contender) -> Contender:
        r"""Give the contender that a run stands by: its best, or the latest after more rounds that is as good.

        Rounds are many and samples few, so the best of them is often so by luck. As good is what is behind by no more
        than one :math:`\sqrt{\sum_i w_i^2 d_i^2}`, where :math:`d_i` are the differences of the two on the same units.
        """
        _, place, counts = np.unique(self.strata, return_inverse=True, return_counts=True)
        weights = 1.0 / (len(counts) * counts[place])
        own = self.units[:, self.place(best)]
        for each in sorted(self.contenders, key=lambda other: -other.round):
            if (each.run, each.model) == (best.run, best.model) and each.round > best.round:
                behind = own - self.units[:, self.place(each)]
                if weights @ behind <= np.sqrt(weights**2 @ behind**2) + 1e-12:
                    return each
        return best

    def place(self, contender: Contender) -> int:
        return self.contenders.index(contender)

    def ranking(self) -> list[Contender]:
        """Give what every run stands by, the best first."""
        return list(self._ranking)

    @cached_property
    def _ranking(self) -> list[Contender]:
        found: dict[str, Contender] = {}
        for each in self._in_order(self.contenders):
            if each.run not in found:
                found[each.run] = self.settled(each)
        return self._in_order(found.values())

    def _in_order(self, contenders: Iterable[Contender]) -> list[Contender]:
        """Put the best first; of equals the one with the lower loss, then the one planned first."""
        return sorted(contenders, key=lambda each: (-round(self.sign * each.score, 12), each.loss))


def read_scores(results: Mapping[str, Result]) -> ValidationScores:
    """Read what finished runs gave on validation samples, wherever a stage ended; nothing else is looked at."""
    if not results:
        raise ConfigError("every candidate became NaN or infinite: begin anew with lower learning rates (--tune lr=…)")
    first = next(iter(results.values()))
    metric, sign = str(first.summary["metric"]), 1.0 if first.summary["higher_is_better"] else -1.0
    columns: list[pd.Series[float]] = []
    kept: list[tuple[str, int, str]] = []
    losses: list[float] = []
    by_samples = metric == _BY_ANSWERS and first.answers is not None
    for name, result in results.items():
        frame = result.metrics
        on_validation = frame[(frame["split"] == "validation") & (frame["metric"] == "loss")]
        for round_number in sorted({int(each) for each in on_validation["round"]}):
            for model in MODELS:
                own = on_validation[(on_validation["round"] == round_number) & (on_validation["model"] == model)]
                if not own.empty:
                    kept.append((name, round_number, model))
                    losses.append(float(own["value"].mean()))
                    columns.append(read_units(result, round_number, model, "validation", by_samples))
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
    contenders = tuple(Contender(*who, float(mean), loss) for who, mean, loss in zip(kept, means, losses, strict=True))
    return ValidationScores(contenders, units, strata, by_samples, metric, sign)


def read_units(result: Result, round_number: int, model: str, split: Split, by_samples: bool) -> pd.Series[float]:
    """Give what a model gave after a round, by client and such that higher is better.

    For every sample 1 if it was answered rightly, else 0; or each client's metric.
    """
    if not by_samples:
        sign = 1.0 if result.summary["higher_is_better"] else -1.0
        frame, metric = result.metrics, str(result.summary["metric"])
        found = frame[(frame["model"] == model) & (frame["split"] == split) & (frame["metric"] == metric)]
        values: pd.Series[float] = found[found["round"] == round_number].set_index("client")["value"]
        return sign * values
    answers = result.answers_after(round_number, split)
    if answers is None:
        raise ConfigError(f"the run in {result.path} has lost its answers after round {round_number}: begin anew")
    own = answers[answers["model"] == model]
    right: pd.Series[float] = (own["answer"] > 0).astype(np.float64).set_axis(own["client"].to_numpy())
    return right
