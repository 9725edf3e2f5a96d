"""A comparison as a table."""

from __future__ import annotations

import math

from coterie.studies.comparison.standings import MethodScore, Standing, Standings, format_values
from coterie.tables import ABSENT, Cell, Row, Table, numbers, words

_DIVERGED = "diverged"
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
        A row for each method at each point of the grid, the best of each model in bold. Notes say what the marks mean,
        and what tuning chose.
    """
    labels = [*found.rows[0].setting, "method", *(["tuned"] if found.tuning else [])]
    rows = []
    for place, row in enumerate(found.rows, 1):
        last = place == len(found.rows) or found.rows[place].setting != row.setting
        rows.append(Row((*_labels(found, row), *_scores(found, row)), ends_section=last))
    notes = (*_legend(found), *(tuned.sentence() for tuned in found.tuning))
    return Table((*words(*labels), *numbers(*found.models)), tuple(rows), _title(found), notes, labels=len(labels))


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
    headers = ("method", "tuned", "model", "metric", "at", "seeds", "mean", "std", "best", "pvalue", "mark")
    rows = []
    for row in found.rows:
        left = [*(str(row.setting[name]) for name in settings), row.method, format_values(row.tuned)]
        common = [found.at, str(found.seeds)]
        if not row.scores:
            rows.append(Row((*left, "", _DIVERGED, *common, *[""] * 5)))
        for model, score in row.scores.items():
            mean, std, pvalue = (
                "" if math.isnan(each) else repr(each) for each in (score.mean, score.std, score.pvalue)
            )
            rows.append(
                Row((*left, model, row.metric, *common, mean, std, str(score.best).lower(), pvalue, score.mark))
            )
    return Table(words(*settings, *headers), tuple(rows)).csv()


def _title(found: Standings) -> str:
    metrics = "/".join(dict.fromkeys(row.metric for row in found.rows if row.metric)) or "nothing"
    return f"test {metrics} {_WHEN[found.at]}" + (f", mean ± std over {found.seeds} seeds" if found.seeds > 1 else "")


def _legend(found: Standings) -> list[str]:
    marked = any(score.mark for row in found.rows for score in row.scores.values())
    over = "client by client" + (" over all seeds" if found.seeds > 1 else "")
    return [f"{_MARKS}, {over}"] if marked else []


def _labels(found: Standings, row: Standing) -> list[str]:
    return [*map(str, row.setting.values()), row.title, *([format_values(row.tuned) or ABSENT] if found.tuning else [])]


def _scores(found: Standings, row: Standing) -> list[Cell]:
    if not row.scores:
        return [Cell(_DIVERGED if place == 0 else "") for place in range(len(found.models))]
    return [_cell(row.scores.get(model)) for model in found.models]


def _cell(score: MethodScore | None) -> Cell:
    if score is None:
        return Cell(ABSENT)
    text = f"{score.mean:.4f}" + ("" if math.isnan(score.std) else f" ± {score.std:.4f}")
    tip = "" if math.isnan(score.pvalue) else f"p = {score.pvalue:.2g} against the best of its column"
    return Cell(text, "best" if score.best else "", score.mark, tip)
