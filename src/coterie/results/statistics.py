"""Statistics over several runs: over seeds, client by client, and about the groups that the clients have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd

from coterie import evaluation
from coterie.config import fields as config_fields
from coterie.errors import ConfigError
from coterie.evaluation import OverSeeds, PairedTest
from coterie.results.result import Result, attackers_of, columns_of

At = Literal["final", "best", "best_oracle"]
"""The last round, the best on validation data, or the best on test data."""

_SAMPLES_OF_CLIENTS = ("data", "partition", "clients", "seed", "validation", "test_fraction", "scarcity", "max_test")


def over_seeds(results: Sequence[Result], model: str = "personal", at: At = "final") -> OverSeeds:
    """Sum up runs that differ by nothing but the seed: mean and standard deviation (divisor: one less than the seeds).

    Parameters
    ----------
    results
        The finished runs.
    model
        Which of their models.
    at
        At which round.

    Returns
    -------
    OverSeeds
        Mean and deviation of the runs' means over clients.

    Raises
    ------
    ConfigError
        If there is none, they differ by more than the seed, two have the same, or one has no such number.

    Examples
    --------
    >>> over_seeds([coterie.load(path) for path in paths])  # doctest: +SKIP
    OverSeeds(mean=0.9279, std=0.0031, seeds=5)
    """
    if not results:
        raise ConfigError("a summary over seeds needs at least one run")
    # What is recorded changes no number, but the best round is chosen among those that were evaluated.
    free = {"seed", *config_fields("how"), *config_fields("record")} - {"eval_every"}
    for result in results[1:]:
        _refuse_difference(results[0], result, [key for key in result.config if key not in free])
    seeds = [result.config["seed"] for result in results]
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"the runs have the seeds {', '.join(map(str, seeds))}: each must be there once")
    return evaluation.over_seeds([_mean(result, model, at) for result in results])


def wilcoxon(first: Result, second: Result, model: str = "personal", at: At = "best") -> PairedTest:
    """Compare two methods client by client with the two-sided Wilcoxon signed-rank test.

    Runs whose clients do not hold the same samples, that were measured by different metrics, or that have no such
    number are refused with a ``ConfigError``.

    Parameters
    ----------
    first
        A finished run.
    second
        A finished run of another method with the same clients.
    model
        Which model of each.
    at
        At which round: each run at its own.

    Returns
    -------
    PairedTest
        The outcome, over the clients that have a score in both and attack in neither.
    """
    refuse_other_clients(first, second)
    scores = pd.concat([client_scores(first, model, at), client_scores(second, model, at)], axis=1, join="inner")
    return evaluation.wilcoxon(scores.iloc[:, 0].to_numpy(), scores.iloc[:, 1].to_numpy())


def client_scores(result: Result, model: str = "personal", at: At | int = "final") -> pd.Series[float]:
    """Give the primary metric of each client's test samples.

    Parameters
    ----------
    result
        A finished run. One that has no such number is refused with a ``ConfigError``.
    model
        Which of its models.
    at
        At which round.

    Returns
    -------
    pandas.Series
        A value for each client that has one and does not attack, by client.
    """
    found = {"round": at} if isinstance(at, int) else _model_at(result, model, at)
    of_model = columns_of(result).where(model=model, split="test", metric=result.summary["metric"])
    counted = of_model.after(found.get("round", int(of_model.round.max())))
    counted = counted.only(~np.isin(counted.client, attackers_of(result)))
    return pd.Series(counted.value, index=pd.Index(counted.client, name="client"), name="value")


@dataclass(frozen=True)
class Collaboration:
    """Whether collaboration weights show the known groups of the clients.

    Parameters
    ----------
    contrast
        Mean weight within groups over mean weight between groups, the clients' weights on themselves left out.
    recovery
        Adjusted Rand index between the groups and a clustering of the weights: 1 if it finds them.
    round
        The round of the weights.
    clients
        How many clients have weights in it.
    """

    contrast: float
    recovery: float
    round: int
    clients: int


def collaboration(result: Result, round_number: int | None = None) -> Collaboration:
    """Compare a run's collaboration weights with the groups that its partition knows.

    Parameters
    ----------
    result
        The run, finished or not. One without weights is refused with a ``RunFolderError``.
    round_number
        The round, by default the last that has weights.

    Returns
    -------
    Collaboration
        What was found.

    Raises
    ------
    ConfigError
        If the clients have no known groups.
    """
    shares = result.shares
    if "group" not in shares:
        raise ConfigError(
            f"the run in {result.path} has no known groups: the partition {result.config['partition']!r} of "
            f"{result.config['data']!r} gives none"
        )
    weights = result.weights(round_number)
    both = weights.index.intersection(weights.columns)
    groups = shares.set_index("client")["group"].loc[both].to_numpy()
    matrix = weights.loc[both, both].to_numpy()
    found = evaluation.block_contrast(matrix, groups), evaluation.recovery(matrix, groups)
    return Collaboration(*found, result.weight_rounds[-1] if round_number is None else round_number, len(both))


def refuse_other_clients(first: Result, second: Result) -> None:
    """Refuse runs whose clients do not hold the same samples, or that were measured by different metrics."""
    _refuse_difference(first, second, _SAMPLES_OF_CLIENTS)
    metrics = [result.summary["metric"] for result in (first, second)]
    if metrics[0] != metrics[1]:
        raise ConfigError(f"the runs were measured by {metrics[0]} and by {metrics[1]}: both must be by the same")


def _refuse_difference(one: Result, other: Result, keys: Sequence[str]) -> None:
    for key in keys:
        if one.config.get(key) != other.config.get(key):
            raise ConfigError(
                f"{key} is {one.config.get(key)!r} in {one.path} and {other.config.get(key)!r} in {other.path}: it "
                "must be the same in both"
            )


def _model_at(result: Result, model: str, at: At) -> Mapping[str, Any]:
    found: Mapping[str, Any] | None = (result.summary.get(model) or {}).get(at)
    if found is None or found["mean"] is None:
        raise ConfigError(
            f"the run in {result.path} has no {model} model at its {at.replace('_', ' ')} round: it may have no such "
            "model, or (best) no validation data"
        )
    return found


def _mean(result: Result, model: str, at: At) -> float:
    return float(_model_at(result, model, at)["mean"])
