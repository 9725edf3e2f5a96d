"""The result of a run in short, read off its metrics.

::

    {"algorithm", "seed", "rounds", "metric", "higher_is_better", "best_chosen_on",
     "personal": {"final": {"mean", "std", "worst"},
                  "best": {"mean", "round"} or null, "best_oracle": {"mean", "round"} or null,
                  "clients", "of_clients",
                  "fairness": {"worst_decile", "loss_variance", "loss_variance_sample"}} or null,
     "global": the same or null, and "hybrid", "hybrid_oracle", "newcomer" where they were measured,
     "matrix": {"round", "metric", "clients", "samples", "l_acc": {"mean", "std"}, "g_acc": {"mean", "std"},
                "s_acc": {fraction: {"mean", "std"}}, "global": {"mean", "std"} or null} where it was measured,
     "seconds": {"total", "per_round"}, "bytes": {"up", "down"},
     "privacy": {"clip", "noise", "delta", "epsilon"} where replies were clipped}

Every number is of the test split. ``mean`` is the unweighted mean over clients, ``std`` their standard deviation
(divisor: their number) and ``worst`` the worst of them. ``final`` is the last round that was evaluated, with
``clients`` of the ``of_clients`` clients that have test samples: one whose value is undefined (an AUROC with a single
class) is left out. ``best`` is the round
whose mean on *validation* data is best, the first of equals; without validation data nobody could have chosen it, so
it is ``null``, and ``best_chosen_on`` is ``null`` instead of ``"validation"``. ``best_oracle`` is the round that is
best on the test data themselves: what papers often report, and more than anyone could know. ``fairness`` holds the
mean of the worst tenth of the clients and the variance over clients of their mean test loss, with divisors n and
n - 1. Clients that attack are counted nowhere. ``matrix`` is read off the last accuracy matrix, of each personal model
on ``samples`` test samples of each client: L-acc on its own, G-acc on everybody's, S-acc on its own and those of a
fraction of the others, and the global model on each client's. ``epsilon`` is the privacy loss of the client that
replied most often. In the file, what is not a finite number is ``null``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.algorithms import registry
from coterie.config import ExperimentConfig
from coterie.errors import RunFolderError
from coterie.evaluation import best_round, fairness
from coterie.evaluation import metrics as metric_table
from coterie.evaluation.metrics import usual
from coterie.simulation.privacy import parse as parse_privacy

_Mask = NDArray[np.bool_]

_ALWAYS = ("personal", "global")
_NEWCOMER = "newcomer"

MODELS = (*_ALWAYS, "hybrid", "hybrid_oracle", _NEWCOMER)
"""The models of which a summary speaks, in the order in which tables show them."""


def summarise(
    metrics: pd.DataFrame,
    *,
    algorithm: str,
    seed: int,
    rounds: int,
    seconds: float,
    metric: str = "accuracy",
    higher_is_better: bool = True,
    clients: Collection[int] | None = None,
    privacy: str | None = None,
    measured: bool = True,
) -> dict[str, Any]:
    """Sum a run up.

    Parameters
    ----------
    metrics
        What :meth:`coterie.runs.storage.MetricsLog.read` gives.
    algorithm
        The method's name.
    seed
        The experiment's seed.
    rounds
        How many rounds were run.
    seconds
        How long they took together.
    metric
        The primary metric.
    higher_is_better
        Whether more of it is better: true for accuracies, false for errors.
    clients
        The clients that count (the benign ones, say), by default all. Clients held out of training are counted as
        newcomers in any case.
    privacy
        How replies were protected, as the configuration has it.
    measured
        Whether there must be something to sum up; nodes may keep what they measure to themselves.

    Returns
    -------
    dict
        The summary, as the module's docstring describes it.

    Raises
    ------
    RunFolderError
        If the metric was never measured on test data.
    """
    records = _Records(metrics)
    counted = records.everything if clients is None else metrics["client"].isin(list(clients)).to_numpy()
    models = {
        model: _of_model(
            records, records.everything if model == _NEWCOMER else counted, model, metric, higher_is_better
        )
        for model in MODELS
    }
    if measured and not any(models.values()):
        raise RunFolderError(f"there is nothing to sum up: {metric!r} was never measured on test data")
    wire = {
        way: records.values[records.where("model", "federation") & records.where("metric", f"bytes_{way}")]
        for way in ("up", "down")
    }
    return {
        "algorithm": algorithm,
        "seed": int(seed),
        "rounds": int(rounds),
        "metric": metric,
        "higher_is_better": higher_is_better,
        "best_chosen_on": "validation" if any(found and found["best"] for found in models.values()) else None,
        **{model: found for model, found in models.items() if found or model in _ALWAYS},
        **_of_matrix(metrics, counted & records.where("split", "cross"), metric),
        "seconds": {"total": float(seconds), "per_round": float(seconds) / max(1, rounds)},
        "bytes": {way: int(counts.sum()) for way, counts in wire.items()},
        **({} if privacy is None else {"privacy": _of_privacy(metrics, privacy)}),
    }


def summary_of(
    config: ExperimentConfig,
    metrics: pd.DataFrame,
    *,
    metric: str,
    rounds: int,
    seconds: float,
    clients: Collection[int],
    measured: bool = True,
) -> dict[str, Any]:
    """Sum a run up from its configuration and what it has recorded, with the title by which people know its method."""
    algorithm = registry.get(config.algorithm)
    summary = summarise(
        metrics,
        algorithm=algorithm.name,
        seed=config.seed,
        rounds=rounds,
        seconds=seconds,
        metric=metric,
        higher_is_better=metric_table.get(metric).higher_is_better,
        clients=clients,
        privacy=config.privacy,
        measured=measured,
    )
    return {"title": algorithm.title, **summary}


def _of_privacy(metrics: pd.DataFrame, text: str) -> dict[str, float | None]:
    epsilon = metrics.loc[metrics["metric"] == "epsilon", ["round", "value"]].sort_values("round")["value"]
    return {**parse_privacy(text).model_dump(), "epsilon": float(epsilon.iloc[-1]) if len(epsilon) else None}


def _of_model(
    records: _Records, counted: _Mask, model: str, metric: str, higher_is_better: bool
) -> dict[str, Any] | None:
    of_model = counted & records.where("model", model)
    if not of_model.any():
        return None
    on_test = of_model & records.where("split", "test")
    test = records.by_round(on_test & records.where("metric", metric))
    if not len(test.rounds):
        return None
    on_validation = of_model & records.where("split", "validation")
    validation = records.by_round(on_validation & records.where("metric", metric)).after(test.rounds)
    # Losses and scores of the same clients at the same round, or the one would be paired with another's.
    of_loss = on_test & records.where("metric", "loss")
    losses = records.by_round(of_loss).after(test.rounds).of(test.clients)
    final = fairness(_tensor(test.values[-1]), _tensor(losses.values[-1]), higher_is_better=higher_is_better)
    # Whoever has samples has a loss.
    evaluated = np.unique(records.clients[of_loss & (records.rounds == test.rounds[-1])])
    return {
        "final": {"mean": final.mean, "std": final.std, "worst": final.worst_client},
        "best": _at_best(test, validation, higher_is_better),
        "best_oracle": _at_best(test, test, higher_is_better),
        "clients": final.clients,
        "of_clients": max(final.clients, len(evaluated)),
        "fairness": {
            "worst_decile": final.worst_decile,
            "loss_variance": final.loss_variance,
            "loss_variance_sample": final.loss_variance_sample,
        },
    }


def _of_matrix(metrics: pd.DataFrame, counted: _Mask, metric: str) -> dict[str, Any]:
    if not counted.any():
        return {}
    cross = metrics[counted]
    last = int(cross["round"].max())
    of_last = cross[cross["round"] == last].groupby(["model", "metric"], observed=True)["value"]
    means, stds = of_last.mean(), of_last.std(ddof=0)
    spreads = {(str(model), str(name)): _spread(means, stds, model, name) for model, name in means.index}
    sizes = metrics[(metrics["split"] == "cross") & (metrics["metric"] == "samples") & (metrics["round"] == last)]
    fractions = [name for model, name in spreads if model == "personal" and name.startswith("s_acc ")]
    matrix = {
        "round": last,
        "metric": usual(metric),
        "clients": int(cross["client"].nunique()),
        "samples": int(sizes["value"].iloc[0]),
        "l_acc": spreads["personal", "l_acc"],
        "s_acc": {name.removeprefix("s_acc "): spreads["personal", name] for name in fractions},
        "g_acc": spreads["personal", "g_acc"],
        "global": spreads.get(("global", usual(metric))),
    }
    return {"matrix": matrix}


def _spread(means: pd.Series[float], stds: pd.Series[float], model: str, name: str) -> dict[str, float]:
    return {"mean": float(means[model, name]), "std": float(stds[model, name])}


class _Records:
    """The columns of a table of metrics: by NumPy, for pandas takes several times as long, and there are many looks."""

    def __init__(self, metrics: pd.DataFrame) -> None:
        self.rounds, self.clients = metrics["round"].to_numpy(), metrics["client"].to_numpy()
        self.values = metrics["value"].to_numpy(dtype=np.float64)
        self.everything: _Mask = np.ones(len(metrics), dtype=np.bool_)
        self._metrics, self._found = metrics, dict[tuple[str, str], _Mask]()

    def where(self, column: str, word: str) -> _Mask:
        """Say in which rows a word stands."""
        if (column, word) not in self._found:
            self._found[column, word] = (self._metrics[column] == word).to_numpy()
        return self._found[column, word]

    def by_round(self, chosen: _Mask) -> _ByRound:
        rounds, row = np.unique(self.rounds[chosen], return_inverse=True)
        clients, column = np.unique(self.clients[chosen], return_inverse=True)
        table = np.full((len(rounds), len(clients)), np.nan)
        table[row, column] = self.values[chosen]
        return _ByRound(rounds, clients, table)


@dataclass(frozen=True)
class _ByRound:
    """A row for each round and a column for each client, NaN where a client has no value."""

    rounds: NDArray[Any]
    clients: NDArray[Any]
    values: NDArray[np.float64]

    def after(self, rounds: NDArray[Any]) -> _ByRound:
        """Give the same after some rounds."""
        table = np.full((len(rounds), len(self.clients)), np.nan)
        _, to, own = np.intersect1d(rounds, self.rounds, assume_unique=True, return_indices=True)
        table[to] = self.values[own]
        return _ByRound(rounds, self.clients, table)

    def of(self, clients: NDArray[Any]) -> _ByRound:
        """Give the same of some clients."""
        table = np.full((len(self.rounds), len(clients)), np.nan)
        _, to, own = np.intersect1d(clients, self.clients, assume_unique=True, return_indices=True)
        table[:, to] = self.values[:, own]
        return _ByRound(self.rounds, clients, table)


def _at_best(test: _ByRound, criterion: _ByRound, higher_is_better: bool) -> Mapping[str, Any] | None:
    scores = _tensor(criterion.values)
    if not scores.nanmean(1).isfinite().any():
        return None
    place = best_round(scores, higher_is_better=higher_is_better)
    return {"mean": float(_tensor(test.values[place]).nanmean()), "round": int(test.rounds[place])}


def _tensor(values: NDArray[np.float64]) -> Tensor:
    return torch.from_numpy(np.array(values, order="C"))  # sums go along rows
