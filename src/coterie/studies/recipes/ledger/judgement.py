"""Which claims hold, decided by what was run and by nothing else.

A claim rests on criteria of recipes, each judged for every part and setting that it speaks of: the *places*. A place is

- *undecided* where it was not run as the paper says: with fewer rounds or seeds, without its data, with a rival that
  was not tuned, or otherwise than the recipe stands now; where a method diverged; and where the interval over seeds
  includes the threshold. A part that was not run has as many places as its recipe gives it;
- else it *holds* where the interval lies beyond the threshold, and *does not hold* where it lies short of it.

A claim holds where it holds in all places, and does not hold where it fails in one by more than chance makes one of so
many places fail (Bonferroni's bound); otherwise it is undecided. Nor does a place of several demands fail by chance
alone in one of them. A claim of most cases holds where it holds in more than half of its places, and does not hold
where it fails in half of them. What can be said of a claim on one data set alone is judged likewise by its places
there: much can be known of one whose other data sets were not run, or cannot be had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from coterie.studies.recipes.cells import EVERY_OTHER, CellName
from coterie.studies.recipes.demands import Demand, Missing, demands_at, demands_of_means, every_other, shown, worst
from coterie.studies.recipes.ledger.claims import FEWEST_SEEDS, Basis, Claim, PaperClaims, Protocol, criterion_of
from coterie.studies.recipes.ledger.intervals import LEVEL, Interval, interval
from coterie.studies.recipes.ledger.records import PartRecord, Records, changes, outcome_of, plan_of
from coterie.studies.recipes.outcomes import PartOutcome
from coterie.studies.recipes.readings import Value
from coterie.studies.recipes.schema import Criterion, Reading, Recipe
from coterie.studies.recipes.verdicts import places_of

Answer = Literal["holds", "does not hold", "undecided"]
"""What can be said of a claim."""

NOT_RUN = "not run"
"""Why nothing is known of data that were not there."""

_CHANCE = (1 - LEVEL) / 2
_COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


@dataclass(frozen=True)
class PlaceJudgement:
    """What was found for one part and setting.

    Parameters
    ----------
    recipe
        The recipe's name.
    part
        The part's heading; empty for a mean over parts.
    setting
        The setting's label; empty if there is none.
    answer
        What can be said.
    reasons
        Why nothing is decided, if so.
    evidence
        The numbers that count most, empty if there are none.
    margin
        By how much they meet the criterion or, negative, miss it; ``None`` if there are none.
    over_seeds
        The margin's interval over seeds, ``None`` if there is none.
    met
        Whether the means alone meet the criterion.
    chance
        How likely it would miss the criterion by as much, if the true numbers just met it.
    notes
        What else to know: values that were tuned to the edge of their grid.
    data
        The data set; empty for a mean over several.
    """

    recipe: str
    part: str
    setting: str
    answer: Answer
    reasons: tuple[str, ...] = ()
    evidence: str = ""
    margin: float | None = None
    over_seeds: Interval | None = None
    met: bool = False
    chance: float = 0.0
    notes: tuple[str, ...] = ()
    data: str = ""


@dataclass(frozen=True)
class Judgement:
    """What was found of a claim."""

    claim: Claim
    places: tuple[PlaceJudgement, ...]

    @property
    def answer(self) -> Answer:
        """What can be said of the whole claim."""
        answers = [place.answer for place in self.places]
        held, failed, total = answers.count("holds"), answers.count("does not hold"), len(answers)
        if total and (2 * failed >= total if self.claim.most else self.refutations):
            return "does not hold"
        return "holds" if total and (2 * held > total if self.claim.most else held == total) else "undecided"

    @property
    def by_data(self) -> dict[str, Answer]:
        """What can be said of it on each data set alone."""
        names = dict.fromkeys(place.data for place in self.places if place.data)
        return {name: Judgement(self.claim, self._on(name)).answer for name in names}

    def _on(self, data: str) -> tuple[PlaceJudgement, ...]:
        return tuple(place for place in self.places if place.data == data)

    @property
    def refutations(self) -> list[PlaceJudgement]:
        """Places in which the claim fails by more than chance makes one of so many fail."""
        failed = [place for place in self.places if place.answer == "does not hold"]
        return [place for place in failed if place.chance * len(self.places) <= _CHANCE]


def judge_paper(paper: PaperClaims, records: Records) -> list[Judgement]:
    """Judge all claims of a paper."""
    return [judge_claim(claim, paper.protocol.but(claim.protocol), records) for claim in paper.claims]


def judge_claim(claim: Claim, protocol: Protocol, records: Records) -> Judgement:
    """Judge one claim by its criteria."""
    places = [place for basis in claim.rests_on for place in _of_basis(basis, protocol, records)]
    return Judgement(claim, tuple(places))


def _of_basis(basis: Basis, protocol: Protocol, records: Records) -> list[PlaceJudgement]:
    recipe, criterion = criterion_of(basis)
    names = basis.parts or criterion.parts or tuple(part.name for part in recipe.parts)
    if criterion.take == "mean":
        return [_of_mean(recipe, criterion, names, protocol, records)]
    found: list[PlaceJudgement] = []
    for name in names:
        part, record = recipe.part(name), records.get((recipe.name, name))
        why = _not_run(record)
        if record is None or why:
            there = places_of(criterion, PartOutcome(part, plan_of(part)))
            found += [
                PlaceJudgement(recipe.name, part.heading, at, "undecided", (why,), data=part.data_set) for at in there
            ]
            continue
        outcome = outcome_of(part, record)
        for setting in places_of(criterion, outcome):
            found.append(_at_place(recipe, criterion, outcome, record, setting, protocol))
    return found


def _not_run(record: PartRecord | None) -> str:
    if record is None or record.values.get("absent"):
        return NOT_RUN
    return f"it failed: {record.values['failed']}" if record.values.get("failed") else ""


def _at_place(
    recipe: Recipe, criterion: Criterion, outcome: PartOutcome, record: PartRecord, setting: str, protocol: Protocol
) -> PlaceJudgement:
    gone: list[str] = []
    demands: list[Demand] = []
    missing = ""
    try:
        demands = demands_at(criterion, outcome, setting, gone)
    except Missing as found:
        missing = str(found)
    methods = _compared(criterion, outcome)
    reasons = [*_lacks(outcome, record, setting, methods, protocol), *_gone(gone), *([missing] if missing else [])]
    place = _decided(criterion, demands, list(dict.fromkeys(reasons)), *_cells([outcome]))
    notes = tuple(edge for method in methods for edge in record.edges(setting, method))
    return PlaceJudgement(recipe.name, outcome.part.heading, setting, *place, notes, outcome.part.data_set)


def _of_mean(
    recipe: Recipe, criterion: Criterion, names: Sequence[str], protocol: Protocol, records: Records
) -> PlaceJudgement:
    gone: list[str] = []
    reasons: list[str] = []
    notes: list[str] = []
    outcomes: list[PartOutcome] = []
    for name in names:
        part, record = recipe.part(name), records.get((recipe.name, name))
        why = _not_run(record)
        if record is None or why:
            reasons.append(f"{part.heading}: {why}")
            continue
        outcomes.append(outcome_of(part, record))
        methods = _compared(criterion, outcomes[-1])
        lacks = _lacks(outcomes[-1], record, "", methods, protocol)
        reasons += [f"{part.heading}: {lack}" for lack in lacks]
        notes += [edge for method in methods for edge in record.edges("", method)]
    places = [(outcome, setting) for outcome in outcomes for setting in places_of(criterion, outcome)]
    demands: list[Demand] = []
    try:
        demands, count = demands_of_means(criterion, places, gone)
        reasons += [] if count == len(places) else [f"{len(places) - count} of {len(places)} settings lack a number"]
    except Missing as missing:
        reasons += [] if reasons else [str(missing)]
    place = _decided(criterion, demands, [*reasons, *_gone(gone)], *_cells(outcomes))
    data = {recipe.part(name).data_set for name in names}
    return PlaceJudgement(recipe.name, "", "", *place, tuple(notes), data.pop() if len(data) == 1 else "")


def _gone(methods: Sequence[str]) -> list[str]:
    return [f"{method} diverged" for method in dict.fromkeys(methods)]


def _compared(criterion: Criterion, outcome: PartOutcome) -> tuple[str, ...]:
    """Name the methods that a criterion compares."""
    addresses = [address for term in criterion.terms for address in term.cells]
    named = [address.method for address in addresses]
    readings = [outcome.part.readings.get(address.reading or "") for address in addresses]
    named += [reading.against for reading in readings if reading is not None and reading.against is not None]
    others = every_other(criterion, outcome) if EVERY_OTHER in named else []
    return tuple(dict.fromkeys([*(name for name in named if name != EVERY_OTHER), *others]))


def _lacks(
    outcome: PartOutcome, record: PartRecord, setting: str, methods: Sequence[str], protocol: Protocol
) -> list[str]:
    """Say in what a run falls short of what the paper did."""
    found: list[str] = []
    rounds = protocol.rounds or outcome.plan.runs[0].config.rounds
    if record.rounds < rounds:
        found.append(f"{record.rounds:,} of {rounds:,} rounds")
    seeds = protocol.seeds or FEWEST_SEEDS
    if len(record.seeds) < seeds:
        found.append(f"{_count(len(record.seeds))} seed{'s' * (len(record.seeds) > 1)} of {_count(seeds)}")
    titles = outcome.plan.titles
    absent = [method for method in methods if method not in record.methods]
    if absent:
        found.append(f"{listed([titles[each] for each in absent])} {_were(absent)} not run")
    untuned: list[str] = []
    if protocol.tuned is not None:
        wanted = methods if EVERY_OTHER in protocol.tuned.methods else protocol.tuned.methods
        ran = [method for method in methods if method in wanted and method not in absent]
        tried = {method: record.tried(setting, method) for method in ran}
        untuned = [method for method, count in tried.items() if count == 1]
        if untuned:
            found.append(f"{listed([titles[each] for each in untuned])} {_were(untuned)} not tuned")
        for method, count in tried.items():
            if 1 < count < protocol.tuned.values:
                needed = protocol.tuned.values
                found.append(f"{titles[method]} was tuned over {_count(count)} values of {_count(needed)}")
    return found + changes(outcome, record, frozenset(methods), untuned)


def _cells(outcomes: Sequence[PartOutcome]) -> tuple[dict[CellName, Value], dict[CellName, Reading]]:
    values = {name: value for outcome in outcomes for name, value in outcome.numbers.values.items()}
    readings = {outcome.part.name: outcome.part.readings for outcome in outcomes}
    return values, {name: readings[name.part][name.reading] for name in values}


def _decided(
    criterion: Criterion,
    demands: Sequence[Demand],
    reasons: Sequence[str],
    cells: Mapping[CellName, Value],
    readings: Mapping[CellName, Reading],
) -> tuple[Answer, tuple[str, ...], str, float | None, Interval | None, bool, float]:
    if not demands:
        return "undecided", tuple(reasons), "", None, None, False, 1.0
    spans = [(each, _exact(each) if criterion.always else interval(each.margin, cells, readings)) for each in demands]
    known = [(demand, span) for demand, span in spans if span is not None]
    if len(known) < len(spans):
        decisive = worst(demands)
        why = () if reasons else ("no interval over seeds can be taken from what was kept",)
        return (
            "undecided",
            (*reasons, *why),
            decisive.evidence,
            decisive.margin.value,
            None,
            all(each.met for each in demands),
            1.0,
        )
    missed = [(demand, span) for demand, span in known if _misses(demand, span, len(known))]
    demand, span = min(missed or known, key=lambda each: each[1].chance if missed else each[1].low)
    certain = span.low == span.high
    chance = (0.0 if certain else min(1.0, span.chance * len(known))) if missed else 1.0
    shown_as = (demand.evidence, demand.margin.value, span, all(each.met for each in demands), chance)
    if reasons:
        return "undecided", tuple(reasons), *shown_as
    if missed and span.low == span.high == 0:
        return "undecided", ("what is compared are the same runs",), *shown_as
    if missed:
        return "does not hold", (), *shown_as
    if all(its.low > 0 or (not each.strict and its.low == 0) for each, its in known):
        return "holds", (), *shown_as
    return "undecided", ("the interval over seeds includes the threshold",), *shown_as


def _exact(demand: Demand) -> Interval:
    """Give the interval of what does not depend on seeds."""
    return Interval(demand.margin.value, demand.margin.value, 0.0 if demand.margin.value < 0 else 1.0)


def _misses(demand: Demand, span: Interval, demands: int) -> bool:
    """Say whether one of some demands is missed by more than chance makes one of them be."""
    if span.low == span.high:
        return span.high < 0 or (demand.strict and span.high == 0)
    return span.chance * demands <= _CHANCE


def between(span: Interval) -> str:
    """Write an interval."""
    return f"{shown(span.low)} to {shown(span.high)}"


def _count(number: int) -> str:
    return _COUNTS[number] if number < len(_COUNTS) else f"{number:,}"


def _were(names: Sequence[str]) -> str:
    return "was" if len(names) == 1 else "were"


def listed(names: Sequence[str]) -> str:
    """Write names one after the other."""
    return "".join(names) if len(names) < 2 else f"{', '.join(names[:-1])} and {names[-1]}"
