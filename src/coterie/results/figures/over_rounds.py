"""Lines over rounds, over the fraction of clients that models are tested on, and over attackers, with bands over seeds.

Metrics come in long form, as a run records them, with the columns ``line`` (what runs of one line are called), ``run``
(its number) and ``seed`` beside them. Clients that do not count have been left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
import torch

from coterie import evaluation
from coterie.results.figures.charts import Axis, Panel, Panels, Series
from coterie.results.figures.line_styles import Style
from coterie.units import bytes_unit

SHOWN = ("personal", "global", "hybrid", "newcomer")
"""Models of which figures speak, in their order; what was chosen on test data is none of them."""

FRACTIONS = tuple(number / 10 for number in range(11))
"""Fractions of the other clients at which S-acc is drawn."""


def models_of(metrics: pd.DataFrame, metric: str, split: str = "test") -> list[str]:
    """List the models that a figure of a metric has a panel for.

    Parameters
    ----------
    metrics
        Metrics of some lines.
    metric
        The metric.
    split
        Whose samples.

    Returns
    -------
    list of str
        The models, in the order of panels; those of a method's own come last.
    """
    chosen = metrics[(metrics["metric"] == metric) & (metrics["split"] == split)]
    there = set(chosen["model"].unique())
    return [*(model for model in SHOWN if model in there), *sorted(there - {*SHOWN, "federation", "hybrid_oracle"})]


def per_run(metrics: pd.DataFrame, metric: str, split: str = "test") -> pd.DataFrame:
    """Take the mean over clients, for every run, model and round.

    Parameters
    ----------
    metrics
        Metrics of some lines.
    metric
        The metric.
    split
        Whose samples.

    Returns
    -------
    pandas.DataFrame
        Columns ``model``, ``line``, ``run``, ``seed``, ``round`` and ``value``. A loss that is NaN for a client makes
        the mean NaN; another metric is only NaN where it is undefined, and such a client is left out.
    """
    chosen = metrics[(metrics["metric"] == metric) & (metrics["split"] == split)]
    keys = ["model", "line", "run", "seed", "round"]
    groups = chosen.groupby(keys, observed=True, sort=False)["value"]
    means = groups.mean()
    if metric == "loss":
        means = means.where(groups.count() == groups.size())
    return means.reset_index()


def over_runs(frame: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """Sum up the runs of a line.

    Parameters
    ----------
    frame
        A row for each run and whatever else the keys tell apart, with a column ``value``.
    keys
        Columns that tell apart what is not summed up.

    Returns
    -------
    pandas.DataFrame
        The keys with ``mean``, ``std`` (divisor: one less than the runs; NaN for one) and ``runs``.
    """
    groups = frame.groupby(list(keys), observed=True, sort=False)["value"]
    found: pd.DataFrame = groups.agg(["mean", "std", "count"]).rename(columns={"count": "runs"}).reset_index()
    return found


def curves(metrics: pd.DataFrame, metric: str, styles: Mapping[str, Style]) -> Panels | None:
    """Draw a metric of the test samples over rounds: mean over clients, then mean and deviation over seeds.

    Parameters
    ----------
    metrics
        Metrics of some lines.
    metric
        The metric.
    styles
        How each line is drawn, in the order of the legend.

    Returns
    -------
    Panels or None
        A panel for each model, ``None`` if nothing was measured.
    """
    means = over_runs(evaluated_alike(per_run(metrics, metric)), ["model", "line", "round"])
    panels = tuple(
        Panel(
            _banded(means[means["model"] == model], "round", styles), _ROUND, Axis(f"test {metric}"), f"{model} model"
        )
        for model in models_of(metrics, metric)
    )
    return Panels(panels, hover="x unified") if panels else None


def evaluated_alike(found: pd.DataFrame) -> pd.DataFrame:
    """Leave out rounds that only some runs of a line evaluated: their means would jump between different runs.

    Parameters
    ----------
    found
        What :func:`per_run` gives.

    Returns
    -------
    pandas.DataFrame
        The rows of rounds that every run of the line has evaluated which had come that far.
    """
    ends = found.groupby(["model", "line", "run"], observed=True)["round"].max()
    keys = ["model", "line", "round"]
    has = found.groupby(keys, observed=True)["run"].nunique()
    came = [int((ends.loc[(model, line)] >= number).sum()) for model, line, number in has.index]
    alike = pd.Series(has.to_numpy() == np.array(came, dtype=np.int64), index=has.index, name="alike")
    return found[found.join(alike, on=keys)["alike"].to_numpy(dtype=bool)]


def traffic(metrics: pd.DataFrame, styles: Mapping[str, Style]) -> Panels | None:
    """Draw the bytes of each round.

    Parameters
    ----------
    metrics
        Metrics of some lines.
    styles
        How each line is drawn.

    Returns
    -------
    Panels or None
        A panel for each direction, ``None`` if no run has sent anything.
    """
    wire = metrics[(metrics["model"] == "federation") & metrics["metric"].isin(["bytes_up", "bytes_down"])]
    if not bool((wire["value"] > 0).any()):
        return None
    means = over_runs(wire, ["metric", "line", "round"])
    by, unit = bytes_unit(float(means["mean"].max()))
    means = means.assign(mean=means["mean"] / by, std=means["std"] / by)
    titles = {"bytes_up": "from clients to the server", "bytes_down": "from the server to clients"}
    return Panels(
        tuple(
            Panel(
                _banded(means[means["metric"] == way], "round", styles),
                _ROUND,
                Axis(f"{unit} in a round", range=(0.0, 1.05 * float(means["mean"].max()))),
                title,
            )
            for way, title in titles.items()
        ),
        hover="x unified",
        height=0.8,
    )


def seconds(timings: pd.DataFrame, styles: Mapping[str, Style]) -> Panels | None:
    """Draw the seconds of each round.

    Parameters
    ----------
    timings
        Columns ``line``, ``run``, ``round``, and one for each thing that took time.
    styles
        How each line is drawn.

    Returns
    -------
    Panels or None
        A panel for each thing that took time, ``None`` if nothing was timed.
    """
    stages = [name for name in timings.columns if name not in ("line", "run", "seed", "round")]
    stages = [name for name in stages if bool((timings[name] > 0).any())]
    panels = []
    for stage in stages:
        means = over_runs(timings.rename(columns={stage: "value"}).dropna(subset="value"), ["line", "round"])
        series = _banded(means, "round", styles)
        panels.append(Panel(series, _ROUND, Axis("seconds in a round", range=_from_zero(means)), stage))
    return Panels(tuple(panels), share_y=False, hover="x unified", height=0.8) if panels else None


def s_acc_by_fraction(matrix: pd.DataFrame, seed: int, counted: Sequence[int]) -> pd.DataFrame:
    """Read S-acc off an accuracy matrix, from the client's own samples (L-acc) to everybody's (G-acc).

    Parameters
    ----------
    matrix
        Personal models by clients.
    seed
        The run's seed, which decides on whose samples each model is tested.
    counted
        Clients whose models count.

    Returns
    -------
    pandas.DataFrame
        Columns ``fraction`` and ``value``, the mean over the clients that count.
    """
    values = torch.from_numpy(matrix.to_numpy(dtype=np.float64, copy=True))
    counts = torch.from_numpy(matrix.index.isin(list(counted)))
    found = [float(evaluation.s_acc(values, fraction, seed)[counts].mean()) for fraction in FRACTIONS]
    return pd.DataFrame({"fraction": FRACTIONS, "value": found})


def s_acc_chart(found: pd.DataFrame, metric: str, styles: Mapping[str, Style]) -> Panels:
    """Draw S-acc against the fraction of the other clients on whose samples models are tested too.

    Parameters
    ----------
    found
        What :func:`s_acc_by_fraction` gives, with ``line`` and ``run`` beside it.
    metric
        What the matrix measures.
    styles
        How each line is drawn.

    Returns
    -------
    Panels
        One panel.
    """
    means = over_runs(found, ["line", "fraction"])
    below = Axis("fraction c of the other clients: 0 is L-acc, 1 is G-acc")
    return Panels((Panel(_banded(means, "fraction", styles), below, Axis(f"S-acc(c), {metric}")),), hover="x unified")


def robustness(found: pd.DataFrame, metric: str, styles: Mapping[str, Style]) -> Panels:
    """Draw the last mean over honest clients against the fraction of clients that attack.

    Parameters
    ----------
    found
        Columns ``kind`` (of attack), ``model``, ``line``, ``run``, ``fraction`` and ``value``. Runs without attackers
        have no kind and begin the lines of all kinds.
    metric
        What was measured.
    styles
        How each line is drawn, by names that say nothing of the attack.

    Returns
    -------
    Panels
        A panel for each kind of attack and each model.
    """
    kinds = [kind for kind in dict.fromkeys(found["kind"]) if kind]
    models = [model for model in (*SHOWN, *found["model"].unique()) if model in set(found["model"])]
    panels = []
    for kind in kinds:
        for model in dict.fromkeys(models):
            chosen = found[(found["model"] == model) & found["kind"].isin([kind, ""])]
            attacked = chosen.loc[chosen["kind"] == kind, "line"].unique()
            means = over_runs(chosen[chosen["line"].isin(attacked)], ["line", "fraction"]).sort_values("fraction")
            if not means.empty:
                below, left = Axis("fraction of clients that attack"), Axis(f"test {metric}, honest clients")
                panels.append(Panel(_banded(means, "fraction", styles), below, left, f"{kind}, {model} model"))
    return Panels(tuple(panels))


_ROUND = Axis("round", whole=True)


def _from_zero(means: pd.DataFrame) -> tuple[float, float]:
    return 0.0, 1.05 * float((means["mean"] + means["std"].fillna(0.0)).max())


def _banded(means: pd.DataFrame, place: str, styles: Mapping[str, Style]) -> tuple[Series, ...]:
    series = []
    for name, style in styles.items():
        of_line = means[means["line"] == name].sort_values(place)
        if of_line.empty:
            continue
        spread = of_line["std"].to_numpy(dtype=np.float64)
        several = bool(np.isfinite(spread).any())
        series.append(
            Series(
                name,
                style,
                of_line[place].to_numpy(),
                of_line["mean"].to_numpy(dtype=np.float64),
                spread if several else None,
                {"seeds": of_line["runs"].to_numpy()} if several else {},
            )
        )
    return tuple(series)
