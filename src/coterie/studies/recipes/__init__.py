"""Every table and figure of the papers as a recipe: what to run, the paper's numbers, and what must hold."""

from __future__ import annotations

from coterie.studies.recipes.plans import Work, planned, work
from coterie.studies.recipes.registry import Entry, entries, load, names
from coterie.studies.recipes.runner import Outcome, Played, run_recipe
from coterie.studies.recipes.schema import Criterion, Part, Reading, Recipe
from coterie.studies.recipes.verdicts import Finding, Verdict, judge
from coterie.studies.recipes.writers import heading, markdown, plain, terminal

__all__ = [
    "Criterion",
    "Entry",
    "Finding",
    "Outcome",
    "Part",
    "Played",
    "Reading",
    "Recipe",
    "Verdict",
    "Work",
    "entries",
    "heading",
    "judge",
    "load",
    "markdown",
    "names",
    "plain",
    "planned",
    "run_recipe",
    "terminal",
    "work",
]
