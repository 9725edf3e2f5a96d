"""Which criteria hold, and by how much.

Every criterion is judged for each part and setting it speaks of (or once, for their means). The *margin* is by how much
more it could have been missed: positive where it holds, negative where it fails. Without a number that it needs, it is
left open and says what is missing. Where it speaks of all other methods and one of them was not run, it is left open;
where one of them diverged, it fails if it fails for the rest, and is left open otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coterie.studies.recipes.cells import EVERY_OTHER
from coterie.studies.recipes.demands import Demand, Missing, demands_at, demands_of_means, shown, worst
from coterie.studies.recipes.outcomes import Finding, PartOutcome, Status, Verdict
from coterie.studies.recipes.plans import planned
from coterie.studies.recipes.schema import Criterion, Recipe


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
    why = {each.part.name: each.missing or _not_all(criterion, each, quick) for each in wanted}
    findings = [Finding(name, "", None, None, said) for name, said in why.items() if said]
    places = [(each, setting) for each in wanted if not why[each.part.name] for setting in places_of(criterion, each)]
    if criterion.take == "mean":
        findings.append(_of_means(criterion, places))
    else:
        findings += [_at(criterion, outcome, setting) for outcome, setting in places]
    decided = [finding.holds for finding in findings if finding.holds is not None]
    status: Status = "open" if not decided else "holds" if all(decided) else "fails"
    return Verdict(criterion, status, tuple(findings))


def _not_all(criterion: Criterion, outcome: PartOutcome, quick: bool) -> str:
    """Say that a criterion which speaks of all methods cannot be judged where not all of them were run."""
    if not any(address.method == EVERY_OTHER for term in criterion.terms for address in term.cells):
        return ""
    lacking = {*planned(outcome.part, quick=quick).methods} - {*outcome.plan.methods, *criterion.leave_out}
    return "not all methods were run" if lacking else ""


def places_of(criterion: Criterion, outcome: PartOutcome) -> list[str]:
    """Give the settings to judge: none in particular if every cell names its own."""
    if all(address.setting for term in criterion.terms for address in term.cells):
        return [""]
    return [label for label in outcome.settings if not criterion.settings or label in criterion.settings]


def _at(criterion: Criterion, outcome: PartOutcome, setting: str) -> Finding:
    gone: list[str] = []
    try:
        decided = _decided(demands_at(criterion, outcome, setting, gone))
    except Missing as missing:
        return Finding(outcome.part.name, setting, None, None, str(missing))
    return Finding(outcome.part.name, setting, *_without(decided, gone))


def _decided(demands: Sequence[Demand]) -> tuple[float, bool, str]:
    """Give the margin, whether it holds, and the numbers that decide."""
    decisive = worst(demands)
    return decisive.margin.value, all(demand.met for demand in demands), decisive.evidence


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
    gone: list[str] = []
    try:
        demands, count = demands_of_means(criterion, places, gone)
    except Missing as missing:
        return Finding("", "", None, None, str(missing))
    margin, holds, evidence = _decided(demands)
    evidence = f"{evidence}, means over {count} of {len(places)}"
    return Finding("", "", *_without((margin, holds, evidence), gone))
