"""The table of a recipe's part: our numbers beside the paper's.

A part with a single column has ours, theirs and the difference beside each other. A part with several has these below
each other, a row each. Columns are readings; where there is one reading and a grid, they are the grid's points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from coterie.studies.recipes.cells import EVERY_OTHER, CellName, PaperNumber
from coterie.studies.recipes.outcomes import PartOutcome
from coterie.studies.recipes.readings import Value
from coterie.studies.recipes.schema import Reading, RecipePart
from coterie.tables import ABSENT, Cell, Row, Table, numbers, words

DIVERGED = "diverged"
"""What stands where a run became NaN or infinite."""

_DECIMALS = {"percent": 2, "fraction": 4}
_LARGE = 1e6


def part_table(outcome: PartOutcome, unit: str, quick: bool) -> Table:
    """Make the table of a part; of the quick version without differences, for its numbers are not comparable."""
    part, plan, settings = outcome.part, outcome.plan, outcome.settings
    grid_across = len(part.readings) == 1 and len(settings) > 1
    single = len(part.readings) == 1 and not grid_across
    shows_setting = len(settings) > 1 and not grid_across
    write = _CellWriter(outcome, unit)
    rows: list[Row] = []
    for setting in settings if not grid_across else ("",):
        for place, method in enumerate(plan.methods, 1):
            names = _cell_names(outcome, method, setting, grid_across)
            if all(write.ours(name).text == ABSENT and name not in outcome.theirs for name in names):
                continue
            labels = (*((setting,) if shows_setting else ()), plan.titles[method])
            ends = place == len(plan.methods) and shows_setting
            rows += _rows(write, labels, names, single=single, quick=quick, ends=ends)
    compared = [] if not outcome.theirs else ["paper"] if quick else ["paper", "difference"]
    headings = settings if grid_across else tuple(reading.title or name for name, reading in part.readings.items())
    headings = ("ours", *compared) if single else headings
    whose = ("",) if outcome.theirs and not single else ()
    labels = (*((", ".join(plan.grid),) if shows_setting else ()), "method", *whose)
    notes = (*write.notes, *([part.note] if part.note else []), *(each.sentence() for each in outcome.numbers.tuned))
    return Table((*words(*labels), *numbers(*headings)), tuple(rows), notes=notes, labels=len(labels))


def _cell_names(outcome: PartOutcome, method: str, setting: str, grid_across: bool) -> list[CellName]:
    name, readings = outcome.part.name, outcome.part.readings
    if grid_across:
        return [CellName(name, each, method, next(iter(readings))) for each in outcome.settings]
    return [CellName(name, setting, method, reading) for reading in readings]


def _rows(
    write: _CellWriter, labels: tuple[str, ...], names: Sequence[CellName], *, single: bool, quick: bool, ends: bool
) -> list[Row]:
    ours = [write.ours(name) for name in names]
    if not write.has_theirs:
        return [Row((*labels, *ours), ends)]
    theirs = [write.theirs(name) for name in names]
    differences = [] if quick else [write.difference(name) for name in names]
    if single:
        return [Row((*labels, *ours, *theirs, *differences), ends)]
    if all(cell.text == ABSENT for cell in theirs):
        return [Row((*labels, "ours", *ours), ends)]
    blank = ("",) * len(labels)
    rows = [Row((*labels, "ours", *ours)), Row((*blank, "paper", *theirs), quick and ends, muted=True)]
    return rows if quick else [*rows, Row((*blank, "diff", *differences), ends, muted=True)]


class _CellWriter:
    """Writes the cells of a part, and collects the notes that their marks need."""

    def __init__(self, outcome: PartOutcome, unit: str) -> None:
        self._outcome, self._unit = outcome, unit
        self._reasons: list[str] = []

    @property
    def has_theirs(self) -> bool:
        return bool(self._outcome.theirs)

    @property
    def notes(self) -> list[str]:
        return [f"{'†' * place} not a target: {reason}" for place, reason in enumerate(self._reasons, 1)]

    def ours(self, name: CellName) -> Cell:
        value = self._outcome.numbers.values.get(name)
        if value is None:
            diverged = (name.setting, name.method) in self._outcome.numbers.diverged
            return Cell(DIVERGED if diverged else ABSENT)
        return Cell(written(value, self._decimals(name)))

    def theirs(self, name: CellName) -> Cell:
        number = self._outcome.theirs.get(name)
        if number is None:
            return Cell(ABSENT)
        reason = not_target(self._outcome.part, name)
        return Cell(written(number, self._decimals(name)), mark=self._mark(reason), tooltip=reason)

    def difference(self, name: CellName) -> Cell:
        value, number = self._outcome.numbers.values.get(name), self._outcome.theirs.get(name)
        if value is None or number is None or math.isnan(value.mean):
            return Cell(ABSENT)
        return Cell(f"{value.mean - number.mean:+.{self._decimals(name)}f}")

    def _decimals(self, name: CellName) -> int:
        return decimals(self._outcome.part.readings[name.reading], self._unit)

    def _mark(self, reason: str) -> str:
        if not reason:
            return ""
        if reason not in self._reasons:
            self._reasons.append(reason)
        return "†" * (self._reasons.index(reason) + 1)


def decimals(reading: Reading, unit: str) -> int:
    if reading.decimals is not None:
        return reading.decimals
    if reading.weights is not None or reading.paired == "ahead":
        return 2
    accuracy = reading.metric != "loss" and reading.paired != "pvalue"
    return _DECIMALS[unit] if accuracy else 4


def written(number: Value | PaperNumber, digits: int) -> str:
    """Write a number with its deviation; one that would show none of its digits, or too many, as a power of ten."""
    if math.isnan(number.mean):
        return "NaN"
    odd = number.mean != 0 and not 0.5 * 10.0**-digits <= abs(number.mean) < _LARGE
    text = _brief(number.mean) if odd else f"{number.mean:.{digits}f}"
    if number.std is None or math.isnan(number.std):
        return text
    return f"{text}±{_brief(number.std) if odd else f'{number.std:.{digits}f}'}"


def _brief(value: float) -> str:
    return f"{value:.1e}" if math.isfinite(value) else "∞"


def not_target(part: RecipePart, name: CellName) -> str:
    """Say why a number of the paper cannot be reached; empty if it is a target."""
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
