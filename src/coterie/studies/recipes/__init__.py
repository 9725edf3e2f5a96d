"""Every table and figure of the papers as a recipe: what to run, the paper's numbers, and what must hold."""

from __future__ import annotations

from coterie.studies.recipes.outcomes import Finding, PartOutcome, RecipeOutcome, Verdict
from coterie.studies.recipes.plans import Work, planned, work
from coterie.studies.recipes.registry import RecipeInfo, entries, load, names
from coterie.studies.recipes.runner import run_recipe
from coterie.studies.recipes.schema import Criterion, Reading, Recipe, RecipePart
from coterie.studies.recipes.verdicts import judge
from coterie.studies.recipes.writers import heading, markdown, plain, terminal

__all__ = [
    "Criterion",
    "Finding",
    "PartOutcome",
    "Reading",
    "Recipe",
    "RecipeInfo",
    "RecipeOutcome",
    "RecipePart",
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
