"""A recipe's numbers laid out in rows and columns, ours beside the paper's, apart from how they are drawn.

A part with a single column has ours, theirs and the difference beside each other. A part with several has these below
each other, a line each. Columns are readings; where there is one reading and a grid, they are the grid's points.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from coterie.studies.recipes.cells import EVERY_OTHER, CellName, Number
from coterie.studies.recipes.readings import Value
from coterie.studies.recipes.runner import Played
from coterie.studies.recipes.schema import Part, Reading

ABSENT, DIVERGED = "–", "diverged"
"""What stands where there is no number, and where a run became NaN or infinite."""

_PLAIN = {"percent": 2, "fraction": 4}
_LARGE = 1e6


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Parameters
    ----------
    left
        What it is of: setting, method, and whose numbers.
    cells
        What stands in the columns.
    kind
        ``"ours"``, ``"paper"``, ``"difference"``, or ``"all"`` where a line holds all three.
    last
        Whether the next line is of another setting.
    """

    left: tuple[str, ...]
    cells: tuple[str, ...]
    kind: str
    last: bool


@dataclass(frozen=True)
class Layout:
    """The table of a part.

    Parameters
    ----------
    left
        Headings of the words on the left.
    columns
        Headings of the numbers.
    rows
        Its lines.
    notes
        What marks mean, one sentence each.
    """

    left: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...]


def layout(played: Played, unit: str, quick: bool) -> Layout:
    """Lay a part's numbers out.

    Parameters
    ----------
    played
        The part as it was run.
    unit
        The recipe's unit.
    quick
        Whether it was the quick version, whose numbers are not comparable with the paper's: then there are no
        differences.

    Returns
    -------
    Layout
        The table.
    """
    part = played.part
    across = len(part.readings) == 1 and len(played.settings) > 1
    single = len(part.readings) == 1 and not across
    shows_setting = len(played.settings) > 1 and not across
    draw = _Drawing(played, unit)
    has_theirs = bool(played.theirs)
    rows: list[Row] = []
    for setting in played.settings if not across else ("",):
        for place, method in enumerate(played.plan.methods):
            names = _cells(played, method, setting, across)
            left = (*((setting,) if shows_setting else ()), method)
            if all(draw.ours(name) == ABSENT and name not in played.theirs for name in names):
                continue
            last = place + 1 == len(played.plan.methods) and shows_setting
            rows += _lines(draw, left, names, single, has_theirs, quick, last)
    headings = played.settings if across else tuple(reading.title or name for name, reading in part.readings.items())
    if single:
        headings = ("ours", *(("paper",) if has_theirs else ()), *(("difference",) if has_theirs and not quick else ()))
    whose = ("",) if has_theirs and not single else ()
    titles = (*((_grid(played),) if shows_setting else ()), "method", *whose)
    return Layout(titles, headings, tuple(rows), tuple(draw.notes))


def _grid(played: Played) -> str:
    return ", ".join(played.plan.grid)


def _cells(played: Played, method: str, setting: str, across: bool) -> list[CellName]:
    name = played.part.name
    if across:
        reading = next(iter(played.part.readings))
        return [CellName(name, each, method, reading) for each in played.settings]
    return [CellName(name, setting, method, reading) for reading in played.part.readings]


def _lines(
    draw: _Drawing, left: tuple[str, ...], names: list[CellName], single: bool, theirs: bool, quick: bool, last: bool
) -> list[Row]:
    ours = tuple(draw.ours(name) for name in names)
    if not theirs:
        return [Row(left, ours, "ours", last)]
    paper = tuple(draw.theirs(name) for name in names)
    difference = () if quick else tuple(draw.difference(name) for name in names)
    if single:
        return [Row(left, (*ours, *paper, *difference), "all", last)]
    if all(each == ABSENT for each in paper):
        return [Row((*left, "ours"), ours, "ours", last)]
    blank = ("",) * len(left)
    rows = [Row((*left, "ours"), ours, "ours", False), Row((*blank, "paper"), paper, "paper", quick and last)]
    return rows if quick else [*rows, Row((*blank, "diff"), difference, "difference", last)]


class _Drawing:
    """Writes cells, and keeps the notes that their marks need."""

    def __init__(self, played: Played, unit: str) -> None:
        self._dish, self._unit = played, unit
        self._theirs = played.theirs
        self.notes: list[str] = []

    def ours(self, name: CellName) -> str:
        value = self._dish.cells.values.get(name)
        if value is None:
            return DIVERGED if (name.setting, name.method) in self._dish.cells.diverged else ABSENT
        return written(value, decimals(self._reading(name), self._unit))

    def theirs(self, name: CellName) -> str:
        number = self._theirs.get(name)
        if number is None:
            return ABSENT
        return written(number, decimals(self._reading(name), self._unit)) + self._mark(name)

    def difference(self, name: CellName) -> str:
        value, number = self._dish.cells.values.get(name), self._theirs.get(name)
        if value is None or number is None or math.isnan(value.mean):
            return ABSENT
        return f"{value.mean - number.mean:+.{decimals(self._reading(name), self._unit)}f}"

    def _reading(self, name: CellName) -> Reading:
        return self._dish.part.readings[name.reading]

    def _mark(self, name: CellName) -> str:
        reason = not_target(self._dish.part, name)
        if not reason:
            return ""
        if reason not in self.notes:
            self.notes.append(reason)
        return "†" * (self.notes.index(reason) + 1)


def decimals(reading: Reading, unit: str) -> int:
    """Say how many digits behind the point a column shows.

    Parameters
    ----------
    reading
        The reading.
    unit
        The recipe's unit.

    Returns
    -------
    int
        How many.
    """
    if reading.decimals is not None:
        return reading.decimals
    if reading.weights is not None or reading.paired == "ahead":
        return 2
    accuracy = reading.metric != "loss" and reading.paired != "pvalue"
    return _PLAIN[unit] if accuracy else 4


def written(number: Value | Number, digits: int) -> str:
    """Write a number with what stands behind its plus-minus sign.

    Parameters
    ----------
    number
        Ours or the paper's.
    digits
        How many digits behind the point; a number that would show none of its own, or too many before the point, has
        a power of ten instead.

    Returns
    -------
    str
        The text.
    """
    if math.isnan(number.mean):
        return "NaN"
    odd = number.mean != 0 and not 0.5 * 10.0**-digits <= abs(number.mean) < _LARGE
    text = _brief(number.mean) if odd else f"{number.mean:.{digits}f}"
    if number.std is None or math.isnan(number.std):
        return text
    return f"{text}±{_brief(number.std) if odd else f'{number.std:.{digits}f}'}"


def _brief(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "∞"


def not_target(part: Part, name: CellName) -> str:
    """Say why a number of the paper is not to be reached.

    Parameters
    ----------
    part
        The part.
    name
        The cell.

    Returns
    -------
    str
        One sentence; empty if the number is a target.
    """
    for entry in part.not_targets:
        for address in entry.addresses:
            fits = (
                address.method in (EVERY_OTHER, name.method),
                address.reading in ("", name.reading),
                address.setting in ("", name.setting),
            )
            if all(fits):
                return entry.why
    return ""
