"""What came of a recipe: of each part, and of each criterion."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from coterie.studies.comparison import ComparisonPlan
from coterie.studies.recipes.cells import CellName, PaperNumber
from coterie.studies.recipes.checks import row_of
from coterie.studies.recipes.plans import settings_of
from coterie.studies.recipes.readings import PartValues
from coterie.studies.recipes.run_numbers import RunNumbers
from coterie.studies.recipes.schema import Criterion, Recipe, RecipePart

Status = Literal["holds", "fails", "open", "left out"]
"""Of a criterion: holds wherever it was judged, fails somewhere, was judged nowhere, or is not judged when quick."""


@dataclass(frozen=True)
class PartOutcome:
    """What became of one part.

    Parameters
    ----------
    part
        The part.
    plan
        Its plan as it was run.
    numbers
        Our numbers; none if it was not run.
    absent
        Why it was passed over, empty if it was not.
    failed
        What stopped it, empty if nothing did.
    seconds
        How long its runs took together.
    runs
        What was read off each of its runs by name, ``None`` for one that diverged; of runs, too, that are not in the
        plan since others of their seed or method are missing.
    """

    part: RecipePart
    plan: ComparisonPlan
    numbers: PartValues = field(default_factory=PartValues)
    absent: str = ""
    failed: str = ""
    seconds: float = 0.0
    runs: Mapping[str, RunNumbers | None] = field(default_factory=dict)

    @property
    def settings(self) -> tuple[str, ...]:
        """The labels of its grid."""
        return tuple(settings_of(self.part, self.plan))

    @cached_property
    def theirs(self) -> dict[CellName, PaperNumber]:
        """The paper's numbers."""
        return paper_numbers(self.part)

    @property
    def missing(self) -> str:
        """Why it has no numbers, empty if it has."""
        return self.absent or self.failed


@dataclass(frozen=True)
class Finding:
    """What was found for one part and setting.

    Parameters
    ----------
    part
        The part's name; empty for means over several.
    setting
        The setting's label; empty if there is none.
    margin
        By how much it holds or, negative, fails; ``None`` where it could not be judged.
    holds
        Whether it holds; ``None`` where it could not be judged.
    evidence
        The numbers that decide it, or why it could not be judged.
    """

    part: str
    setting: str
    margin: float | None
    holds: bool | None
    evidence: str


@dataclass(frozen=True)
class Verdict:
    """What became of a criterion.

    Parameters
    ----------
    criterion
        The criterion.
    status
        In one word.
    findings
        For each part and setting.
    """

    criterion: Criterion
    status: Status
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class RecipeOutcome:
    """What became of a recipe.

    Parameters
    ----------
    recipe
        The recipe.
    quick
        Whether it was the quick version.
    parts
        Its parts.
    verdicts
        Its criteria.
    """

    recipe: Recipe
    quick: bool
    parts: tuple[PartOutcome, ...]
    verdicts: tuple[Verdict, ...]

    @property
    def failures(self) -> list[str]:
        """What stopped parts, one sentence each."""
        return [f"part {part.part.name!r}: {part.failed}" for part in self.parts if part.failed]


def paper_numbers(part: RecipePart) -> dict[CellName, PaperNumber]:
    names = part.numbers.readings or tuple(part.readings)
    found: dict[CellName, PaperNumber] = {}
    for row, numbers in part.numbers.rows.items():
        method, setting = row_of(row)
        for name, number in zip(names, numbers, strict=True):
            if number is not None:
                found[CellName(part.name, setting, method, name)] = number
    return found
