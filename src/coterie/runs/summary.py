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
from typing import Any

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
from coterie.simulation.privacy import parse as parse_privacy

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
    counted = metrics if clients is None else metrics[metrics["client"].isin(list(clients))]
    models = {
        model: _of_model(metrics if model == _NEWCOMER else counted, model, metric, higher_is_better)
        for model in MODELS
    }
    if measured and not any(models.values()):
        raise RunFolderError(f"there is nothing to sum up: {metric!r} was never measured on test data")
    wire = metrics[metrics["model"] == "federation"].groupby("metric", observed=True)["value"].sum()
    return {
        "algorithm": algorithm,
        "seed": int(seed),
        "rounds": int(rounds),
        "metric": metric,
        "higher_is_better": higher_is_better,
        "best_chosen_on": "validation" if any(found and found["best"] for found in models.values()) else None,
        **{model: found for model, found in models.items() if found or model in _ALWAYS},
        **_of_matrix(counted, metrics, metric),
        "seconds": {"total": float(seconds), "per_round": float(seconds) / max(1, rounds)},
        "bytes": {way: int(wire.get(f"bytes_{way}", 0)) for way in ("up", "down")},
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


def _of_model(metrics: pd.DataFrame, model: str, metric: str, higher_is_better: bool) -> dict[str, Any] | None:
    of_model = metrics[metrics["model"] == model]
    if of_model.empty:
        return None
    test = _by_round(of_model, "test", metric)
    if test.empty:
        return None
    validation = _by_round(of_model, "validation", metric).reindex(index=test.index)
    # Losses and scores of the same clients at the same round, or the one would be paired with another's.
    losses = _by_round(of_model, "test", "loss").reindex(index=test.index, columns=test.columns)
    final = fairness(_tensor(test.iloc[-1]), _tensor(losses.iloc[-1]), higher_is_better=higher_is_better)
    return {
        "final": {"mean": final.mean, "std": final.std, "worst": final.worst_client},
        "best": _at_best(test, validation, higher_is_better),
        "best_oracle": _at_best(test, test, higher_is_better),
        "clients": final.clients,
        "of_clients": max(final.clients, _with_samples(of_model, int(test.index.to_numpy()[-1]))),
        "fairness": {
            "worst_decile": final.worst_decile,
            "loss_variance": final.loss_variance,
            "loss_variance_sample": final.loss_variance_sample,
        },
    }


def _with_samples(of_model: pd.DataFrame, round_number: int) -> int:
    """Count the clients that were evaluated on test samples after a round: whoever has samples has a loss."""
    there = (of_model["split"] == "test") & (of_model["metric"] == "loss") & (of_model["round"] == round_number)
    return int(of_model.loc[there, "client"].nunique())


def _of_matrix(counted: pd.DataFrame, metrics: pd.DataFrame, metric: str) -> dict[str, Any]:
    cross = counted[counted["split"] == "cross"]
    if cross.empty:
        return {}
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


def _by_round(metrics: pd.DataFrame, split: str, metric: str) -> pd.DataFrame:
    """Give a table of rounds by clients, NaN where a client has no value, empty if nothing was recorded."""
    # By NumPy: a pivot of pandas' takes several times as long, and there are a dozen in a summary.
    chosen = (metrics["split"] == split).to_numpy() & (metrics["metric"] == metric).to_numpy()
    rounds, row = np.unique(metrics["round"].to_numpy()[chosen], return_inverse=True)
    clients, column = np.unique(metrics["client"].to_numpy()[chosen], return_inverse=True)
    table = np.full((len(rounds), len(clients)), np.nan)
    table[row, column] = metrics["value"].to_numpy()[chosen]
    return pd.DataFrame(table, index=rounds, columns=clients)


def _at_best(test: pd.DataFrame, criterion: pd.DataFrame, higher_is_better: bool) -> Mapping[str, Any] | None:
    scores = _tensor(criterion)
    if not scores.nanmean(1).isfinite().any():
        return None
    place = best_round(scores, higher_is_better=higher_is_better)
    return {"mean": float(_tensor(test.iloc[place]).nanmean()), "round": int(test.index.to_numpy()[place])}


def _tensor(values: pd.DataFrame | pd.Series[float]) -> Tensor:
    return torch.from_numpy(np.array(values.to_numpy(dtype=np.float64), order="C"))  # sums go along rows
