"""Running a recipe: its parts one after the other, what is finished not repeated, what cannot be had passed over.

::

    DIR/
      PART/          a comparison's folder for each part
      recipe.json    our numbers beside the paper's, and what became of each criterion
      recipe.md      the same to read
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie import data
from coterie.errors import ConfigError, CoterieError, DataError, Interrupted, UnknownName
from coterie.studies.comparison import ComparisonPlan, compare, load_results
from coterie.studies.progress import PartProgress, study_progress
from coterie.studies.recipes.outcomes import PartOutcome, RecipeOutcome
from coterie.studies.recipes.plans import planned
from coterie.studies.recipes.readings import read_values
from coterie.studies.recipes.run_numbers import numbers_of_runs
from coterie.studies.recipes.schema import Recipe, RecipePart
from coterie.studies.recipes.verdicts import judge

Tell = Callable[[str], None]
"""Told one sentence at a time what is going on."""


def chosen_parts(recipe: Recipe, names: Sequence[str] = (), quick: bool = False) -> list[RecipePart]:
    """Give the parts to run, in the recipe's order: those that are named, or all that the version has."""
    known = {part.name: part for part in recipe.parts}
    for name in names:
        if name not in known:
            raise UnknownName(f"part of {recipe.name} called", name, known)
        if quick and known[name].quick is None:
            there = ", ".join(part.name for part in recipe.parts if part.quick is not None)
            raise ConfigError(f"the part {name!r} has no quick version: those that have one are {there}")
    chosen = [part for part in recipe.parts if not names or part.name in names]
    return [part for part in chosen if part.quick is not None] if quick else chosen


def run_recipe(
    recipe: Recipe,
    runs: str | os.PathLike[str],
    *,
    quick: bool = False,
    parts: Sequence[str] = (),
    over: Mapping[str, Any] | None = None,
    data_dir: str | os.PathLike[str] | None = None,
    jobs: int | None = 1,
    together: bool = True,
    progress: bool = True,
    tell: Tell = lambda sentence: None,
) -> RecipeOutcome:
    """Run what is left of a recipe, read its cells and judge its criteria.

    A stop by the user is an :class:`~coterie.errors.Interrupted`; the same call goes on. A part whose data set is not
    there is passed over. A part that fails does not keep the others from being run; its sentence is in
    :attr:`RecipeOutcome.failures`.

    Parameters
    ----------
    recipe
        The recipe.
    runs
        The folder of the runs: new, or of the same recipe and options.
    quick
        Run the quick version.
    parts
        Names of the parts to run, by default all that the version has.
    over
        Values that stand over the plans' own, for instance seeds or rounds.
    data_dir
        Where data sets lie.
    jobs
        How many processes play at a time; ``None`` for as many as pay for their start.
    together
        Let runs of one shape play together; otherwise each plays by itself.
    progress
        Show progress.
    tell
        Told which part begins, and which is passed over.

    Returns
    -------
    RecipeOutcome
        What was found.

    Raises
    ------
    DataError
        If the data set of no part is there.
    """
    folder, place = Path(runs), None if data_dir is None else Path(data_dir)
    chosen = [(part, planned(part, quick=quick, over=over)) for part in chosen_parts(recipe, parts, quick)]
    absent = {part.name: _absent(plan, place) for part, plan in chosen}
    ended: list[PartOutcome] = []
    with study_progress(recipe.name, progress and not all(absent.values())) as study:
        shown = {part.name: study.part(part.name, plan.runs) for part, plan in chosen if not absent[part.name]}
        for number, (part, plan) in enumerate(chosen, 1):
            if absent[part.name]:
                tell(f"{part.heading} is passed over: {absent[part.name]}")
                ended.append(PartOutcome(part, plan, absent=absent[part.name]))
                continue
            tell(f"{part.heading}, part {number} of {len(chosen)}: {len(plan.runs)} runs")
            ended.append(_play(recipe, part, plan, folder / part.name, place, jobs, together, shown[part.name]))
            if ended[-1].failed:
                shown[part.name].given_up()
                tell(f"{part.heading} failed: {ended[-1].failed}")
    if all(part.absent for part in ended):
        raise DataError(f"nothing of {recipe.name} can be run: {ended[0].absent}")
    return RecipeOutcome(recipe, quick, tuple(ended), tuple(judge(recipe, ended, quick)))


def _absent(plan: ComparisonPlan, data_dir: Path | None) -> str:
    sentences = (data.absent(name, data_dir) for name in dict.fromkeys(run.config.data for run in plan.runs))
    return next(filter(None, sentences), "")


def _play(
    recipe: Recipe,
    part: RecipePart,
    plan: ComparisonPlan,
    folder: Path,
    data_dir: Path | None,
    jobs: int | None,
    together: bool,
    progress: PartProgress,
) -> PartOutcome:
    try:
        compare(plan, folder, data_dir=data_dir, at=part.at, jobs=jobs, together=together, progress=progress)
        results = load_results(plan, folder)
        runs = numbers_of_runs(part, plan, results)
        numbers = read_values(part, plan, runs, recipe.unit)
    except Interrupted:
        raise
    except KeyboardInterrupt:  # while nothing was running; what is to go on with is the recipe all the same
        stop = Interrupted(folder, 0, signal.SIGINT)
        stop.args = (f"interrupted; all that is done is kept in {folder.parent}: go on with the same command",)
        raise stop from None
    except CoterieError as error:
        return PartOutcome(part, plan, failed=str(error))
    seconds = sum(result.summary["seconds"]["total"] for result in results.values() if result is not None)
    return PartOutcome(part, plan, numbers, seconds=float(seconds), runs=runs)
