"""Tables of results for the terminal and the notebook."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from coterie.runs.summary import MODELS

_ABSENT = "–"


def table(summaries: Sequence[Mapping[str, Any]], title: str | None = None) -> Table:
    """Put runs beside each other: a row for each model of each run, the best mean of each kind of model in bold.

    Parameters
    ----------
    summaries
        The runs' summaries (:attr:`coterie.results.Result.summary`), in the order in which to show them. A single one
        gets a table of its own, with the run in the title.
    title
        The title, by default what all runs have in common.

    Returns
    -------
    rich.table.Table
        Mean, standard deviation and worst client of the last round, the mean at the best round, that round, and
        seconds. A best round that had to be chosen on test data, for want of validation data, carries a dagger.
    """
    alone = len(summaries) == 1
    seeds = {summary["seed"] for summary in summaries}
    out = Table(
        title=title if title is not None else _title(summaries),
        box=box.SIMPLE_HEAD,
        title_justify="left",
        collapse_padding=True,  # nine columns have to fit a terminal of 80 characters
        pad_edge=False,
    )
    if not alone:
        out.add_column("method")
        if len(seeds) > 1:
            out.add_column("seed", justify="right")
    out.add_column("model")
    for header in ("mean", "std", "worst", "best", "round", "seconds"):
        out.add_column(header, justify="right", no_wrap=True)

    on_test_data = False
    for model in MODELS:
        having = [summary for summary in summaries if summary.get(model)]
        winners = _winners(having, model)
        for position, summary in enumerate(having):
            final, best = summary[model]["final"], summary[model]["best"]
            dagger = best is None and summary[model]["best_oracle"] is not None
            on_test_data |= dagger
            best = best or summary[model]["best_oracle"] or {"mean": None, "round": _ABSENT}
            name = [] if alone else [summary["algorithm"]]
            if not alone and len(seeds) > 1:
                name.append(str(summary["seed"]))
            out.add_row(
                *name,
                model.replace("_", " "),
                Text(_number(final["mean"]), style="bold" if position in winners and not alone else ""),
                _number(final["std"]),
                _number(final["worst"]),
                _number(best["mean"]) + ("†" if dagger else ""),
                str(best["round"]),
                f"{summary['seconds']['total']:.1f}",
                end_section=not alone and position == len(having) - 1,
            )
    notes = ["† chosen on test data: there were no validation data"] if on_test_data else []
    notes += [_privacy(summary, alone) for summary in summaries if summary.get("privacy")]
    if notes:
        out.caption, out.caption_justify = "\n".join(notes), "left"
    return out


def _privacy(summary: Mapping[str, Any], alone: bool) -> str:
    found = summary["privacy"]
    whose = "" if alone else f"{summary['algorithm']}, seed {summary['seed']}: "
    if found["epsilon"] is None:
        return f"{whose}replies clipped to {found['clip']:g}, without noise: no bound on the privacy loss"
    return (
        f"{whose}privacy loss ε = {found['epsilon']:.4g} at δ = {found['delta']:g}, for each client towards the server "
        f"(clip {found['clip']:g}, noise {found['noise']:g})"
    )


def matrix_table(summaries: Sequence[Mapping[str, Any]]) -> Table | None:
    """Put the readings of runs' accuracy matrices beside each other.

    Parameters
    ----------
    summaries
        The runs' summaries.

    Returns
    -------
    rich.table.Table or None
        A row for each reading of each run that has a matrix: mean and standard deviation over clients of L-acc, S-acc
        and G-acc, and of the global model; ``None`` if no run has one.
    """
    having = [summary for summary in summaries if summary.get("matrix")]
    if not having:
        return None
    metrics = "/".join(sorted({summary["matrix"]["metric"] for summary in having}))
    out = Table(
        title=f"models on everybody's samples, {metrics}",
        box=box.SIMPLE_HEAD,
        title_justify="left",
        collapse_padding=True,
        pad_edge=False,
    )
    for header in ("method", "reading"):
        out.add_column(header)
    for header in ("mean", "std", "round"):
        out.add_column(header, justify="right", no_wrap=True)
    readings = [_readings(summary["matrix"]) for summary in having]
    fractions = sorted({name for found in readings for name in found if isinstance(name, float)})
    names: list[str | float] = ["L-acc", *fractions, "G-acc", "global"]
    for name in names:
        rows = [
            (summary, found[name])
            for summary, found in zip(having, readings, strict=True)
            if found.get(name) is not None
        ]
        for place, (summary, found) in enumerate(rows):
            out.add_row(
                summary["algorithm"],
                name if isinstance(name, str) else f"S-acc({name:g})",
                _number(found["mean"]),
                _number(found["std"]),
                str(summary["matrix"]["round"]),
                end_section=len(having) > 1 and place == len(rows) - 1,
            )
    return out


def _readings(matrix: Mapping[str, Any]) -> dict[str | float, Any]:
    return {
        "L-acc": matrix["l_acc"],
        **{float(fraction): found for fraction, found in matrix["s_acc"].items()},
        "G-acc": matrix["g_acc"],
        "global": matrix["global"],
    }


def _title(summaries: Sequence[Mapping[str, Any]]) -> str:
    def common(key: str, form: str) -> list[str]:
        values = {str(summary[key]) for summary in summaries}
        return [form.format(*values)] if len(values) == 1 else []

    directions = {summary["higher_is_better"] for summary in summaries}
    parts = [
        *(common("algorithm", "{}") if len(summaries) == 1 else []),
        *common("metric", "test {}" if directions != {False} else "test {} (less is better)"),
        *common("rounds", "{} rounds"),
        *common("seed", "seed {}"),
    ]
    return ", ".join(parts)


def _winners(summaries: Sequence[Mapping[str, Any]], model: str) -> set[int]:
    """Give the places of the best means; runs that were judged by different metrics have no best."""
    if len({(summary["metric"], summary["higher_is_better"]) for summary in summaries}) != 1:
        return set()
    sign = 1.0 if summaries[0]["higher_is_better"] else -1.0
    means = [summary[model]["final"]["mean"] for summary in summaries]
    scores = [-math.inf if mean is None or math.isnan(mean) else sign * mean for mean in means]
    return {place for place, score in enumerate(scores) if score == max(scores) and score > -math.inf}


def _number(value: float | None) -> str:
    return _ABSENT if value is None or math.isnan(value) else f"{value:.4f}"
