"""How clients fare beside each other: the distribution of a metric, and how even it is."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import torch

from coterie import evaluation
from coterie.results.figures.charts import Axis, Box, Boxes, Detail, Panel, Panels, Series
from coterie.results.figures.line_styles import SYMBOLS, Style
from coterie.results.figures.over_rounds import SHOWN, models_of


def shown_models(metrics: pd.DataFrame, metric: str) -> list[str]:
    """List the models whose clients are shown beside each other: those that are the result of a method.

    Parameters
    ----------
    metrics
        Metrics of some lines.
    metric
        The metric.

    Returns
    -------
    list of str
        The models, in the order of panels.
    """
    return [model for model in models_of(metrics, metric) if model in SHOWN]


def final(metrics: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Take each client's value at the last round that was evaluated.

    Parameters
    ----------
    metrics
        Metrics of some lines.
    metric
        The metric, of the test samples.

    Returns
    -------
    pandas.DataFrame
        Columns ``model``, ``line``, ``run``, ``seed``, ``client`` and ``value``; the last round is each run's and
        model's own.
    """
    chosen = metrics[(metrics["metric"] == metric) & (metrics["split"] == "test")]
    last = chosen.groupby(["run", "model"], observed=True)["round"].transform("max")
    columns = ["model", "line", "run", "seed", "client", "value"]
    return chosen.loc[chosen["round"] == last, columns].reset_index(drop=True)


def distribution(metrics: pd.DataFrame, metric: str, styles: Mapping[str, Style]) -> Boxes | None:
    """Draw the distribution over clients at the last round; clients of several seeds are put together.

    Parameters
    ----------
    metrics
        Metrics of some lines.
    metric
        The metric.
    styles
        How each line is drawn, in the order of boxes.

    Returns
    -------
    Boxes or None
        A panel for each model, ``None`` if nothing was measured.
    """
    values = final(metrics, metric).dropna(subset="value")
    panels = tuple(
        (f"{model} model", tuple(_boxes(values[values["model"] == model], styles)))
        for model in shown_models(metrics, metric)
    )
    return Boxes(panels, Axis(f"test {metric} of a client")) if panels else None


def sorted_clients(metrics: pd.DataFrame, metric: str, styles: Mapping[str, Style]) -> Panels | None:
    """Draw every client's value at the last round, from the least to the greatest.

    Parameters
    ----------
    metrics
        Metrics of some lines.
    metric
        The metric.
    styles
        How each line is drawn.

    Returns
    -------
    Panels or None
        A panel for each model, ``None`` if nothing was measured.
    """
    values = final(metrics, metric).dropna(subset="value")
    panels = []
    for model in shown_models(metrics, metric):
        series = []
        for name, style in styles.items():
            own = values[(values["model"] == model) & (values["line"] == name)].sort_values("value", kind="stable")
            if len(own):
                place = 100 * (np.arange(len(own)) + 0.5) / len(own)
                series.append(Series(name, style, place, own["value"].to_numpy(), detail=_who(own)))
        below = Axis("% of clients", range=(0.0, 100.0))
        panels.append(Panel(tuple(series), below, Axis(f"test {metric} of a client"), f"{model} model"))
    return Panels(tuple(panels)) if panels else None


def evenness(metrics: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Measure, for every run and model at its last round, how well and how evenly clients are served.

    Parameters
    ----------
    metrics
        Metrics of some lines.
    metric
        The metric.

    Returns
    -------
    pandas.DataFrame
        Columns ``model``, ``line``, ``run``, ``seed``, ``mean``, ``variance`` of the metric and ``loss_variance``
        over clients (divisor: the clients), NaN where no loss was recorded.
    """
    scores, losses = final(metrics, metric), final(metrics, "loss")
    rows = []
    for (model, line, run, seed), own in scores.groupby(["model", "line", "run", "seed"], observed=True, sort=False):
        of_run = losses[(losses["run"] == run) & (losses["model"] == model)].set_index("client")["value"]
        loss = of_run.reindex(own["client"]).to_numpy(dtype=np.float64, copy=True)
        values = own["value"].to_numpy(dtype=np.float64, copy=True)
        served = evaluation.fairness(torch.from_numpy(values), torch.from_numpy(loss))
        rows.append((model, line, run, seed, served.mean, served.std**2, served.loss_variance))
    numbers = ["mean", "variance", "loss_variance"]
    found = pd.DataFrame(rows, columns=["model", "line", "run", "seed", *numbers])
    return found.astype(dict.fromkeys(numbers, np.float64))


def fairness(metrics: pd.DataFrame, metric: str, styles: Mapping[str, Style]) -> Panels | None:
    """Draw the mean over clients against the variance over clients, of the metric and of the loss.

    Parameters
    ----------
    metrics
        Metrics of some lines.
    metric
        The metric.
    styles
        How each line is drawn; the marker says which model.

    Returns
    -------
    Panels or None
        A panel for each variance: a point for each run, and a larger one for their mean if there are several. ``None``
        if nothing was measured.
    """
    found = evenness(metrics, metric)
    models = shown_models(metrics, metric)
    panels = []
    for column, what in (("variance", metric), ("loss_variance", "loss")):
        there = found[np.isfinite(found[column]) & np.isfinite(found["mean"]) & found["model"].isin(models)]
        if there.empty or (column == "loss_variance" and metric == "loss"):
            continue
        series = [
            each
            for model in models
            for name, style in styles.items()
            for each in _cloud(there[(there["model"] == model) & (there["line"] == name)], column, name, style, models)
        ]
        below = Axis("variance over clients")
        panels.append(Panel(tuple(series), below, Axis(f"mean test {metric}"), f"variance of test {what}"))
    return Panels(tuple(panels)) if panels else None


def _cloud(own: pd.DataFrame, column: str, name: str, style: Style, models: list[str]) -> list[Series]:
    if own.empty:
        return []
    model = str(own["model"].iloc[0])
    marked = Style(style.colour, style.dash, SYMBOLS[models.index(model) % len(SYMBOLS)])
    of_model = [model] * len(own)
    several = len(own) > 1
    x, y = own[column].to_numpy(), own["mean"].to_numpy()
    detail: Detail = {"model": of_model, "seed": own["seed"].to_numpy()}
    found = [Series(name, marked, x, y, detail=detail, points=True, faint=several)]
    if several:
        mean: Detail = {"model": [model], "seed": [f"mean of {len(own)}"]}
        found.append(Series(name, marked, np.array([x.mean()]), np.array([y.mean()]), detail=mean, points=True))
    return found


def _boxes(values: pd.DataFrame, styles: Mapping[str, Style]) -> list[Box]:
    own = {name: values[values["line"] == name] for name in styles}
    return [Box(name, styles[name], each["value"].to_numpy(), _who(each)) for name, each in own.items() if len(each)]


def _who(own: pd.DataFrame) -> Detail:
    return {name: own[name].to_numpy(dtype=np.int32) for name in ("client", "seed")}
