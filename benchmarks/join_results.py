"""Results of a recipe that was run at different times, as one.

    python benchmarks/join_results.py NEW results/recipes

``NEW`` has ``NAME.json`` and ``NAME.md`` as ``run_recipes.py`` writes them. Their parts are put among those of the same
recipe in the other folder. Of a part that is in both, the runs are put together where both files keep what was read off
each run, and were made alike: so seeds and methods may be run one after another, on different days and machines. Else
the longer run counts, then the one with more methods, then the one with more seeds, and ``NEW``'s where they are alike.
Criteria are judged anew, by all parts together.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError, CoterieError
from coterie.runs.storage.atomic_files import read_json, write_json, write_text
from coterie.studies import recipes
from coterie.studies.recipes.ledger.records import PartRecord, outcome_of
from coterie.studies.recipes.plans import circumstances
from coterie.studies.recipes.readings import read_values
from coterie.studies.recipes.run_numbers import RunNumbers
from coterie.tables import escape_markdown

_ALIKE = ("at", "grid", "rounds", "precision", "tuned_by")


@dataclass(frozen=True)
class FoundPart:
    """A part as two files keep it: its numbers, and its table under a heading."""

    record: PartRecord
    section: str

    @property
    def weight(self) -> tuple[bool, int, int, int]:
        """What counts where a part is there twice."""
        record = self.record
        return record.ran, record.rounds, len(record.methods), len(record.seeds)

    @property
    def runs(self) -> dict[str, Any]:
        """What was read off each run, by name; older files do not keep it."""
        return dict(self.record.values.get("runs", {}))


def read(path: Path) -> dict[str, FoundPart]:
    """Read the parts of one result, by name."""
    whole = read_json(path)
    if whole["quick"]:
        raise ConfigError(f"{path} is of a quick version, which decides nothing")
    blocks = _sections(path.with_suffix(".md").read_text(encoding="utf-8"))
    sections = {block.split("\n", 1)[0]: block for block in blocks}
    return {
        part["name"]: FoundPart(PartRecord(path.name, part), sections[f"## {escape_markdown(part['title'])}"])
        for part in whole["parts"]
    }


def _sections(text: str) -> list[str]:
    return re.split(r"^(?=## )", text, flags=re.MULTILINE)


def joined(recipe: recipes.Recipe, *found: dict[str, FoundPart]) -> tuple[dict[str, Any], str]:
    """Give the JSON and the Markdown of all parts together."""
    best: dict[str, FoundPart] = {}
    for parts in found:
        for name, part in parts.items():
            if name in best and _made_alike(recipe, best[name], part):
                best[name] = _together(recipe, best[name], part)
            elif name not in best or part.weight >= best[name].weight:
                best[name] = part
    chosen = [best[part.name] for part in recipe.parts if part.name in best]
    ended = [_outcome(recipe.part(part.record.values["name"]), part.record) for part in chosen]
    outcome = recipes.RecipeOutcome(recipe, False, tuple(ended), tuple(recipes.judge(recipe, ended)))
    first, *_, last = _sections(recipes.markdown(outcome))
    values = {**recipes.plain(outcome), "parts": [part.record.values for part in chosen]}
    return values, "".join([first, *(part.section for part in chosen), *([last] if outcome.verdicts else [])])


def _made_alike(recipe: recipes.Recipe, one: FoundPart, other: FoundPart) -> bool:
    """Say whether the runs of two records can stand in one table, with those of one they share taken from either."""
    mine, theirs = one.record.values, other.record.values
    if not (one.runs and other.runs) or any(mine.get(name) != theirs.get(name) for name in _ALIKE):
        return False
    part = recipe.part(mine["name"])
    plan = recipes.planned(part)
    if circumstances(part, plan, mine) != circumstances(part, plan, theirs):
        return False
    methods = mine["methods"].keys() & theirs["methods"].keys()
    return all(mine["methods"][name] == theirs["methods"][name] for name in methods)


def _together(recipe: recipes.Recipe, one: FoundPart, other: FoundPart) -> FoundPart:
    """Put the runs of two records of a part together, and read what is complete then."""
    records = (one.record.values, other.record.values)
    part, name = recipe.part(records[0]["name"]), one.record.file
    runs = {**one.runs, **other.runs}
    numbers = {run: None if values is None else RunNumbers.parse(values) for run, values in runs.items()}
    over = {name: records[0][name] for name in ("rounds", "precision") if name in records[0]}
    methods, seeds = recipes.largest_block(recipes.planned(part, over=over), runs)
    if not methods:
        raise ConfigError(f"of {recipe.name}, {part.name}, no run has a name that the recipe's runs have now")
    plan = recipes.planned(part, over=recipes.narrowed(part, methods, seeds, over=over))
    again = sum(len(found["runs"]) for found in records) - len(runs)  # runs that are in both took their time once
    seconds = sum(found["seconds"] for found in records) * (1 - again / (len(runs) + again))
    outcome = recipes.PartOutcome(
        part, plan, read_values(part, plan, numbers, recipe.unit), seconds=seconds, runs=numbers
    )
    whole = recipes.RecipeOutcome(recipe, False, (outcome,), ())
    (values,) = recipes.plain(whole)["parts"]
    devices = {place for found in records for place in str(found.get("device", "cpu")).split(", ")}
    values["device"] = ", ".join(sorted(devices))
    return FoundPart(PartRecord(name, values), _sections(recipes.markdown(whole))[1] + "\n")


def _outcome(part: recipes.RecipePart, record: PartRecord) -> recipes.PartOutcome:
    """Give a part as it was run, by the recipe as it stands now."""
    values, every = record.values, recipes.planned(part).methods
    if gone := sorted(record.methods - set(every)):
        raise ConfigError(f"{part.name} was run with {', '.join(gone)}, which the recipe no longer has")
    over = {name: values[name] for name in ("rounds", "precision") if name in values}
    plan = recipes.planned(part, over=recipes.narrowed(part, record.methods or every, record.seeds, over=over))
    return replace(outcome_of(part, record), plan=plan, absent=values["absent"], failed=values["failed"])


def main(given: Sequence[str] | None = None) -> int:
    """Join all results of one folder to those of another."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("new", type=Path, help="folder with new results")
    parser.add_argument("results", type=Path, help="folder with those that they join")
    words = parser.parse_args(given)
    fresh = sorted(words.new.glob("*.json"))
    if not fresh:
        parser.error(f"there are no results in {words.new}")
    try:
        for path in fresh:
            print(_join(path, words.results / path.name))
    except CoterieError as error:
        parser.error(str(error))
    return 0


def _join(path: Path, place: Path) -> str:
    """Join one result to what is there; say of which parts it is then, and how many seeds each has."""
    values, text = joined(recipes.load(path.stem), *(read(each) for each in (place, path) if each.exists()))
    write_json(place, values)
    write_text(place.with_suffix(".md"), text)
    parts = [f"{part['name']} {len(part['seeds'])} seeds" for part in values["parts"]]
    return f"{path.stem}: {', '.join(parts)}"


if __name__ == "__main__":
    sys.exit(main())
