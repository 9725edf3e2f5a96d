"""Every table and figure of the papers as a recipe: what to run, the paper's numbers, and what must hold."""

from __future__ import annotations

from coterie.recipes.catalogue import Entry, entries, load, names
from coterie.recipes.judging import Finding, Verdict, judge
from coterie.recipes.plans import Work, planned, work
from coterie.recipes.rendering import heading, markdown, plain, terminal
from coterie.recipes.running import Outcome, Played, run_recipe
from coterie.recipes.schema import Criterion, Part, Reading, Recipe

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
