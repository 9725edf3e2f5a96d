"""Every table and figure of the papers as a recipe: what to run, the paper's numbers, and what must hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coterie import lazy

if TYPE_CHECKING:
    from coterie.studies.recipes.outcomes import Finding, PartOutcome, RecipeOutcome, Verdict
    from coterie.studies.recipes.plans import Work, largest_block, narrowed, planned, work
    from coterie.studies.recipes.registry import RecipeInfo, entries, load, names
    from coterie.studies.recipes.runner import run_recipe
    from coterie.studies.recipes.schema import Criterion, Reading, Recipe, RecipePart
    from coterie.studies.recipes.verdicts import judge
    from coterie.studies.recipes.writers import heading, markdown, plain, terminal
else:
    # The book is listed, and a name that is not in it refused, before anything is imported that can run a recipe.
    __getattr__ = lazy.exports(
        __name__,
        outcomes="Finding PartOutcome RecipeOutcome Verdict",
        plans="Work largest_block narrowed planned work",
        registry="RecipeInfo entries load names",
        runner="run_recipe",
        schema="Criterion Reading Recipe RecipePart",
        verdicts="judge",
        writers="heading markdown plain terminal",
    )

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
    "largest_block",
    "load",
    "markdown",
    "names",
    "narrowed",
    "plain",
    "planned",
    "run_recipe",
    "terminal",
    "work",
]
