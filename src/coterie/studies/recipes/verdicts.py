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
from dataclasses import replace

from coterie.studies.recipes.cells import EVERY_OTHER, Address, CellName, Term
from coterie.studies.recipes.outcomes import Finding, PartOutcome, Status, Verdict
from coterie.studies.recipes.schema import Above, AtLeast, Between, Close, Criterion, Monotone, Near, Recipe


class _Missing(Exception):
    """A number that a criterion needs is not there."""


Named = list[tuple[str, float]]
"""Terms that have been worked out, with what to call them."""


def judge(recipe: Recipe, parts: Sequence[PartOutcome], quick: bool = False) -> list[Verdict]:
    """Judge all criteria of a recipe.

    Parameters
    ----------
    recipe
        The recipe.
    parts
        The parts that were to be run; those that are not among them are not spoken of.
    quick
        Whether this was the quick version: then only criteria that are expected to hold in it are judged.

    Returns
    -------
    list of Verdict
        One for each criterion, in their order.
    """
    by_name = {outcome.part.name: outcome for outcome in parts}
    return [_judge(recipe, criterion, by_name, quick) for criterion in recipe.criteria]


def _judge(recipe: Recipe, criterion: Criterion, parts: Mapping[str, PartOutcome], quick: bool) -> Verdict:
    if quick and not criterion.quick:
        return Verdict(criterion, "left out", ())
    wanted = [parts[name] for name in criterion.parts or [part.name for part in recipe.parts] if name in parts]
    findings = [Finding(each.part.name, "", None, None, each.missing) for each in wanted if each.missing]
    places = [(each, setting) for each in wanted if not each.missing for setting in _settings(criterion, each)]
    if criterion.take == "mean":
        findings.append(_of_means(criterion, places))
    else:
        findings += [_at(criterion, outcome, setting) for outcome, setting in places]
    decided = [finding.holds for finding in findings if finding.holds is not None]
    status: Status = "open" if not decided else "holds" if all(decided) else "fails"
    return Verdict(criterion, status, tuple(findings))


def _settings(criterion: Criterion, outcome: PartOutcome) -> list[str]:
    """Give the settings to judge: none in particular if every cell names its own."""
    if all(address.setting for term in criterion.terms for address in term.cells):
        return [""]
    return [label for label in outcome.settings if not criterion.settings or label in criterion.settings]


def _at(criterion: Criterion, outcome: PartOutcome, setting: str) -> Finding:
    gone: list[str] = []
    try:
        of, than = _sides(criterion, outcome, setting, gone)
        decided = _decide(criterion, of, than)
    except _Missing as missing:
        return Finding(outcome.part.name, setting, None, None, str(missing))
    return Finding(outcome.part.name, setting, *_without(decided, gone))


def _without(decided: tuple[float, bool, str], gone: Sequence[str]) -> tuple[float | None, bool | None, str]:
    """Say what is decided although some methods diverged: more numbers could only make it fail."""
    margin, holds, evidence = decided
    if not gone:
        return decided
    sentence = f"{' and '.join(dict.fromkeys(gone))} diverged"
    if holds:
        return None, None, f"{sentence}; without, it would hold by {shown(margin)} ({evidence})"
    return margin, False, f"{evidence}; {sentence}"


def _of_means(criterion: Criterion, places: Sequence[tuple[PartOutcome, str]]) -> Finding:
    sides = []
    missing = ""
    gone: list[str] = []
    for outcome, setting in places:
        try:
            sides.append(_sides(criterion, outcome, setting, gone))
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
        except _Missing as missing:
            # Of all others, one that has no such model is passed over; one that diverged is missed.
            diverged = [name for name in names if (name.setting, name.method) in outcome.numbers.diverged]
            gone += [outcome.plan.titles[name.method] for name in diverged]
            gaps.append(str(missing))
            continue
        shown_as = tuple(replace(address, method=outcome.plan.titles[address.method]) for address in cells)
        found.append((str(Term(shown_as, term.operation)), _operated(term.operation, numbers)))
    if not found:
        raise _Missing(gaps[0] if gaps else f"no method is left for {term}")
    return found


def _spelt_out(criterion: Criterion, outcome: PartOutcome, term: Term) -> Iterator[tuple[Address, ...]]:
    if all(address.method != EVERY_OTHER for address in term.cells):
        yield term.cells
        return
    named = {address.method for each in criterion.terms for address in each.cells} | {*criterion.leave_out}
    for method in outcome.plan.methods:
        if method not in named:
            yield tuple(
                Address(method, address.reading, address.setting) if address.method == EVERY_OTHER else address
                for address in term.cells
            )


def _cell(outcome: PartOutcome, address: Address, setting: str) -> CellName:
    reading = address.reading or next(iter(outcome.part.readings))
    return CellName(outcome.part.name, address.setting or setting, address.method, reading)


def _number(outcome: PartOutcome, name: CellName, of_paper: bool) -> float:
    method = outcome.plan.titles[name.method]
    where = f"{method} | {name.reading}" + (f" | {name.setting}" if name.setting else "")
    if of_paper:
        if name not in outcome.theirs:
            raise _Missing(f"the paper has no number for {where}")
        return outcome.theirs[name].mean
    if name not in outcome.numbers.values:
        diverged = (name.setting, name.method) in outcome.numbers.diverged
        raise _Missing(f"{method} diverged" if diverged else f"there is no number for {where}")
    value = outcome.numbers.values[name].mean
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
        evidence = f"{_term(low)} against {_term(most)}"
        if isinstance(test, Above):
            return gap - test.by, gap > test.by, evidence
        return gap + test.slack, gap >= -test.slack, evidence
    if isinstance(test, Close):
        span = high[1] - low[1]
        return test.within - span, span <= test.within, f"from {_term(low)} to {_term(high)}" if span else _term(low)
    if isinstance(test, Between):
        margins = [(each[1] - test.low, each) for each in of if test.low is not None]
        margins += [(test.high - each[1], each) for each in of if test.high is not None]
        margin, worst = min(margins, key=lambda each: each[0])
        return margin, margin >= 0, _term(worst)
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


def _term(each: tuple[str, float]) -> str:
    return f"{each[0]} {shown(each[1])}"


def shown(value: float) -> str:
    """Write a number of any size: four significant digits, small ones with a power of ten."""
    return f"{value:.4g}" if value == 0 or abs(value) >= 1e-3 else f"{value:.1e}"
