"""What was measured of the papers' tables and figures, from the stored results."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from coterie.studies import recipes
from coterie.studies.recipes import ledger
from coterie.studies.recipes.ledger.judgement import Judgement, listed
from coterie.studies.recipes.ledger.page import cases, reasons
from coterie.studies.recipes.ledger.records import PartRecord, Records, outcome_of, read_records
from coterie.studies.recipes.tables import part_table
from coterie.tables import escape_markdown

_AT = {"final": "after the last", "best": "best on validation data", "best_oracle": "best on test data"}


def measured(results: Path) -> str:
    """Make a section for each recipe of which there are results."""
    records = {key: record for key, record in read_records(results).items() if record.ran}
    judged = [judgement for _, judgements in ledger.open_ledger(results) for judgement in judgements]
    names = [entry.name for entry in recipes.entries() if any(recipe == entry.name for recipe, _ in records)]
    return "\n\n".join(block for name in names for block in _section(recipes.load(name), records, judged)) + "\n"


def _section(recipe: recipes.Recipe, records: Records, judged: list[Judgement]) -> Iterator[str]:
    yield f"### {recipes.heading(recipe)} {{ #{recipe.name} }}"
    yield f"{escape_markdown(recipe.title)}: `coterie recipe run {recipe.name}`."
    for part in recipe.parts:
        record = records.get((recipe.name, part.name))
        if record is not None:
            outcome = outcome_of(part, record)
            yield f"**{escape_markdown(part.heading)}**, {_how(record, outcome)}."
            yield part_table(outcome, recipe.unit, False).markdown().rstrip("\n")
            yield from _tuned(record)
    lines = [_line(recipe.name, judgement) for judgement in judged]
    if any(lines):
        yield "\n".join(line for line in lines if line)


def _how(record: PartRecord, outcome: recipes.PartOutcome) -> str:
    """Say in one line what was run, and how much of what the recipe asks for."""
    config, values = outcome.plan.runs[0].config, record.values
    rounds = f"{record.rounds:,}" if record.rounds >= config.rounds else f"{record.rounds:,} of {config.rounds:,}"
    seeds, wanted = len(record.seeds), len(outcome.plan.seeds)
    many = f"{seeds} seed{'s' * (seeds > 1)}" if seeds >= wanted else f"{seeds} of {wanted} seeds"
    devices = str(values.get("device", "cpu")).split(", ")  # of runs that were played at different times
    where = "on " + listed(["a GPU" if device.startswith("cuda") else "a CPU" for device in devices])
    exact = values.get("precision", "float32")
    missing = [outcome.plan.titles[name] for name in outcome.plan.methods if name not in record.methods]
    said = f"{rounds} rounds, {_AT[outcome.part.at]}, {many}, {where} in {'TF32' if exact == 'tf32' else exact}"
    return said + (f"; not run: {escape_markdown(listed(missing))}" if missing else "")


def _tuned(record: PartRecord) -> Iterator[str]:
    """Say what tuning chose at the edge of what it tried."""
    edges = [
        f"{each['method']}{', ' + each['setting'] if each['setting'] else ''} ({', '.join(each['edges'])})"
        for each in record.values.get("tuning", ())
        if each["edges"]
    ]
    if edges:
        yield f"Tuned to the edge of what was tried: {escape_markdown('; '.join(edges))}."


def _line(name: str, judgement: Judgement) -> str:
    """Say of a claim how many of its cases in this recipe are decided, and how."""
    places = tuple(place for place in judgement.places if place.recipe == name)
    if not places:
        return ""
    here = Judgement(judgement.claim, places)
    claim = judgement.claim
    why = f" ({escape_markdown('; '.join(reasons(here)))})" if here.answer != "holds" else ""
    return f"- *{escape_markdown(claim.claim)}* {cases(here)}{why}: [verdict](verdicts.md#{claim.id})."
