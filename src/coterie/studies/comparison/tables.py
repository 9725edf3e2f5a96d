"""A comparison as a table."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from coterie.results.client_gains import LEVEL
from coterie.studies.comparison.standings import MethodScore, Standing, Standings, format_values
from coterie.tables import ABSENT, Cell, Row, Table, numbers, words

_DIVERGED, _FAILED = "diverged", "failed"
_GAINS = ("helped", "harmed", "worst")
_MARKS = "* p < 0.05, ** p < 0.01, *** p < 0.001: differs from the best of its column, by the two-sided Wilcoxon test"
_WHEN = {
    "final": "after the last round",
    "best": "at the round that is best on validation data",
    "best_oracle": "at the round that is best on test data",
}


def table(found: Standings) -> Table:
    """Make the table that people read.

    Parameters
    ----------
    found
        The comparison.

    Returns
    -------
    Table
        A row for each method at each point of the grid, the best of each model in bold; beside ``local`` or
        ``fedavg_ft``, how many clients each other method helps and harms beyond chance, and the worst loss. Notes say
        what the marks mean, over how many clients a mean is that is not over all, and what tuning chose.
    """
    labels = [*found.rows[0].setting, "method", *(["tuned"] if found.tuning else [])]
    rows = []
    for place, row in enumerate(found.rows, 1):
        last = place == len(found.rows) or found.rows[place].setting != row.setting
        rows.append(Row((*_labels(found, row), *_scores(found, row), *_gain_cells(found, row)), ends_section=last))
    why = [f"{place} diverged: {sentence}" for place, sentence in found.diverged.items()]
    why += [f"{place} failed: {sentence}" for place, sentence in found.failed.items()]
    tuning = (tuned.sentence() for tuned in found.tuning)
    notes = (*_legend(found), *_gain_notes(found), *_counts(found), *tuning, *why)
    won = [f"{what} vs {reference}" for reference in found.references for what in _GAINS]
    columns = (*words(*labels), *numbers(*(found.models or ["result"]), *won))
    return Table(columns, tuple(rows), _title(found), notes, labels=len(labels))


def plain(found: Standings) -> dict[str, Any]:
    """Write what a report needs of a comparison as plain JSON types.

    Parameters
    ----------
    found
        The comparison.

    Returns
    -------
    dict
        The ``table`` as people read it, which runs were ``chosen`` and with which tuned values, and the parameters that
        were ``tuned``.
    """
    return {
        "at": found.at,
        "table": asdict(table(found)),
        "chosen": {run.path.name: format_values(row.tuned) for row in found.rows for run in row.runs},
        "tuned": list(dict.fromkeys(name for tuned in found.tuning for values, _ in tuned.scores for name in values)),
    }


def csv_text(found: Standings) -> str:
    """Write the numbers as CSV, unrounded.

    Parameters
    ----------
    found
        The comparison.

    Returns
    -------
    str
        A row for each method, model and point of the grid, methods by their names in the plan; empty where there is no
        number.
    """
    settings = list(found.rows[0].setting)
    headers = ["method", "tuned", "model", "metric", "at", "seeds", "mean", "std", "best", "pvalue", "mark"]
    headers += ["clients", "of_clients"]
    won = [f"{what} vs {reference}" for reference in found.references for what in _GAINS]
    rows = []
    for row in found.rows:
        left = [*(str(row.setting[name]) for name in settings), row.method, format_values(row.tuned)]
        common = [found.at, str(found.seeds)]
        if not row.scores:
            rows.append(Row((*left, "", _no_result(found, row), *common, *[""] * (7 + len(won)))))
        for place, (model, score) in enumerate(row.scores.items()):
            mean, std, pvalue = (
                "" if math.isnan(each) else repr(each) for each in (score.mean, score.std, score.pvalue)
            )
            counts = (str(score.clients), str(score.of_clients))
            # Gains are those of the first model that a method has.
            gained = [number for each in found.references for number in _gain_numbers(row, each, place == 0)]
            best = str(score.best).lower()
            rows.append(Row((*left, model, row.metric, *common, mean, std, best, pvalue, score.mark, *counts, *gained)))
    return Table(words(*settings, *headers, *won), tuple(rows)).csv()


def _gain_numbers(row: Standing, reference: str, first: bool) -> list[str]:
    gained = row.gains.get(reference)
    if gained is None or not first:
        return [""] * len(_GAINS)
    counts = [str(gained.helped), str(gained.harmed)] if gained.test else ["", ""]
    return [*counts, "" if math.isnan(gained.worst) else repr(gained.worst)]


def _gain_cells(found: Standings, row: Standing) -> list[Cell]:
    cells = []
    for reference in found.references:
        gained = row.gains.get(reference)
        if gained is None:
            cells += [Cell(ABSENT)] * len(_GAINS)
            continue
        of = f"of {len(gained)} clients" + (" of all seeds" if found.seeds > 1 else "")
        cells += [Cell(str(count) if gained.test else ABSENT, "", "", of) for count in (gained.helped, gained.harmed)]
        worst = gained.clients.iloc[0] if len(gained) else None
        who = "" if worst is None else f"{worst['name']}, seed {worst['seed']}"
        cells.append(Cell(ABSENT if worst is None else f"{gained.worst:+.4f}", "", "", who))
    return cells


def _gain_notes(found: Standings) -> list[str]:
    tests = {gained.test for row in found.rows for gained in row.gains.values()}
    if not tests:
        return []
    told = [f"worst vs {' or '.join(found.references)}: the least gain of any client"]
    if tests == {""}:
        return [*told, "who is helped or harmed beyond chance can be said of accuracy alone, a count of right answers"]
    over = f"clients of all {found.seeds} seeds" if found.seeds > 1 else "clients"
    told.append(
        f"helped, harmed: how many {over} gain or lose beyond chance on their own test samples, by McNemar's exact "
        f"test, with {LEVEL:.0%} false discoveries (Benjamini and Hochberg)"
    )
    if "bound" in tests:
        told.append(
            "answers to single samples were not recorded at that round, so as many samples as accuracies allow are "
            "taken to be answered differently: more clients may be helped or harmed"
        )
    return told


def _counts(found: Standings) -> list[str]:
    """Say which means are over fewer clients than have test samples."""
    said = []
    for row in found.rows:
        for model, score in row.scores.items():
            if score.clients < score.of_clients:
                of = f"{score.clients} of {score.of_clients} clients" + (" of all seeds" if found.seeds > 1 else "")
                said.append(f"{row.place}, {model} model: {row.metric} over {of}, for whom it is defined")
    return said


def _title(found: Standings) -> str:
    metrics = "/".join(dict.fromkeys(row.metric for row in found.rows if row.metric))
    if not metrics:
        return "no method has a result" if found.failed else "all runs diverged"
    return f"test {metrics} {_WHEN[found.at]}" + (f", mean ± std over {found.seeds} seeds" if found.seeds > 1 else "")


def _legend(found: Standings) -> list[str]:
    marked = any(score.mark for row in found.rows for score in row.scores.values())
    over = "client by client" + (" over all seeds" if found.seeds > 1 else "")
    return [f"{_MARKS}, {over}"] if marked else []


def _labels(found: Standings, row: Standing) -> list[str]:
    return [*map(str, row.setting.values()), row.title, *([format_values(row.tuned) or ABSENT] if found.tuning else [])]


def _scores(found: Standings, row: Standing) -> list[Cell]:
    if not row.scores:
        return [Cell(_no_result(found, row)), *[Cell("")] * (len(found.models) - 1)]
    return [_cell(row.scores.get(model)) for model in found.models]


def _no_result(found: Standings, row: Standing) -> str:
    return _FAILED if row.place in found.failed else _DIVERGED


def _cell(score: MethodScore | None) -> Cell:
    if score is None:
        return Cell(ABSENT)
    text = f"{score.mean:.4f}" + ("" if math.isnan(score.std) else f" ± {score.std:.4f}")
    tip = "" if math.isnan(score.pvalue) else f"p = {score.pvalue:.2g} against the best of its column"
    return Cell(text, "best" if score.best else "", score.mark, tip)
