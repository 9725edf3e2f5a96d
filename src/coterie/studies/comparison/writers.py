"""A comparison's table for the terminal, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable

from rich import box
from rich.table import Table
from rich.text import Text

from coterie.studies.comparison.standings import Cell, Line, Standings, said

_ABSENT, _DIVERGED = "–", "diverged"
_MARKS = "* p < 0.05, ** p < 0.01, *** p < 0.001: differs from the best of its column, by the two-sided Wilcoxon test"
_WHEN = {
    "final": "after the last round",
    "best": "at the round that is best on validation data",
    "best_oracle": "at the round that is best on test data",
}
_TEX = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}"}
_TEX |= {sign: f"\\{sign}" for sign in "&%$#_{}"}


def terminal(found: Standings) -> Table:
    """Give the table for the terminal and the notebook.

    Parameters
    ----------
    found
        The comparison.

    Returns
    -------
    rich.table.Table
        A row for each method at each point of the grid, the best of each model in bold.
    """
    out = Table(
        title=title(found),
        box=box.SIMPLE_HEAD,
        title_justify="left",
        caption=legend(found),
        caption_justify="left",
        collapse_padding=True,
        pad_edge=False,
    )
    names = _left(found)
    for header in names:
        out.add_column(header)
    for header in found.models:
        out.add_column(header, justify="right", no_wrap=True)
    for place, line in enumerate(found.lines):
        cells = [
            Text.assemble((_number(cell), "bold" if cell and cell.best else ""), cell.mark if cell else "")
            for cell in _row(found, line)
        ]
        last = place + 1 == len(found.lines) or found.lines[place + 1].setting != line.setting
        out.add_row(*map(Text, _words(found, line)), *(cells or [Text(_DIVERGED)]), end_section=last)
    return out


def markdown(found: Standings) -> str:
    """Give the table as Markdown.

    Parameters
    ----------
    found
        The comparison.

    Returns
    -------
    str
        A title, the table, what the marks mean, and what tuning chose.
    """

    def escape(text: str) -> str:
        return text.replace("\\", "\\\\").replace("|", "\\|").replace("*", "\\*").replace("_", "\\_")

    def bold(text: str) -> str:
        return f"**{text}**"

    names = _left(found)
    head = [*map(escape, names), *found.models]
    rows = [head, ["---"] * len(names) + ["---:"] * len(found.models), *_rows(found, escape, bold, escape)]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    tuned = [f"- {escape(each.sentence())}" for each in found.tuning]
    parts = [title(found), "\n".join(lines), escape(legend(found)), "\n".join(tuned)]
    return "\n\n".join(part for part in parts if part) + "\n"


def latex(found: Standings) -> str:
    """Give the table as LaTeX that needs no package.

    Parameters
    ----------
    found
        The comparison.

    Returns
    -------
    str
        A ``tabular`` environment, with the title and the marks' meaning as comments above it.
    """

    def escape(text: str) -> str:
        return "".join(_TEX.get(sign, sign) for sign in text).replace("±", r"$\pm$").replace(_ABSENT, "--")

    def bold(text: str) -> str:
        return f"\\textbf{{{text}}}"

    def mark(text: str) -> str:
        return f"$^{{{text}}}$" if text else ""

    names = _left(found)
    rows = [
        " & ".join(map(escape, [*names, *found.models])) + r" \\ \hline",
        *(" & ".join(row) + r" \\" for row in _rows(found, escape, bold, mark)),
    ]
    notes = [title(found), *legend(found).splitlines(), *(each.sentence() for each in found.tuning)]
    columns = "l" * len(names) + "r" * len(found.models)
    body = [f"\\begin{{tabular}}{{{columns}}}", r"\hline", *rows, r"\hline", r"\end{tabular}", ""]
    return "\n".join([*(f"% {note}" for note in notes), *body])


def csv_text(found: Standings) -> str:
    """Give the numbers as CSV, unrounded.

    Parameters
    ----------
    found
        The comparison.

    Returns
    -------
    str
        A row for each method, model and point of the grid; empty where there is no number.
    """
    names = list(found.lines[0].setting)
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    numbers = ["mean", "std", "best", "pvalue", "mark"]
    writer.writerow([*names, "method", "tuned", "model", "metric", "at", "seeds", *numbers])
    for line in found.lines:
        left = [*(line.setting[name] for name in names), line.method, said(line.tuned)]
        if not line.cells:
            writer.writerow([*left, "", _DIVERGED, found.at, found.seeds, "", "", "", "", ""])
        for model, cell in line.cells.items():
            values = ["" if math.isnan(value) else repr(value) for value in (cell.mean, cell.std, cell.pvalue)]
            row = [values[0], values[1], str(cell.best).lower(), values[2], cell.mark]
            writer.writerow([*left, model, line.metric, found.at, found.seeds, *row])
    return out.getvalue()


def title(found: Standings) -> str:
    """Say what the numbers are.

    Parameters
    ----------
    found
        The comparison.

    Returns
    -------
    str
        One line.
    """
    metrics = "/".join(dict.fromkeys(line.metric for line in found.lines if line.metric)) or "nothing"
    return f"test {metrics} {_WHEN[found.at]}" + (f", mean ± std over {found.seeds} seeds" if found.seeds > 1 else "")


def legend(found: Standings) -> str:
    """Say what the marks mean.

    Parameters
    ----------
    found
        The comparison.

    Returns
    -------
    str
        One line; empty if there is no mark.
    """
    cells = [cell for line in found.lines for cell in line.cells.values()]
    over = "client by client" + (" over all seeds" if found.seeds > 1 else "")
    return f"{_MARKS}, {over}" if any(cell.mark for cell in cells) else ""


def _left(found: Standings) -> list[str]:
    tuned = ["tuned"] if found.tuning else []
    return [*found.lines[0].setting, "method", *tuned]


def _words(found: Standings, line: Line) -> list[str]:
    return [*map(str, line.setting.values()), line.method, *([said(line.tuned) or _ABSENT] if found.tuning else [])]


def _row(found: Standings, line: Line) -> list[Cell | None]:
    return [line.cells.get(model) for model in found.models] if line.cells else []


def _rows(
    found: Standings, escape: Callable[[str], str], bold: Callable[[str], str], mark: Callable[[str], str]
) -> list[list[str]]:
    rows = []
    for line in found.lines:
        cells = []
        for cell in _row(found, line):
            text = escape(_number(cell))
            cells.append((bold(text) if cell and cell.best else text) + (mark(cell.mark) if cell else ""))
        cells = cells or [_DIVERGED] + [""] * (len(found.models) - 1)
        rows.append([*map(escape, _words(found, line)), *cells[: len(found.models)]])
    return rows


def _number(cell: Cell | None) -> str:
    if cell is None:
        return _ABSENT
    return f"{cell.mean:.4f}" + ("" if math.isnan(cell.std) else f" ± {cell.std:.4f}")
