"""What a criterion demands of the numbers: inequalities, each with what it depends on.

A criterion is taken apart into inequalities between cells, all of which must be met. The *margin* of each is by how
much more it could have been missed. It is known with its slopes, that is, how fast it changes with each cell, so that
an interval for the cells gives one for the margin.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from coterie.studies.recipes.cells import EVERY_OTHER, Address, CellName, Term
from coterie.studies.recipes.outcomes import PartOutcome
from coterie.studies.recipes.schema import Above, AtLeast, Between, Close, Criterion, Monotone, Near


class Missing(Exception):
    """A number that a criterion needs is not there."""


@dataclass(frozen=True)
class Estimate:
    """A number worked out of cells, and how fast it changes with each of them."""

    value: float
    slopes: Mapping[CellName, float] = field(default_factory=dict)

    def __add__(self, other: Estimate | float) -> Estimate:
        theirs = other if isinstance(other, Estimate) else Estimate(other)
        return Estimate(self.value + theirs.value, _mixed(self.slopes, 1.0, theirs.slopes, 1.0))

    def __sub__(self, other: Estimate | float) -> Estimate:
        theirs = other if isinstance(other, Estimate) else Estimate(other)
        return Estimate(self.value - theirs.value, _mixed(self.slopes, 1.0, theirs.slopes, -1.0))

    def __neg__(self) -> Estimate:
        return Estimate(-self.value, _mixed(self.slopes, -1.0, {}, 0.0))

    def __truediv__(self, other: Estimate | float) -> Estimate:
        theirs = other if isinstance(other, Estimate) else Estimate(other)
        ratio = self.value / theirs.value
        return Estimate(ratio, _mixed(self.slopes, 1 / theirs.value, theirs.slopes, -ratio / theirs.value))


def _mixed(
    one: Mapping[CellName, float], weight: float, other: Mapping[CellName, float], its_weight: float
) -> dict[CellName, float]:
    slopes = {name: weight * slope for name, slope in one.items()}
    for name, slope in other.items():
        slopes[name] = slopes.get(name, 0.0) + its_weight * slope
    return slopes


Named = list[tuple[str, Estimate]]
"""Terms that have been worked out, with what to call them."""


@dataclass(frozen=True)
class Demand:
    """One inequality: the margin is above zero or, if not strict, at least zero."""

    margin: Estimate
    strict: bool
    evidence: str

    @property
    def met(self) -> bool:
        """Whether the numbers as they are meet it."""
        return self.margin.value > 0 or (not self.strict and self.margin.value == 0)


def worst(demands: Sequence[Demand]) -> Demand:
    """Give the one with the least margin, the first of equals."""
    return min(demands, key=lambda demand: demand.margin.value)


def demands_at(criterion: Criterion, outcome: PartOutcome, setting: str, gone: list[str]) -> list[Demand]:
    """Give what is demanded of one part and setting; methods of all others that diverged are added to ``gone``."""
    return _demands(criterion, *_sides(criterion, outcome, setting, gone))


def demands_of_means(
    criterion: Criterion, places: Sequence[tuple[PartOutcome, str]], gone: list[str]
) -> tuple[list[Demand], int]:
    """Give what is demanded of the means over parts and settings, and how many of these have all numbers."""
    sides, missing = [], ""
    for outcome, setting in places:
        try:
            sides.append(_sides(criterion, outcome, setting, gone))
        except Missing as found:
            missing = str(found)
    if not sides:
        raise Missing(missing or "none of its parts was run")
    return _demands(criterion, *(_means([each[k] for each in sides]) for k in (0, 1))), len(sides)


def _means(sides: Sequence[Named]) -> Named:
    """Average terms that all have."""
    tables = [dict(side) for side in sides]
    names = [name for name, _ in sides[0] if all(name in table for table in tables)]
    return [(name, sum((table[name] for table in tables), Estimate(0.0)) / len(tables)) for name in names]


def _sides(criterion: Criterion, outcome: PartOutcome, setting: str, gone: list[str]) -> tuple[Named, Named]:
    """Give the terms of both sides; those of all others that diverged are not among them but added to ``gone``."""
    test = criterion.test
    of = [each for term in test.of for each in _worked_out(criterion, outcome, setting, term, gone)]
    if isinstance(test, Near):
        terms = (_worked_out(criterion, outcome, setting, term, gone, of_paper=True) for term in test.of)
        return of, [each for term in terms for each in term]
    if not isinstance(test, Above | AtLeast):
        return of, []
    return of, [each for term in test.than for each in _worked_out(criterion, outcome, setting, term, gone)]


def _worked_out(
    criterion: Criterion, outcome: PartOutcome, setting: str, term: Term, gone: list[str], of_paper: bool = False
) -> Named:
    found: Named = []
    gaps: list[str] = []
    for cells in _spelt_out(criterion, outcome, term):
        names = [_cell(outcome, address, setting) for address in cells]
        try:
            numbers = [_number(outcome, name, of_paper) for name in names]
        except Missing as missing:
            # Of all others, one that has no such model is passed over; one that diverged is missed.
            diverged = [name for name in names if (name.setting, name.method) in outcome.numbers.diverged]
            gone += [outcome.plan.titles[name.method] for name in diverged]
            gaps.append(str(missing))
            continue
        shown_as = tuple(replace(address, method=outcome.plan.titles[address.method]) for address in cells)
        found.append((str(Term(shown_as, term.operation)), _operated(term.operation, numbers)))
    if not found:
        raise Missing(gaps[0] if gaps else f"no method is left for {term}")
    return found


def _spelt_out(criterion: Criterion, outcome: PartOutcome, term: Term) -> Iterator[tuple[Address, ...]]:
    if all(address.method != EVERY_OTHER for address in term.cells):
        yield term.cells
        return
    for method in every_other(criterion, outcome):
        yield tuple(
            Address(method, address.reading, address.setting) if address.method == EVERY_OTHER else address
            for address in term.cells
        )


def every_other(criterion: Criterion, outcome: PartOutcome) -> list[str]:
    """Give the methods for which ``*`` stands."""
    named = {address.method for each in criterion.terms for address in each.cells} | {*criterion.leave_out}
    return [method for method in outcome.plan.methods if method not in named]


def _cell(outcome: PartOutcome, address: Address, setting: str) -> CellName:
    reading = address.reading or next(iter(outcome.part.readings))
    return CellName(outcome.part.name, address.setting or setting, address.method, reading)


def _number(outcome: PartOutcome, name: CellName, of_paper: bool) -> Estimate:
    method = outcome.plan.titles.get(name.method, name.method)  # it may not have been run
    where = f"{method} | {name.reading}" + (f" | {name.setting}" if name.setting else "")
    if of_paper:
        if name not in outcome.theirs:
            raise Missing(f"the paper has no number for {where}")
        return Estimate(outcome.theirs[name].mean)
    if name not in outcome.numbers.values:
        diverged = (name.setting, name.method) in outcome.numbers.diverged
        raise Missing(f"{method} diverged" if diverged else f"there is no number for {where}")
    value = outcome.numbers.values[name].mean
    if math.isnan(value):
        raise Missing(f"{where} is not a number")
    return Estimate(value, {name: 1.0})


def _operated(operation: str, numbers: Sequence[Estimate]) -> Estimate:
    if operation == "minus":
        return numbers[0] - numbers[1]
    if operation == "over":
        if numbers[1].value == 0:
            raise Missing("a ratio has a zero below its line")
        return numbers[0] / numbers[1]
    return numbers[0]


def _demands(criterion: Criterion, of: Named, than: Named) -> list[Demand]:
    test = criterion.test
    if not of or (isinstance(test, Above | AtLeast | Near) and not than):
        raise Missing("its parts have no cells in common")
    if isinstance(test, Above | AtLeast):
        strict = isinstance(test, Above)
        extra = -test.by if isinstance(test, Above) else test.slack
        return [
            Demand(one[1] - other[1] + extra, strict, f"{_term(one)} against {_term(other)}")
            for one in of
            for other in than
        ]
    if isinstance(test, Close):
        pairs = list(itertools.permutations(of, 2)) or [(of[0], of[0])]
        return [Demand(low[1] - high[1] + test.within, False, _span(low, high)) for low, high in pairs]
    if isinstance(test, Between):
        return [
            Demand(margin, False, _term(each))
            for each in of
            for margin in (
                *([] if test.low is None else [each[1] - test.low]),
                *([] if test.high is None else [-each[1] + test.high]),
            )
        ]
    if isinstance(test, Near):
        return _near(test, of, dict(than))
    return _in_order(test, of)


def _near(test: Near, of: Named, theirs: Mapping[str, Estimate]) -> list[Demand]:
    found = []
    for name, ours in of:
        if name in theirs:
            evidence = f"{name} {shown(ours.value)}, the paper's {shown(theirs[name].value)}"
            away = ours - theirs[name]
            found += [Demand(each + test.within, False, evidence) for each in (away, -away)]
    if not found:
        raise Missing("the paper has no number for any of its cells")
    return found


def _in_order(test: Monotone, of: Named) -> list[Demand]:
    evidence = ", ".join(shown(each.value) for _, each in of)
    pairs = [(before[1], after[1]) for before, after in itertools.pairwise(of)]
    ends = (of[0][1], of[-1][1])
    up = test.direction == "up"
    steps = [after - before if up else before - after for before, after in (*pairs, ends)]
    demands = [Demand(step + test.slack, False, evidence) for step in steps[:-1]]
    return [*demands, Demand(steps[-1], True, evidence)]


def _span(low: tuple[str, Estimate], high: tuple[str, Estimate]) -> str:
    return f"from {_term(low)} to {_term(high)}" if low[1].value != high[1].value else _term(low)


def _term(each: tuple[str, Estimate]) -> str:
    return f"{each[0]} {shown(each[1].value)}"


def shown(value: float) -> str:
    """Write a number of any size: four significant digits, small ones with a power of ten."""
    return f"{value:.4g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"
