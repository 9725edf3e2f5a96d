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
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from coterie.algorithms import registry
from coterie.config import ExperimentConfig
from coterie.errors import RunFolderError
from coterie.evaluation import best_round, fairness
from coterie.evaluation import metrics as metric_table
from coterie.evaluation.metrics import usual
from coterie.runs.storage.metric_columns import Integers, MetricColumns, Numbers
from coterie.simulation.privacy import parse as parse_privacy

_ALWAYS = ("personal", "global")
_NEWCOMER = "newcomer"

MODELS = (*_ALWAYS, "hybrid", "hybrid_oracle", _NEWCOMER)
"""The models of which a summary speaks, in the order in which tables show them."""


def summarise(
    metrics: pd.DataFrame | MetricColumns,
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
        What :meth:`coterie.runs.storage.MetricsLog.read` or :meth:`~coterie.runs.storage.MetricsLog.columns` gives.
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
    everything = MetricColumns.of_frame(metrics) if isinstance(metrics, pd.DataFrame) else metrics
    counted = everything if clients is None else everything.where(clients=clients)
    models = {
        model: _of_model((everything if model == _NEWCOMER else counted).where(model=model), metric, higher_is_better)
        for model in MODELS
    }
    if measured and not any(models.values()):
        raise RunFolderError(
            f"there is nothing to sum up: {metric!r} was never measured on test data; begin anew with a metric that is "
            "defined for the clients' test samples (--metrics)"
        )
    federation = everything.where(model="federation")
    return {
        "algorithm": algorithm,
        "seed": int(seed),
        "rounds": int(rounds),
        "metric": metric,
        "higher_is_better": higher_is_better,
        "best_chosen_on": "validation" if any(found and found["best"] for found in models.values()) else None,
        **{model: found for model, found in models.items() if found or model in _ALWAYS},
        **_of_matrix(counted, everything, metric),
        "seconds": {"total": float(seconds), "per_round": float(seconds) / max(1, rounds)},
        "bytes": {way: int(federation.where(metric=f"bytes_{way}").value.sum()) for way in ("up", "down")},
        **({} if privacy is None else {"privacy": _of_privacy(everything, privacy)}),
    }


def summary_of(
    config: ExperimentConfig,
    metrics: MetricColumns,
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


def _of_privacy(metrics: MetricColumns, text: str) -> dict[str, float | None]:
    epsilon = metrics.where(metric="epsilon")
    last = float(epsilon.value[epsilon.round.argmax()]) if len(epsilon) else None
    return {**parse_privacy(text).model_dump(), "epsilon": last}


class _ByRound(NamedTuple):
    """A table of rounds by clients, both in increasing order, NaN where a client has no value."""

    rounds: Integers
    clients: Integers
    values: Numbers

    @classmethod
    def of(cls, measured: MetricColumns) -> _ByRound:
        rounds, row = np.unique(measured.round, return_inverse=True)
        clients, column = np.unique(measured.client, return_inverse=True)
        table = np.full((len(rounds), len(clients)), np.nan)
        table[row, column] = measured.value
        return cls(rounds, clients, table)

    def at(self, rounds: Integers, clients: Integers) -> Tensor:
        """Give the values of some rounds and clients, NaN where there is none."""
        table = np.full((len(rounds), len(clients)), np.nan)  # a row after the other: sums go along rows
        _, rows, own_rows = np.intersect1d(rounds, self.rounds, return_indices=True)
        _, columns, own_columns = np.intersect1d(clients, self.clients, return_indices=True)
        table[np.ix_(rows, columns)] = self.values[np.ix_(own_rows, own_columns)]
        return torch.from_numpy(table)


def _of_model(metrics: MetricColumns, metric: str, higher_is_better: bool) -> dict[str, Any] | None:
    of_test = metrics.where(split="test")
    test = _ByRound.of(of_test.where(metric=metric))
    if not len(test.rounds):
        return None
    scores = torch.from_numpy(test.values)
    own = _ByRound.of(metrics.where(split="validation", metric=metric))
    validation = own.at(test.rounds, own.clients)
    # Losses and scores of the same clients at the same round, or the one would be paired with another's.
    every_loss = of_test.where(metric="loss").after(int(test.rounds[-1]))
    losses = _ByRound.of(every_loss).at(test.rounds[-1:], test.clients)
    final = fairness(scores[-1], losses[0], higher_is_better=higher_is_better)
    return {
        "final": {"mean": final.mean, "std": final.std, "worst": final.worst_client},
        "best": _at_best(test, validation, higher_is_better),
        "best_oracle": _at_best(test, scores, higher_is_better),
        "clients": final.clients,
        "of_clients": max(final.clients, len(np.unique(every_loss.client))),  # whoever has samples has a loss
        "fairness": {
            "worst_decile": final.worst_decile,
            "loss_variance": final.loss_variance,
            "loss_variance_sample": final.loss_variance_sample,
        },
    }


def _at_best(test: _ByRound, criterion: Tensor, higher_is_better: bool) -> Mapping[str, Any] | None:
    if not criterion.nanmean(1).isfinite().any():
        return None
    place = best_round(criterion, higher_is_better=higher_is_better)
    return {"mean": float(torch.from_numpy(test.values[place]).nanmean()), "round": int(test.rounds[place])}


def _of_matrix(counted: MetricColumns, metrics: MetricColumns, metric: str) -> dict[str, Any]:
    measured = counted.where(split="cross")
    if not len(measured):
        return {}
    cross = measured.frame()
    last = int(cross["round"].max())
    of_last = cross[cross["round"] == last].groupby(["model", "metric"], observed=True)["value"]
    means, stds = of_last.mean(), of_last.std(ddof=0)
    spreads = {(str(model), str(name)): _spread(means, stds, model, name) for model, name in means.index}
    sizes = metrics.where(split="cross", metric="samples").after(last)
    fractions = [name for model, name in spreads if model == "personal" and name.startswith("s_acc ")]
    matrix = {
        "round": last,
        "metric": usual(metric),
        "clients": int(cross["client"].nunique()),
        "samples": int(sizes.value[0]),
        "l_acc": spreads["personal", "l_acc"],
        "s_acc": {name.removeprefix("s_acc "): spreads["personal", name] for name in fractions},
        "g_acc": spreads["personal", "g_acc"],
        "global": spreads.get(("global", usual(metric))),
    }
    return {"matrix": matrix}


def _spread(means: pd.Series[float], stds: pd.Series[float], model: str, name: str) -> dict[str, float]:
    return {"mean": float(means[model, name]), "std": float(stds[model, name])}
