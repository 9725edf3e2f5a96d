"""From a recipe's part to the plan of a comparison, and how much work that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from coterie.studies.comparison import ComparisonPlan, make_plan
from coterie.studies.recipes.schema import RecipePart


def planned(part: RecipePart, *, quick: bool = False, over: Mapping[str, Any] | None = None) -> ComparisonPlan:
    """Make the plan of a part.

    Parameters
    ----------
    part
        The part, which must have a quick version if that is asked for.
    quick
        Whether to take the quick version.
    over
        Values that stand over the part's own.

    Returns
    -------
    ComparisonPlan
        The plan; every run's configuration has been checked.
    """
    values = {**part.plan, **(part.quick or {} if quick else {}), **(over or {})}
    return make_plan({name: value for name, value in values.items() if value is not None})


def settings_of(part: RecipePart, plan: ComparisonPlan) -> dict[str, dict[str, Any]]:
    """Name the points of a plan's grid as the part does.

    Parameters
    ----------
    part
        The part.
    plan
        Its plan.

    Returns
    -------
    dict
        The points by label; one without a label if there is no grid.
    """
    return {_label(part, setting): setting for setting in plan.settings}


def _label(part: RecipePart, setting: Mapping[str, Any]) -> str:
    named = {name: {str(value): label for value, label in labels.items()} for name, labels in part.labels.items()}
    return ", ".join(named.get(name, {}).get(str(value), f"{name}={value}") for name, value in setting.items())


@dataclass(frozen=True)
class Work:
    """How much there is to do.

    Parameters
    ----------
    runs
        How many runs.
    rounds
        How many rounds they have together.
    updates
        How often a client trains in them.
    """

    runs: int = 0
    rounds: int = 0
    updates: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.runs + other.runs, self.rounds + other.rounds, self.updates + other.updates)

    def sentence(self) -> str:
        """Say it in words.

        Returns
        -------
        str
            Half a sentence.
        """
        return f"{self.runs:,} runs, {self.rounds:,} rounds, {self.updates:,} times a client trains"


def work(plan: ComparisonPlan) -> Work:
    """Count what a plan's runs have to do.

    Parameters
    ----------
    plan
        The plan.

    Returns
    -------
    Work
        The counts.
    """
    total = Work()
    for run in plan.runs:
        config = run.config
        trainers = config.clients - round(config.hold_out * config.clients)
        total += Work(1, config.rounds, config.rounds * max(1, round(config.participation * trainers)))
    return total
