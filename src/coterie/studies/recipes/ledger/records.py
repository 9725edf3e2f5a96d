"""What was found, as ``recipe.json`` files keep it: the evidence on which claims are decided."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coterie.errors import ConfigError
from coterie.studies.comparison import ComparisonPlan
from coterie.studies.recipes.cells import CellName
from coterie.studies.recipes.outcomes import PartOutcome
from coterie.studies.recipes.plans import circumstances, planned
from coterie.studies.recipes.readings import PartValues, Value
from coterie.studies.recipes.schema import RecipePart


@dataclass(frozen=True)
class PartRecord:
    """One part of a recipe as a file keeps it.

    Parameters
    ----------
    file
        The file's name.
    values
        What it says of the part.
    """

    file: str
    values: Mapping[str, Any]

    @property
    def rounds(self) -> int:
        """How many rounds were played."""
        return int(self.values["rounds"])

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds."""
        return tuple(self.values["seeds"])

    @property
    def ran(self) -> bool:
        """Whether it has numbers."""
        return bool(self.values["cells"])

    @property
    def methods(self) -> frozenset[str]:
        """The methods that were run."""
        return frozenset(cell["method"] for cell in self.values["cells"])

    def tried(self, setting: str, method: str) -> int:
        """Say how many values were tried for a method: one where nothing was tuned."""
        found = [each for each in self.values.get("tuning", ()) if each["method"] == method]
        return min((len(each["tried"]) for each in found if setting in ("", each["setting"])), default=1)

    def candidates(self, method: str) -> set[frozenset[tuple[str, Any]]]:
        """Give the values that were tried for a method; none where nothing was tuned."""
        found = [each for each in self.values.get("tuning", ()) if each["method"] == method]
        return {frozenset(values.items()) for each in found for values in each["tried"]}

    def edges(self, setting: str, method: str) -> list[str]:
        """Say which tuned values of a method lie at the edge of what was tried."""
        found = [each for each in self.values.get("tuning", ()) if each["method"] == method]
        return [f"{method}: {edge}" for each in found if setting in ("", each["setting"]) for edge in each["edges"]]


Records = dict[tuple[str, str], PartRecord]
"""Records by recipe and part."""


def read_records(*folders: Path) -> Records:
    """Read all results of folders: their ``.json`` files, and ``recipe.json`` of the folders in them.

    Quick versions decide nothing and are passed over. Of a part that was run more than once, the longest run with the
    most seeds is taken.
    """
    found: Records = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"there are no results in {str(folder)!r}: give the folder with those of recipes")
        for path in sorted([*folder.glob("*.json"), *folder.glob("*/recipe.json")]):
            for key, record in _read(path, str(path.relative_to(folder))):
                if key not in found or _weight(record) > _weight(found[key]):
                    found[key] = record
    return found


def _read(path: Path, name: str) -> list[tuple[tuple[str, str], PartRecord]]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        parts = [] if values.get("quick") else values["parts"]
        found = [((str(values["recipe"]), str(part["name"])), PartRecord(name, part)) for part in parts]
        for _, record in found:
            _weight(record)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"{str(path)!r} is not the result of a recipe: {error!r}") from error
    return found


def _weight(record: PartRecord) -> tuple[bool, int, int]:
    return record.ran, record.rounds, len(record.seeds)


def plan_of(part: RecipePart) -> ComparisonPlan:
    """Plan a part, once: many claims rest on the same ones."""
    if id(part) not in _plans:
        _plans[id(part)] = part, planned(part)
    return _plans[id(part)][1]


_plans: dict[int, tuple[RecipePart, ComparisonPlan]] = {}  # parts are held, so that none gets the number of another


def outcome_of(part: RecipePart, record: PartRecord) -> PartOutcome:
    """Give a record as the outcome of its part, as the recipe stands now."""
    plan, count = plan_of(part), len(record.seeds)
    values: dict[CellName, Value] = {}
    diverged: set[tuple[str, str]] = set()
    for cell in record.values["cells"]:
        setting, method = cell.get("setting", ""), cell["method"]
        if method not in plan.methods or cell["reading"] not in part.readings:
            continue
        if cell.get("diverged"):
            diverged.add((setting, method))
        elif cell["mean"] is not None:
            std = math.nan if cell["std"] is None else float(cell["std"])
            name = CellName(part.name, setting, method, cell["reading"])
            values[name] = Value(float(cell["mean"]), std, count, tuple(cell.get("each", ())))
    return PartOutcome(part, plan, PartValues(values, frozenset(diverged)))


def changes(
    outcome: PartOutcome, record: PartRecord, methods: frozenset[str], untuned: Collection[str] = ()
) -> list[str]:
    """Say in what a record differs from the recipe as it stands now, of all and of these methods.

    Of the ``untuned`` ones it is said already that they were not tuned.
    """
    plan, values = outcome.plan, record.values
    asked, played = (circumstances(outcome.part, plan, given) for given in (None, values))
    found = [
        f"{name} was {_told(played[name])}, and is {_told(value)} in the recipe"
        for name, value in asked.items()
        if played[name] != value
    ]
    if values.get("at") != outcome.part.at:
        found.append(f"numbers were read at {values.get('at')}, and are at {outcome.part.at} in the recipe")
    if json.loads(json.dumps(plan.grid)) != values.get("grid"):
        found.append("the settings were others than the recipe's")
    idle = _without_effect(plan)
    for method in sorted(methods & plan_methods(values)):
        run = next((run for run in plan.runs if run.method == method), None)
        if run is None:
            continue
        then = values["methods"][method]
        now = {name: value for name, value in run.config.plain()["settings"].items() if name not in idle}
        if then["algorithm"] != run.config.algorithm:
            found.append(f"{method} was {then['algorithm']}, and is {run.config.algorithm} in the recipe")
        if method not in untuned or record.candidates(method):
            found += _changes_of_tuning(outcome, record, method)
        for name, value in then["settings"].items():
            if name in now and name not in run.candidate and now[name] != value:
                found.append(f"{name} of {method} was {value}, and is {now[name]} in the recipe")
    return found


def _told(value: object) -> object:
    return "not set" if value in (None, "") else value


def _changes_of_tuning(outcome: PartOutcome, record: PartRecord, method: str) -> list[str]:
    candidates = {
        frozenset(run.candidate.items()) for run in outcome.plan.runs if run.method == method and run.candidate
    }
    tried = record.candidates(method)
    if not candidates or not tried:
        then, now = ("was", "is not") if tried else ("was not", "is")
        return [f"{method} {then} tuned, and {now} in the recipe"] if tried or candidates else []
    found = []
    models = record.values.get("tuned_by"), outcome.part.tuned_by
    if models[0] != models[1]:
        by = [f"its {model} model" if model else "the model of the first column" for model in models]
        found.append(f"{method} was tuned by {by[0]}, and is by {by[1]} in the recipe")
    if tried != candidates:
        found.append(f"{method} was tuned over other values than the recipe's")
    return found


def _without_effect(plan: ComparisonPlan) -> set[str]:
    """Name settings that cannot change a number: of newcomers where none come, of those away where none are."""
    late = any(run.config.hold_out > 0 for run in plan.runs)
    away = any(run.config.participation < 1 for run in plan.runs)
    return ({"newcomers"} if not late else set()) | ({"returning", "freshness"} if not away else set())


def plan_methods(values: Mapping[str, Any]) -> frozenset[str]:
    """Name the methods whose settings a record keeps."""
    return frozenset(values.get("methods", {}))
