"""A recipe as the terminal shows it: setting, plans, the paper's numbers, criteria, and how much work it is."""

from __future__ import annotations

from typing import Any

import yaml
from rich.padding import Padding
from rich.text import Text

from coterie.cli.console import out
from coterie.studies import recipes
from coterie.studies.recipes.cells import CellName
from coterie.studies.recipes.outcomes import paper_numbers
from coterie.studies.recipes.plans import planned, settings_of, work
from coterie.studies.recipes.runner import chosen_parts
from coterie.studies.recipes.schema import KINDS, Criterion, Recipe, RecipePart
from coterie.studies.recipes.tables import decimals, not_target, written
from coterie.tables import ABSENT, Row, Table, numbers, words

_ORDER = ("methods", "grid", "tune", "data", "partition", "clients", "rounds", "seeds")


def print_recipe(recipe: Recipe, quick: bool) -> None:
    out.print(Text(f"{recipes.heading(recipe)}: {recipe.title}", style="bold"), "", sep="\n")
    for paragraph in recipe.about.strip().splitlines():
        out.print(Text(paragraph), "", sep="\n")
    total = recipes.Work()
    parts = chosen_parts(recipe, quick=quick)
    for part in parts:
        total += work(planned(part, quick=quick))
        out.print(Text(part.heading, style="bold"), Text(f"({part.name})", style="dim"))
        _show_plan(part, parts[0], quick)
        if part.note:
            _indented(part.note)
        _show_numbers(part, recipe.unit)
        out.print()
    if recipe.criteria:
        out.print(Text("Criteria", style="bold"))
    for criterion in recipe.criteria:
        _show_criterion(recipe, criterion)
    out.print(f"\n{'The quick version' if quick else 'All of it'}: {total.sentence()}", highlight=False)


def _indented(text: str, style: str = "") -> None:
    out.print(Padding(Text(text, style=style), (0, 0, 0, 2)))


def _show_plan(part: RecipePart, first: RecipePart, quick: bool) -> None:
    """Show a plan; of one that comes after another, what differs."""
    values, before = _plan(part, quick), _plan(first, quick)
    if part is not first:
        changed = {name: value for name, value in values.items() if before.get(name) != value}
        gone = [name for name in before if name not in values]
        _indented(f"as {first.heading}, without {', '.join(gone)}" if gone else f"as {first.heading}", "dim")
        values = changed
    for name, value in values.items():
        flow = None if isinstance(value, list | dict) else False  # lists on one line where they hold plain values
        _indented(yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, default_flow_style=flow).rstrip())


def _plan(part: RecipePart, quick: bool) -> dict[str, Any]:
    values = {**part.plan, **(part.quick or {} if quick else {}), "at": part.at}
    rest = [name for name in values if name not in _ORDER]
    return {name: _brief(values[name]) for name in (*_ORDER, *rest) if values.get(name) is not None}


def _brief(value: Any) -> Any:
    """Name methods that have nothing but a name by it."""
    if not isinstance(value, list):
        return value
    return [each["algorithm"] if isinstance(each, dict) and set(each) == {"algorithm"} else each for each in value]


def _show_numbers(part: RecipePart, unit: str) -> None:
    printed = paper_numbers(part)
    if not printed:
        _indented("the paper prints no numbers", "dim")
        return
    readings = [name for name in part.readings if any(cell.reading == name for cell in printed)]
    settings = [label for label in settings_of(part, planned(part)) if any(c.setting == label for c in printed)]
    labels = ("setting", "paper") if settings != [""] else ("paper",)
    rows = []
    for label in settings:
        for method in dict.fromkeys(cell.method for cell in printed if cell.setting == label):
            found = {cell.reading: cell for cell in printed if (cell.setting, cell.method) == (label, method)}
            cells = [_their_number(part, found.get(name), unit) for name in readings]
            rows.append(Row((*([label] if settings != [""] else []), method, *cells)))
    table = Table((*words(*labels), *numbers(*readings)), tuple(rows), labels=len(labels))
    out.print(Padding(table, (0, 0, 0, 2)))
    for entry in part.not_targets:
        _indented(f"† not a target: {entry.why}", "dim")


def _their_number(part: RecipePart, cell: CellName | None, unit: str) -> str:
    if cell is None:
        return ABSENT
    text = written(paper_numbers(part)[cell], decimals(part.readings[cell.reading], unit))
    return text + ("†" if not_target(part, cell) else "")


def _show_criterion(recipe: Recipe, criterion: Criterion) -> None:
    where = ", ".join([*(recipe.part(name).heading for name in criterion.parts), *criterion.settings]) or "everywhere"
    kind = next(kind for kind in KINDS if getattr(criterion, kind) is not None)
    words = criterion.test.model_dump(mode="json", exclude_none=True)
    said = "; ".join(
        f"{key}: {', '.join(value) if isinstance(value, list) else value}" for key, value in words.items() if value
    )
    also = ", on the mean over them" if criterion.take == "mean" else ""
    also += ", also when quick" if criterion.quick else ""
    out.print(Text(f"- {criterion.says}"))
    _indented(f"{where}{also}: {kind.replace('_', ' ')} ({said})", "dim")
    if criterion.leave_out:
        _indented(f"* does not stand for {', '.join(criterion.leave_out)}", "dim")
    if criterion.note:
        _indented(criterion.note, "dim")
