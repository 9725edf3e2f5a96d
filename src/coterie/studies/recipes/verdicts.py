"""Which criteria hold, and by how much.

Every criterion is judged for each part and setting it speaks of (or once, for their means). The *margin* is by how much
more it could have been missed: positive where it holds, negative where it fails. Without a number that it needs, it is
left open and says what is missing. Where it speaks of all other methods and one of them diverged, it fails if it fails
for the rest, and is left open otherwise.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from coterie.studies.recipes.cells import EVERY_OTHER, Address, CellName, Number, Term
from coterie.studies.recipes.readings import Value
from coterie.studies.recipes.schema import Above, AtLeast, Between, Close, Criterion, Monotone, Near, Part, Recipe

Status = Literal["holds", "fails", "open", "left out"]
"""Of a criterion: holds wherever it was judged, fails somewhere, was judged nowhere, or is not judged when quick."""


@dataclass(frozen=True)
class Judged:
    """One part as it was run.

    Parameters
    ----------
    part
        The part.
    methods
        The methods of its plan.
    settings
        The labels of its plan's grid.
    values
        Our numbers.
    theirs
        The paper's.
    diverged
        Pairs of setting and method of which a run became NaN or infinite.
    """

    part: Part
    methods: tuple[str, ...]
    settings: tuple[str, ...]
    values: Mapping[CellName, Value]
    theirs: Mapping[CellName, Number]
    diverged: frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Finding:
    """What was found for one part and setting.

    Parameters
    ----------
    part
        The part's name; empty for means over several.
    setting
        The setting's label; empty if there is none.
    margin
        By how much it holds or, negative, fails; ``None`` where it could not be judged.
    holds
        Whether it holds; ``None`` where it could not be judged.
    evidence
        The numbers that decide it, or why it could not be judged.
    """

    part: str
    setting: str
    margin: float | None
    holds: bool | None
    evidence: str


@dataclass(frozen=True)
class Verdict:
    """What became of a criterion.

    Parameters
    ----------
    criterion
        The criterion.
    status
        In one word.
    findings
        For each part and setting.
    """

    criterion: Criterion
    status: Status
    findings: tuple[Finding, ...]


class _Missing(Exception):
    """A number that a criterion needs is not there."""


Named = list[tuple[str, float]]
"""Terms that have been worked out, with what to call them."""


def judge(
    recipe: Recipe, parts: Mapping[str, Judged], absent: Mapping[str, str] | None = None, quick: bool = False
) -> list[Verdict]:
    """Judge all criteria of a recipe.

    Parameters
    ----------
    recipe
        The recipe.
    parts
        The parts that were run, by name.
    absent
        For parts that were not, why.
    quick
        Whether this was the quick version: then only criteria that are expected to hold in it are judged.

    Returns
    -------
    list of Verdict
        One for each criterion, in their order.
    """
    return [_judge(recipe, criterion, parts, absent or {}, quick) for criterion in recipe.criteria]


def _judge(
    recipe: Recipe, criterion: Criterion, parts: Mapping[str, Judged], absent: Mapping[str, str], quick: bool
) -> Verdict:
    if quick and not criterion.quick:
        return Verdict(criterion, "left out", ())
    findings = []
    places: list[tuple[Judged, str]] = []
    for name in criterion.parts or [part.name for part in recipe.parts]:
        if name in parts:
            places += [(parts[name], setting) for setting in _settings(criterion, parts[name])]
        elif name in absent:
            findings.append(Finding(name, "", None, None, absent[name]))
    if criterion.take == "mean":
        findings.append(_of_means(criterion, places))
    else:
        findings += [_at(criterion, judged, setting) for judged, setting in places]
    judged_ones = [finding.holds for finding in findings if finding.holds is not None]
    status: Status = "open" if not judged_ones else "holds" if all(judged_ones) else "fails"
    return Verdict(criterion, status, tuple(findings))


def _settings(criterion: Criterion, judged: Judged) -> list[str]:
    """Give the settings to judge: none in particular if every cell names its own."""
    if all(address.setting for term in criterion.terms for address in term.cells):
        return [""]
    return [label for label in judged.settings if not criterion.settings or label in criterion.settings]


def _at(criterion: Criterion, judged: Judged, setting: str) -> Finding:
    gone: list[str] = []
    try:
        of, than = _sides(criterion, judged, setting, gone)
        decided = _decide(criterion, of, than)
    except _Missing as missing:
        return Finding(judged.part.name, setting, None, None, str(missing))
    return Finding(judged.part.name, setting, *_without(decided, gone))


def _without(decided: tuple[float, bool, str], gone: Sequence[str]) -> tuple[float | None, bool | None, str]:
    """Say what is decided although some methods diverged: more numbers could only make it fail."""
    margin, holds, evidence = decided
    if not gone:
        return decided
    sentence = f"{' and '.join(dict.fromkeys(gone))} diverged"
    if holds:
        return None, None, f"{sentence}; without, it would hold by {shown(margin)} ({evidence})"
    return margin, False, f"{evidence}; {sentence}"


def _of_means(criterion: Criterion, places: Sequence[tuple[Judged, str]]) -> Finding:
    sides = []
    missing = ""
    gone: list[str] = []
    for judged, setting in places:
        try:
            sides.append(_sides(criterion, judged, setting, gone))
        except _Missing as found:
            missing = str(found)
    if not sides:
        return Finding("", "", None, None, missing or "none of its parts was run")
    try:
        margin, holds, evidence = _decide(criterion, *(_means([each[k] for each in sides]) for k in (0, 1)))
    except _Missing as found:
        return Finding("", "", None, None, str(found))
    evidence = f"{evidence}, means over {len(sides)} of {len(places)}"
    return Finding("", "", *_without((margin, holds, evidence), gone))


def _means(sides: Sequence[Named]) -> Named:
    """Average terms that all have."""
    tables = [dict(side) for side in sides]
    names = [name for name, _ in sides[0] if all(name in table for table in tables)]
    return [(name, sum(table[name] for table in tables) / len(tables)) for name in names]


def _sides(criterion: Criterion, judged: Judged, setting: str, gone: list[str]) -> tuple[Named, Named]:
    """Give the terms of both sides; those of all others that diverged are not among them but added to ``gone``."""
    test = criterion.test
    of = [each for term in test.of for each in _worked_out(criterion, judged, setting, term, gone)]
    if isinstance(test, Near):
        terms = (_worked_out(criterion, judged, setting, term, gone, of_paper=True) for term in test.of)
        return of, [each for term in terms for each in term]
    if not isinstance(test, Above | AtLeast):
        return of, []
    return of, [each for term in test.than for each in _worked_out(criterion, judged, setting, term, gone)]


def _worked_out(
    criterion: Criterion, judged: Judged, setting: str, term: Term, gone: list[str], of_paper: bool = False
) -> Named:
    found: Named = []
    gaps: list[str] = []
    for cells in _spelt_out(criterion, judged, term):
        names = [_cell(judged, address, setting) for address in cells]
        try:
            numbers = [_number(judged, name, of_paper) for name in names]
        except _Missing as missing:
            # Of all others, one that has no such model is passed over; one that diverged is missed.
            gone += [name.method for name in names if (name.setting, name.method) in judged.diverged]
            gaps.append(str(missing))
            continue
        found.append((str(Term(cells, term.operation)), _operated(term.operation, numbers)))
    if not found:
        raise _Missing(gaps[0] if gaps else f"no method is left for {term}")
    return found


def _spelt_out(criterion: Criterion, judged: Judged, term: Term) -> Iterator[tuple[Address, ...]]:
    if all(address.method != EVERY_OTHER for address in term.cells):
        yield term.cells
        return
    named = {address.method for each in criterion.terms for address in each.cells} | {*criterion.leave_out}
    for method in judged.methods:
        if method not in named:
            yield tuple(
                Address(method, address.reading, address.setting) if address.method == EVERY_OTHER else address
                for address in term.cells
            )


def _cell(judged: Judged, address: Address, setting: str) -> CellName:
    reading = address.reading or next(iter(judged.part.readings))
    return CellName(judged.part.name, address.setting or setting, address.method, reading)


def _number(judged: Judged, name: CellName, of_paper: bool) -> float:
    where = f"{name.method} | {name.reading}" + (f" | {name.setting}" if name.setting else "")
    if of_paper:
        if name not in judged.theirs:
            raise _Missing(f"the paper has no number for {where}")
        return judged.theirs[name].mean
    if name not in judged.values:
        diverged = (name.setting, name.method) in judged.diverged
        raise _Missing(f"{name.method} diverged" if diverged else f"there is no number for {where}")
    value = judged.values[name].mean
    if math.isnan(value):
        raise _Missing(f"{where} is not a number")
    return value


def _operated(operation: str, numbers: Sequence[float]) -> float:
    if operation == "minus":
        return numbers[0] - numbers[1]
    if operation == "over":
        if numbers[1] == 0:
            raise _Missing("a ratio has a zero below its line")
        return numbers[0] / numbers[1]
    return numbers[0]


def _decide(criterion: Criterion, of: Named, than: Named) -> tuple[float, bool, str]:
    """Give the margin, whether it holds, and the numbers that decide."""
    test = criterion.test
    if not of or (isinstance(test, Above | AtLeast | Near) and not than):
        raise _Missing("its parts have no cells in common")
    low, high = min(of, key=_value_of), max(of, key=_value_of)
    if isinstance(test, Above | AtLeast):
        most = max(than, key=_value_of)
        gap = low[1] - most[1]
        evidence = f"{_said(low)} against {_said(most)}"
        if isinstance(test, Above):
            return gap - test.by, gap > test.by, evidence
        return gap + test.slack, gap >= -test.slack, evidence
    if isinstance(test, Close):
        span = high[1] - low[1]
        return test.within - span, span <= test.within, f"from {_said(low)} to {_said(high)}" if span else _said(low)
    if isinstance(test, Between):
        margins = [(each[1] - test.low, each) for each in of if test.low is not None]
        margins += [(test.high - each[1], each) for each in of if test.high is not None]
        margin, worst = min(margins, key=lambda each: each[0])
        return margin, margin >= 0, _said(worst)
    if isinstance(test, Near):
        theirs = dict(than)
        pairs = [(abs(value - theirs[name]), name, value) for name, value in of if name in theirs]
        if not pairs:
            raise _Missing("the paper has no number for any of its cells")
        away, name, value = max(pairs)
        return test.within - away, away <= test.within, f"{name} {shown(value)}, the paper's {shown(theirs[name])}"
    return _in_order(test, of)


def _in_order(test: Monotone, of: Named) -> tuple[float, bool, str]:
    sign = 1.0 if test.direction == "up" else -1.0
    steps = [sign * (after[1] - before[1]) for before, after in itertools.pairwise(of)]
    whole = sign * (of[-1][1] - of[0][1])
    holds = min(steps) >= -test.slack and whole > 0
    margin = min(min(steps) + test.slack, whole)
    return margin, holds, ", ".join(shown(value) for _, value in of)


def _value_of(each: tuple[str, float]) -> float:
    return each[1]


def _said(each: tuple[str, float]) -> str:
    return f"{each[0]} {shown(each[1])}"


def shown(value: float) -> str:
    """Write a number that may be of any size.

    Parameters
    ----------
    value
        The number.

    Returns
    -------
    str
        Four digits that matter; small ones with a power of ten.
    """
    return f"{value:.4g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"
