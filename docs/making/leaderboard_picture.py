"""The leaderboard's picture for the site, on light ground and on dark; and, as a program, the page from its record.

    python docs/making/leaderboard_picture.py

writes anew what ``docs/leaderboard.md`` has from "In short" on, what ``docs/choose_a_method.md`` has of it, and where
our own method stands in ``docs/own_method.md``.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
from sample import INK, set_in_ink

from coterie.results.figures import HeatMap, matplotlib_figure
from coterie.runs.storage.atomic_files import write_text
from coterie.studies.leaderboard import advice, one_method, page, record
from coterie.studies.leaderboard.picture import FARTHEST, behind_the_best
from coterie.studies.leaderboard.protocol import load

RECORD = Path(__file__).resolve().parents[2] / "results" / "leaderboard.json"
PAGE = Path(__file__).resolve().parents[1] / "leaderboard.md"
CHOICE = PAGE.with_name("choose_a_method.md")
OWN_RECORD, OWN = RECORD.with_name("own_method.json"), PAGE.with_name("own_method.md")
BETWEEN = ("<!-- table: leaderboard -->\n", "<!-- table: end -->\n")
MARK = "<!-- generated: leaderboard_picture -->"
PLACE = "sample"
_STEM = "leaderboard"


@functools.cache
def made() -> dict[str, Path]:
    """Draw the picture twice, and give the files by their places on the site; none while nothing has been played."""
    found = record.read([RECORD], load())
    if not found.boards:
        return {}
    chart, folder = behind_the_best(found), Path(tempfile.mkdtemp(prefix="coterie-site-"))
    paths = {dark: folder / _file(dark) for dark in (False, True)}
    for dark, path in paths.items():
        _draw(chart, path, dark)
    return {f"{PLACE}/{path.name}": path for path in paths.values()}


def _file(dark: bool) -> str:
    return f"{_STEM}{'-dark' if dark else ''}.svg"


def _draw(chart: HeatMap, path: Path, dark: bool) -> None:
    (_, values) = chart.frames[-1]
    with matplotlib.rc_context(set_in_ink(dark)):
        figure = matplotlib_figure(chart)
        figure.set_size_inches(2.2 + 0.78 * values.shape[1], 0.9 + 0.24 * values.shape[0])
        axes = figure.axes[0]
        for (row, column), value in _cells(values):
            # On the dark end of the scale text is light, whatever the page's ground.
            colour = "#ffffff" if value < FARTHEST / 2 else "#24292f"
            axes.text(column, row, f"{value:.1f}", ha="center", va="center", color=colour, fontsize=7)
        axes.xaxis.tick_top()
        axes.tick_params(axis="x", rotation=30)
        for place, first in _places(chart):
            where = (first - 0.4, len(values) - 0.4)
            axes.annotate(place, where, color=INK[dark], fontsize=7, va="top", annotation_clip=False)
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "coterie"}):
            figure.savefig(path, metadata={"Date": None})


def _cells(values: Any) -> list[tuple[tuple[int, int], float]]:
    rows, columns = values.shape
    found = [((row, column), float(values[row, column])) for row in range(rows) for column in range(columns)]
    return [(place, value) for place, value in found if value == value]


def _places(chart: HeatMap) -> list[tuple[str, int]]:
    labels = chart.columns.labels
    return [(label.replace(", ", "\n", 1), k) for k, label in enumerate(labels) if k == 0 or label != labels[k - 1]]


def shown() -> str:
    """Show the picture on the page."""
    words = "How many points each method is behind the best of each setting"
    return "".join(f"![{words}]({PLACE}/{_file(dark)}#only-{'dark' if dark else 'light'})" for dark in (False, True))


def write_pages() -> None:
    """Write the parts of the pages that are made from the record."""
    found = record.read([RECORD], load())
    written = PAGE.read_text(encoding="utf-8").partition("## In short\n")[0]
    write_text(PAGE, written + page.markdown(found, MARK))
    _replace(CHOICE, f"{advice.markdown(found)}\n\n{page.in_short(found)}")
    _replace(OWN, own())


def _replace(path: Path, text: str) -> None:
    (before, _, rest), (begins, ends) = path.read_text(encoding="utf-8").partition(BETWEEN[0]), BETWEEN
    write_text(path, f"{before}{begins}\n{text}\n\n{ends}{rest.partition(ends)[2]}")


def own() -> str:
    """Say where our own method stands among the others."""
    found = record.read([RECORD, OWN_RECORD], load())
    (method,) = {entry.method for entry in record.read([OWN_RECORD], load()).entries}
    table = one_method.table(found, method).markdown().rstrip("\n")
    return f"{one_method.sentence(found, method)}\n\n{table}"


if __name__ == "__main__":
    write_pages()
