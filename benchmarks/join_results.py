"""Results of a recipe whose parts were run at different times, as one.

    python benchmarks/join_results.py NEW results/recipes

``NEW`` has ``NAME.json`` and ``NAME.md`` as ``run_recipes.py`` writes them. Their parts are put among those of the same
recipe in the other folder; of a part that is in both, the longer run counts, then the one with more methods, then the
one with more seeds, and ``NEW``'s where they are alike. Criteria are judged anew, by all parts together.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from run_recipes import of_those_run

from coterie.errors import ConfigError, CoterieError
from coterie.runs.storage.atomic_files import read_json, write_json, write_text
from coterie.studies import recipes
from coterie.studies.recipes.ledger.records import PartRecord, outcome_of
from coterie.tables import escape_markdown


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


def read(path: Path) -> dict[str, FoundPart]:
    """Read the parts of one result, by name."""
    whole = read_json(path)
    if whole["quick"]:
        raise ConfigError(f"{path} is of a quick version, which decides nothing")
    blocks = re.split(r"^(?=## )", path.with_suffix(".md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    sections = {block.split("\n", 1)[0]: block for block in blocks}
    return {
        part["name"]: FoundPart(PartRecord(path.name, part), sections[f"## {escape_markdown(part['title'])}"])
        for part in whole["parts"]
    }


def joined(recipe: recipes.Recipe, *found: dict[str, FoundPart]) -> tuple[dict[str, Any], str]:
    """Give the JSON and the Markdown of all parts together."""
    best: dict[str, FoundPart] = {}
    for parts in found:
        for name, part in parts.items():
            if name not in best or part.weight >= best[name].weight:
                best[name] = part
    chosen = [best[part.name] for part in recipe.parts if part.name in best]
    ended = [_outcome(recipe.part(part.record.values["name"]), part.record) for part in chosen]
    verdicts = [of_those_run(each, ended, quick=False, over={}) for each in recipes.judge(recipe, ended)]
    outcome = recipes.RecipeOutcome(recipe, False, tuple(ended), tuple(verdicts))
    first, *_, last = re.split(r"^(?=## )", recipes.markdown(outcome), flags=re.MULTILINE)
    values = {**recipes.plain(outcome), "parts": [part.record.values for part in chosen]}
    return values, "".join([first, *(part.section for part in chosen), *([last] if outcome.verdicts else [])])


def _outcome(part: recipes.RecipePart, record: PartRecord) -> recipes.PartOutcome:
    """Give a part as it was run, by the recipe as it stands now."""
    values, every = record.values, recipes.planned(part).methods
    if gone := sorted(record.methods - set(every)):
        raise ConfigError(f"{part.name} was run with {', '.join(gone)}, which the recipe no longer has")
    methods = [each for each, name in zip(part.plan["methods"], every, strict=True) if name in record.methods]
    over = {name: values[name] for name in ("seeds", "rounds", "device", "precision") if name in values}
    plan = recipes.planned(part, over={**over, "methods": methods or part.plan["methods"]})
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
