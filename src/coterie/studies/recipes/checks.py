"""Whether a recipe makes sense: its fields, its plans, and every name that its numbers and criteria mention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from coterie.errors import ConfigError, CoterieError, nearest
from coterie.studies.comparison import ComparisonPlan
from coterie.studies.recipes.cells import EVERY_OTHER, Address
from coterie.studies.recipes.plans import planned, settings_of
from coterie.studies.recipes.schema import Criterion, Near, Reading, Recipe, RecipePart

_RESERVED = ("|", " minus ", " over ")


def parse(values: Mapping[str, Any], where: str) -> Recipe:
    """Make a recipe of its file's values, and check everything in it that can be checked without data."""
    try:
        recipe = Recipe(**values)
    except ValidationError as error:
        raise ConfigError(f"the recipe {where!r}: {_sentence(error)}") from None
    try:
        _check(recipe)
    except CoterieError as error:
        raise ConfigError(f"the recipe {where!r}: {error}") from None
    return recipe


def _sentence(error: ValidationError) -> str:
    found: dict[str, str] = {}
    for item in error.errors(include_url=False):
        path = [str(piece) for piece in item["loc"]]
        if item["type"] == "missing":
            where, text = ".".join(path[:-1]), f"{path[-1]!r} must be given"
        elif item["type"] == "extra_forbidden":
            where, text = ".".join(path[:-1]), f"there is no field {path[-1]!r}"
        elif item["type"] == "value_error":
            where, text = ".".join(path), str(item["msg"]).removeprefix("Value error, ")
        else:
            message = str(item["msg"])
            where, text = ".".join(path), f"{item['input']!r} is not allowed: {message[:1].lower()}{message[1:]}"
        found.setdefault(where, text)
    return "; ".join(f"{where}: {text}" if where else text for where, text in list(found.items())[:3])


@dataclass(frozen=True)
class _Known:
    """The names that a part has."""

    part: RecipePart
    methods: tuple[str, ...]
    settings: tuple[str, ...]

    def refuse_unknown(self, kind: str, name: str, known: Iterable[str], who: str) -> None:
        names = list(known)
        if name not in names:
            raise ConfigError(
                f"{who} names the {kind} {name!r}, which the part {self.part.name!r} does not have: "
                f"{nearest(name, names)}it has {', '.join(map(repr, names)) or 'none'}"
            )

    def refuse_address(self, address: Address, who: str) -> None:
        if address.method != EVERY_OTHER:
            self.refuse_unknown("method", address.method, self.methods, who)
        if address.reading:
            self.refuse_unknown("reading", address.reading, self.part.readings, who)
        if address.setting:
            self.refuse_unknown("setting", address.setting, [name for name in self.settings if name], who)


def _check(recipe: Recipe) -> None:
    _refuse_twice("part", [part.name for part in recipe.parts])
    _refuse_twice("criterion", [criterion.name for criterion in recipe.criteria])
    known: dict[str, _Known] = {}
    for part in recipe.parts:
        try:
            known[part.name] = _check_part(part)
        except CoterieError as error:
            raise ConfigError(f"part {part.name!r}: {error}") from None
    if all(part.quick is None for part in recipe.parts):
        raise ConfigError("no part has a quick version: give at least one its quick values")
    for criterion in recipe.criteria:
        _check_criterion(criterion, known)


def _refuse_twice(kind: str, names: Sequence[str]) -> None:
    for place, name in enumerate(names):
        if name in names[:place]:
            raise ConfigError(f"there are two of the {kind} {name!r}: each needs a name of its own")


def _check_part(part: RecipePart) -> _Known:
    plan = planned(part)
    for name in part.labels:
        if name not in plan.grid:
            raise ConfigError(f"labels speaks of {name!r}, which is not in the plan's grid: give it there too")
    settings = tuple(settings_of(part, plan))
    if len(settings) < len(plan.settings):
        raise ConfigError("labels gives two points of the grid the same name: each needs one of its own")
    for name in (*plan.methods, *part.readings, *settings):
        if any(mark in name for mark in _RESERVED):
            raise ConfigError(f"{name!r} holds one of {', '.join(map(repr, _RESERVED))}, which criteria use themselves")
    known = _Known(part, plan.methods, settings)
    plans = [plan]
    if part.quick is not None:
        plans.append(planned(part, quick=True))
    for name, reading in part.readings.items():
        for method in (*reading.models, *([reading.against] if reading.against else ())):
            known.refuse_unknown("method", method, plan.methods, f"the reading {name!r}")
        for each in plans:
            _refuse_unreadable(part, name, reading, each)
    _check_numbers(known)
    for entry in part.not_targets:
        for address in entry.addresses:
            known.refuse_address(address, "not_targets")
    return known


def _refuse_unreadable(part: RecipePart, name: str, reading: Reading, plan: ComparisonPlan) -> None:
    """Refuse a reading of what the plan's runs do not record."""
    for run in plan.runs:
        if reading.split == "cross" and not run.config.matrix:
            raise ConfigError(f"the reading {name!r} is of the accuracy matrix: give the plan matrix: true")
        fraction = (reading.metric or "").removeprefix("s_acc ")
        if fraction != (reading.metric or "") and float(fraction) not in run.config.s_acc:
            raise ConfigError(f"the reading {name!r} is of S-acc({fraction}): give the plan that fraction under s_acc")
        if reading.split == "train" and not run.config.eval_train:
            raise ConfigError(f"the reading {name!r} is of training samples: give the plan eval_train: true")
        if (reading.at or part.at) == "best" and run.config.validation == 0:
            raise ConfigError(f"the reading {name!r} is at the best round on validation data, but validation is 0")


def _check_numbers(known: _Known) -> None:
    part, numbers = known.part, known.part.numbers
    for reading in numbers.readings:
        known.refuse_unknown("reading", reading, part.readings, "numbers")
    wanted = len(numbers.readings or part.readings)
    for row, found in numbers.rows.items():
        method, setting = row_of(row)
        known.refuse_unknown("method", method, known.methods, f"the row {row!r} of numbers")
        known.refuse_unknown("setting", setting, known.settings, f"the row {row!r} of numbers")
        if len(found) != wanted:
            raise ConfigError(f"the row {row!r} of numbers has {len(found)} entries for {wanted} readings")


def row_of(text: str) -> tuple[str, str]:
    """Read ``METHOD`` or ``METHOD | SETTING``; without a grid the setting is empty."""
    pieces = [piece.strip() for piece in text.split("|")]
    if len(pieces) > 2:
        raise ConfigError(f"the row {text!r} of numbers must be METHOD or METHOD | SETTING")
    return pieces[0], pieces[1] if len(pieces) == 2 else ""


def _check_criterion(criterion: Criterion, known: Mapping[str, _Known]) -> None:
    who = f"the criterion {criterion.name!r}"
    for name in criterion.parts:
        if name not in known:
            raise ConfigError(f"{who} names the part {name!r}: {nearest(name, known)}there are {', '.join(known)}")
    spoken = [known[name] for name in criterion.parts or known]
    for each in spoken:
        for setting in criterion.settings:
            each.refuse_unknown("setting", setting, each.settings, who)
        for method in criterion.leave_out:
            each.refuse_unknown("method", method, each.methods, who)
        for term in criterion.terms:
            for address in term.cells:
                each.refuse_address(address, who)
    if isinstance(criterion.test, Near) and not all(each.part.numbers.rows for each in spoken):
        raise ConfigError(f"{who} compares with the paper's numbers, and one of its parts has none")
