"""Tables of results for the terminal and the notebook."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from coterie.results.summary import MODELS

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
    if on_test_data:
        out.caption = "† chosen on test data: there were no validation data"
        out.caption_justify = "left"
    return out


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
