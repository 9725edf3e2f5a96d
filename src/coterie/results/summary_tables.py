"""Tables of runs' summaries, for the terminal and the notebook."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from coterie.results.labels import method_title
from coterie.runs.summary import MODELS
from coterie.tables import ABSENT, Cell, Row, Table, numbers, words

_DAGGER = "†"


def table(
    summaries: Sequence[Mapping[str, Any]], title: str | None = None, methods: Sequence[str] | None = None
) -> Table:
    """Put runs beside each other: a row for each model of each run, the best mean of each kind of model in bold.

    Parameters
    ----------
    summaries
        The runs' summaries (:attr:`coterie.results.Result.summary`), in the order in which to show them. A single one
        gets a table of its own, with the run in the title.
    title
        The title, by default what all runs have in common.
    methods
        What to call the method of each run, by default its title.

    Returns
    -------
    Table
        Mean, standard deviation and worst client of the last round, the mean at the best round, that round, and
        seconds. A best round that had to be chosen on test data, for want of validation data, carries a dagger.
    """
    names = methods or [method_title(str(summary["algorithm"])) for summary in summaries]
    runs = list(zip(names, summaries, strict=True))
    alone, several_seeds = len(runs) == 1, len({summary["seed"] for summary in summaries}) > 1
    left = [] if alone else [*words("method"), *(numbers("seed") if several_seeds else ())]
    left += words("model")
    rows: list[Row] = []
    for model in MODELS:
        having = [(name, summary) for name, summary in runs if summary.get(model)]
        winners = set() if alone else _winners([summary for _, summary in having], model)
        for place, (name, summary) in enumerate(having):
            labels = [] if alone else [name, *([str(summary["seed"])] if several_seeds else ())]
            cells = (*labels, model.replace("_", " "), *_model_cells(summary, model, place in winners))
            rows.append(Row(cells, ends_section=not alone and place == len(having) - 1))
    chosen_on_test = any(isinstance(cell, Cell) and cell.mark == _DAGGER for row in rows for cell in row.cells)
    notes = [f"{_DAGGER} chosen on test data: there were no validation data"] if chosen_on_test else []
    notes += over_how_many(runs)
    notes += [_privacy(name, summary, alone) for name, summary in runs if summary.get("privacy")]
    return Table(
        (*left, *numbers("mean", "std", "worst", "best", "round", "seconds")),
        tuple(rows),
        _title(names, summaries) if title is None else title,
        tuple(notes),
        labels=len(left),
    )


def _model_cells(summary: Mapping[str, Any], model: str, wins: bool) -> tuple[Cell | str, ...]:
    found = summary[model]
    final, best = found["final"], found["best"] or found["best_oracle"]
    mark = _DAGGER if best is not None and found["best"] is None else ""
    return (
        Cell(_number(final["mean"]), "best" if wins else ""),
        _number(final["std"]),
        _number(final["worst"]),
        ABSENT if best is None else Cell(_number(best["mean"]), mark=mark),
        ABSENT if best is None else str(best["round"]),
        f"{summary['seconds']['total']:.1f}",
    )


def over_how_many(runs: Sequence[tuple[str, Mapping[str, Any]]]) -> list[str]:
    """Say of which models a mean is over fewer clients than have test samples; ``runs`` are names with summaries."""
    said: dict[str, None] = {}
    for name, summary in runs:
        for model in MODELS:
            found = summary.get(model) or {}
            counted, there = found.get("clients", 0), found.get("of_clients", 0)
            if counted < there:
                whose = f"{name}, {model.replace('_', ' ')} model"
                said[f"{whose}: {summary['metric']} over {counted} of {there} clients, for whom it is defined"] = None
    return list(said)


def _privacy(name: str, summary: Mapping[str, Any], alone: bool) -> str:
    found = summary["privacy"]
    whose = "" if alone else f"{name}, seed {summary['seed']}: "
    if found["epsilon"] is None:
        return f"{whose}replies clipped to {found['clip']:g}, without noise: no bound on the privacy loss"
    return (
        f"{whose}privacy loss ε = {found['epsilon']:.4g} at δ = {found['delta']:g}, for each client towards the server "
        f"(clip {found['clip']:g}, noise {found['noise']:g})"
    )


def matrix_table(summaries: Sequence[Mapping[str, Any]], methods: Sequence[str] | None = None) -> Table | None:
    """Put what was read off the accuracy matrices of runs beside each other.

    Parameters
    ----------
    summaries
        The runs' summaries.
    methods
        What to call the method of each run, by default its title.

    Returns
    -------
    Table or None
        Rows for L-acc, S-acc, G-acc and the global model of each run that has a matrix: mean and standard deviation
        over clients; ``None`` if no run has one.
    """
    names = methods or [method_title(str(summary["algorithm"])) for summary in summaries]
    having = [
        (name, summary["matrix"]) for name, summary in zip(names, summaries, strict=True) if summary.get("matrix")
    ]
    if not having:
        return None
    fractions = sorted({float(fraction) for _, matrix in having for fraction in matrix["s_acc"]})
    measures: dict[str | float, str] = {"l_acc": "L-acc"}
    measures |= {fraction: f"S-acc({fraction:g})" for fraction in fractions}
    measures |= {"g_acc": "G-acc", "global": "global"}
    rows: list[Row] = []
    for key, measure in measures.items():
        measured = [(name, found, matrix) for name, matrix in having if (found := _of_matrix(matrix, key)) is not None]
        for place, (name, found, matrix) in enumerate(measured, 1):
            cells = (name, measure, _number(found["mean"]), _number(found["std"]), str(matrix["round"]))
            rows.append(Row(cells, ends_section=len(having) > 1 and place == len(measured)))
    metrics = "/".join(sorted({matrix["metric"] for _, matrix in having}))
    columns = (*words("method", "measure"), *numbers("mean", "std", "round"))
    return Table(columns, tuple(rows), f"models on all clients' samples, {metrics}", labels=2)


def _of_matrix(matrix: Mapping[str, Any], key: str | float) -> Mapping[str, Any] | None:
    if isinstance(key, str):
        found: Mapping[str, Any] | None = matrix[key]
        return found
    return {float(fraction): of_fraction for fraction, of_fraction in matrix["s_acc"].items()}.get(key)


def _title(names: Sequence[str], summaries: Sequence[Mapping[str, Any]]) -> str:
    def common(key: str, form: str) -> list[str]:
        values = {str(summary[key]) for summary in summaries}
        return [form.format(*values)] if len(values) == 1 else []

    directions = {summary["higher_is_better"] for summary in summaries}
    parts = [
        *(names if len(summaries) == 1 else []),
        *common("metric", "test {}" if directions != {False} else "test {} (less is better)"),
        *common("rounds", "{} round" if {summary["rounds"] for summary in summaries} == {1} else "{} rounds"),
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
    return ABSENT if value is None or math.isnan(value) else f"{value:.4f}"
