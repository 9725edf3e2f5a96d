"""The ledger for the terminal, as JSON and as a page of the documentation, sentences of judgement included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from coterie.studies.recipes.demands import shown
from coterie.studies.recipes.ledger.claims import PaperClaims
from coterie.studies.recipes.ledger.judgement import NOT_RUN, Answer, Judgement, PlaceJudgement, between, listed
from coterie.tables import Row, Table, escape_markdown, numbers, words

ANSWERS: tuple[Answer, ...] = ("holds", "does not hold", "undecided")

Ledger = list[tuple[PaperClaims, list[Judgement]]]
"""All papers' claims with what was found."""


def in_short(judgement: Judgement) -> str:
    """Write the verdict, and on which data sets alone there is another."""
    return "; ".join([judgement.answer, *_on_single(judgement)])


def _on_single(judgement: Judgement) -> list[str]:
    found = judgement.by_data
    alone = {answer: [data for data, its in found.items() if its == answer] for answer in ANSWERS[:2]}
    return [f"{each} on {listed(data)}" for each, data in alone.items() if data and each != judgement.answer]


def cases(judgement: Judgement) -> str:
    """Count the data sets and settings in which a claim is decided."""
    answers = [place.answer for place in judgement.places]
    decided = [f"{answers.count(answer)} {_verb(answer, answers.count(answer))}" for answer in ANSWERS[:2]]
    found = [each for each in decided if not each.startswith("0 ")]
    return f"{', '.join(found) or 'none decided'} of {len(answers)}" if answers else "none"


def counted(judgements: Sequence[Judgement]) -> str:
    """Count the verdicts in one sentence."""
    answers = [judgement.answer for judgement in judgements]
    single = [answer for judgement in judgements for answer in judgement.by_data.values()]
    alone = f"on one data set alone, of {len(single)}, {_counts(single)}"
    return f"Of {len(answers)} claims {_counts(answers)}; {alone}"


def _counts(answers: Sequence[Answer]) -> str:
    return ", ".join(f"{answers.count(answer)} {_verb(answer, answers.count(answer))}" for answer in ANSWERS)


def _verb(answer: Answer, count: int) -> str:
    plural = {"holds": "hold", "does not hold": "do not hold", "undecided": "are undecided"}
    return plural[answer] if count != 1 else answer if answer != "undecided" else "is undecided"


def reasons(judgement: Judgement) -> list[str]:
    """Say why a claim is judged as it is, a piece for each group of places with the same reasons."""
    if judgement.claim.nothing:
        return [judgement.claim.nothing]
    if judgement.answer == "holds":
        return [_tightest([place for place in judgement.places if place.answer == "holds"])]
    if judgement.answer == "does not hold":
        failed = [place for place in judgement.places if place.answer == "does not hold"]
        told = failed if judgement.claim.most else judgement.refutations
        return [_tightest(told), *([judgement.claim.differs] if judgement.claim.differs else [])]
    # A claim of all cases that is undecided though one fails: chance makes one of so many fail by as much.
    unsure = f"it fails, as one of {len(judgement.places)} cases may by chance"
    groups: dict[tuple[str, ...], list[PlaceJudgement]] = {}
    for place in judgement.places:
        if place.answer == "undecided":
            groups.setdefault(place.reasons, []).append(place)
        elif place.answer == "does not hold" and not judgement.claim.most:
            groups.setdefault((unsure,), []).append(place)
    several = len({place.recipe for place in judgement.places}) > 1
    found = []
    for why, places in groups.items():
        names = _parts_of(places, several or why == (NOT_RUN,))
        if why == (NOT_RUN,):
            found.append(f"not run: {names}")
        else:
            found.append(f"{names}: {', '.join(why)}" if names else ", ".join(why))
    return found


def _parts_of(places: Sequence[PlaceJudgement], with_recipes: bool) -> str:
    """Name the parts of places, with the recipe to which they belong."""
    by_recipe: dict[str, list[str]] = {}
    for place in places:
        if place.part:
            by_recipe.setdefault(place.recipe, []).append(place.part)
    # Recipes with the same parts are named together.
    alike: dict[tuple[str, ...], list[str]] = {}
    for recipe, parts in by_recipe.items():
        alike.setdefault(tuple(dict.fromkeys(parts)), []).append(recipe)
    return "; ".join(
        listed(parts) + (f" ({listed(recipes)})" if with_recipes else "") for parts, recipes in alike.items()
    )


def _tightest(places: Sequence[PlaceJudgement]) -> str:
    measured = [place for place in places if place.margin is not None]
    place = min(measured, key=lambda each: each.margin if each.margin is not None else 0.0)
    return f"{_where(place)}: {finding(place)}" if _where(place) else finding(place)


def _where(place: PlaceJudgement) -> str:
    return ", ".join(piece for piece in (place.part, place.setting) if piece)


def finding(place: PlaceJudgement) -> str:
    """Write the numbers of a place: what is compared, by how much it is met or missed, and the interval."""
    if place.margin is None:
        return "no numbers"
    how = "met" if place.margin > 0 or (place.met and place.margin == 0) else "missed"
    by = f" by {shown(abs(place.margin))}" if place.margin else ""
    span = "" if place.over_seeds is None else f" (margin {between(place.over_seeds)} over seeds)"
    return f"{place.evidence}, {how}{by}{span}"


def sentence(judgement: Judgement) -> str:
    """Say in words what is to be thought of a claim."""
    why = "; ".join(reasons(judgement))
    most = f", {cases(judgement)} cases" if judgement.claim.most else ""
    if judgement.answer == "holds":
        where = f"in most cases{most}" if most else "wherever it was claimed and tested"
        return f"It holds {where}. Closest: {why}."
    if judgement.answer == "does not hold":
        return f"It does not hold{most}. {why.rstrip('.')}."
    text = f"It is undecided: {why.rstrip('.')}."
    alone = _on_single(judgement)
    text += f" As far as single data sets go, it {' and '.join(alone)}." if alone else ""
    measured = [place for place in judgement.places if place.margin is not None]
    if measured:
        met = sum(place.met for place in measured)
        many = f"{met} of {len(measured)} cases"
        said = many if len(measured) > 1 else f"the one case{'' if met else ' not'}"
        text += f" As far as it was run, the numbers are on its side in {said}."
    against = any(not place.met for place in measured)
    return f"{text} {judgement.claim.differs}" if against and judgement.claim.differs else text


def plain(ledger: Ledger) -> list[dict[str, Any]]:
    """Give the ledger as plain JSON types."""
    return [
        {
            "id": judgement.claim.id,
            "paper": paper.paper,
            "where": judgement.claim.where,
            "claim": judgement.claim.claim,
            "setting": judgement.claim.setting or paper.setting,
            "rests_on": [basis.model_dump(mode="json") for basis in judgement.claim.rests_on],
            "verdict": judgement.answer,
            "on_one_data_set": judgement.by_data,
            "why": reasons(judgement),
            "places": [
                {
                    "recipe": place.recipe,
                    "part": place.part,
                    "setting": place.setting,
                    "verdict": place.answer,
                    "reasons": list(place.reasons),
                    "evidence": place.evidence,
                    "margin": place.margin,
                    "interval": None if place.over_seeds is None else [place.over_seeds.low, place.over_seeds.high],
                    "notes": list(place.notes),
                }
                for place in judgement.places
            ],
        }
        for paper, judgements in ledger
        for judgement in judgements
    ]


def markdown(ledger: Ledger) -> str:
    """Write the page: how many hold, by paper, and each claim with its judgement and its numbers."""
    rows = [
        Row((paper.title, *(str(sum(each.answer == answer for each in found)) for answer in ANSWERS)))
        for paper, found in ledger
    ]
    every = [judgement for _, found in ledger for judgement in found]
    blocks = [f"{counted(every)}.", Table((*words("paper"), *numbers(*ANSWERS)), tuple(rows)).markdown().rstrip("\n")]
    for paper, judgements in ledger:
        blocks += [f"## {escape_markdown(paper.title)}", escape_markdown(paper.setting)]
        for judgement in judgements:
            blocks += _section(judgement)
    return "\n\n".join(blocks) + "\n"


def _section(judgement: Judgement) -> list[str]:
    claim = judgement.claim
    blocks = [
        f"### {claim.id}",
        f"**{in_short(judgement)}** · {escape_markdown(claim.where)}",
        f"*{escape_markdown(claim.claim)}*{' ' + escape_markdown(claim.setting) if claim.setting else ''}",
        escape_markdown(sentence(judgement)),
    ]
    table = cases_table(judgement)
    return blocks if table is None else [*blocks, table.markdown().rstrip("\n")]


def cases_table(judgement: Judgement) -> Table | None:
    """Make the table of a claim's cases with their numbers; ``None`` if none was measured."""
    measured = [place for place in judgement.places if place.margin is not None]
    if not measured:
        return None
    rows = [
        (place.recipe, _where(place) or "mean", place.answer, finding(place), "; ".join(place.notes))
        for place in measured
    ]
    noted = any(place.notes for place in measured)
    heads = ("recipe", "case", "verdict", "numbers", *(["tuned to the edge"] if noted else []))
    # All columns are labels: sentences are to be folded, not to be kept in one line at the cost of several tables.
    return Table(words(*heads), tuple(Row(cells[: len(heads)]) for cells in rows), labels=len(heads))
