"""A recipe's outcome for the terminal, as Markdown and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from coterie.studies.comparison import Tuned
from coterie.studies.recipes.cells import CellName
from coterie.studies.recipes.demands import shown
from coterie.studies.recipes.outcomes import Finding, PartOutcome, RecipeOutcome, Status, Verdict
from coterie.studies.recipes.plans import circumstances, settings_of
from coterie.studies.recipes.schema import Recipe
from coterie.studies.recipes.tables import not_target, part_table
from coterie.tables import escape_markdown

_SIGNS: dict[Status, tuple[str, str]] = {
    "holds": ("✓", "green"),
    "fails": ("✗", "red"),
    "open": ("?", "yellow"),
    "left out": ("·", "dim"),
}
_STAND_IN = "a small stand-in on other data: only orders can be compared with the paper's numbers"


def terminal(outcome: RecipeOutcome) -> Group:
    """Give the outcome for the terminal.

    Parameters
    ----------
    outcome
        The outcome.

    Returns
    -------
    rich.console.Group
        A table for each found, then the criteria.
    """
    recipe = outcome.recipe
    blocks: list[RenderableType] = [Text(f"{heading(recipe)}: {recipe.title}", style="bold")]
    if outcome.quick:
        blocks.append(Text(f"the quick version, {_STAND_IN}", style="yellow"))
    for found in outcome.parts:
        blocks += [Text(), Text(found.part.heading, style="bold"), Text(_setting(found, outcome.quick), style="dim")]
        if found.absent or found.failed:
            blocks.append(Text(_not_run(found), style="yellow" if found.absent else "red"))
            continue
        blocks.append(part_table(found, recipe.unit, outcome.quick))
    if outcome.verdicts:
        blocks += [Text(), Text(counted(outcome.verdicts), style="bold"), *_criteria(outcome)]
        blocks += [Text(), Text(AS_THEY_ARE, style="dim")]
    return Group(*blocks)


AS_THEY_ARE = (
    "By these numbers as they are. What can be said of the paper's claims, coterie recipe verdicts decides, which asks "
    "for the paper's rounds, seeds and tuning."
)


def heading(recipe: Recipe) -> str:
    """Say which table or figure of which paper it is.

    Parameters
    ----------
    recipe
        The recipe.

    Returns
    -------
    str
        For instance ``FedAMP, Table 3``.
    """
    titles = {"fedacs": "FedACS", "fedamp": "FedAMP", "fedpg": "FedPG", "flame": "FLAME"}
    return f"{titles[recipe.paper]}, {recipe.source}"


def _setting(found: PartOutcome, quick: bool) -> str:
    """Say in one line what was run."""
    config, plan = found.plan.runs[0].config, found.plan
    seeds = f"{len(plan.seeds)} seeds" if len(plan.seeds) > 1 else f"seed {plan.seeds[0]}"
    fields = [("data", config.data), ("partition", config.partition), ("model", config.model)]
    said = [value for name, value in fields if name not in plan.grid]
    said += [f"{config.clients} clients"] if "clients" not in plan.grid else []
    said += [f"{config.participation:g} of them a round"] if config.participation < 1 else []
    said += [f"products in {config.precision}"] if config.precision != "float32" else []
    when = {"final": "after the last", "best": "best on validation data", "best_oracle": "best on test data"}
    line = ", ".join([*said, f"{config.rounds} rounds, {when[found.part.at]}", seeds])
    return f"in its place: {line}" if quick else line


def _not_run(found: PartOutcome) -> str:
    return f"passed over: {found.absent}" if found.absent else f"failed: {found.failed}"


def counted(verdicts: Sequence[Verdict]) -> str:
    words = {"holds": ("holds", "hold"), "fails": ("fails", "fail"), "open": ("could not be judged",) * 2}
    words["left out"] = ("is for the whole version", "are for the whole version")
    numbers = {status: sum(verdict.status == status for verdict in verdicts) for status in words}
    said = [f"{count} {words[status][count > 1]}" for status, count in numbers.items() if count]
    return f"Criteria: {', '.join(said)}"


def _criteria(outcome: RecipeOutcome) -> Iterator[RenderableType]:
    for verdict in outcome.verdicts:
        sign, colour = _SIGNS[verdict.status]
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=1)
        grid.add_column(overflow="fold")
        grid.add_row(Text(sign, style=colour), Text(verdict.criterion.says))
        for line in _findings(outcome, verdict):
            grid.add_row("", Padding(Text(line, style="dim"), (0, 0, 0, 2)))
        yield grid


def _findings(outcome: RecipeOutcome, verdict: Verdict) -> Iterator[str]:
    if verdict.status == "left out":
        return
    if not verdict.findings:
        yield "not judged: none of its parts was run"
    for finding in verdict.findings:
        where = _where(outcome, finding)
        yield f"{where}: {_outcome(finding)}" if where else _outcome(finding)
    if verdict.criterion.note:
        yield verdict.criterion.note


def _where(outcome: RecipeOutcome, finding: Finding) -> str:
    titles = {each.part.name: each.part.heading for each in outcome.parts}
    alone = len(outcome.parts) == 1
    pieces = ["" if alone else titles.get(finding.part, finding.part), finding.setting]
    return ", ".join(piece for piece in pieces if piece)


def _outcome(finding: Finding) -> str:
    if finding.margin is None:
        return f"not judged: {finding.evidence}"
    word = "holds" if finding.holds else "fails"
    by = f" by {shown(abs(finding.margin))}" if math.isfinite(finding.margin) and finding.margin else ""
    return f"{word}{by} ({finding.evidence})"


def markdown(outcome: RecipeOutcome) -> str:
    """Give the outcome as Markdown.

    Parameters
    ----------
    outcome
        The outcome.

    Returns
    -------
    str
        A heading, what the setting is, a table for each found, the criteria.
    """
    recipe = outcome.recipe
    blocks = [f"# {heading(recipe)}: {escape_markdown(recipe.title)}"]
    if outcome.quick:
        blocks.append(f"The quick version, {_STAND_IN}.")
    blocks += [escape_markdown(paragraph) for paragraph in recipe.about.strip().split("\n") if paragraph]
    for found in outcome.parts:
        blocks += [f"## {escape_markdown(found.part.heading)}", f"{escape_markdown(_setting(found, outcome.quick))}."]
        if found.absent or found.failed:
            blocks.append(f"*{escape_markdown(_not_run(found))}*")
            continue
        blocks.append(part_table(found, recipe.unit, outcome.quick).markdown().rstrip("\n"))
    if outcome.verdicts:
        lines = [f"## {counted(outcome.verdicts)}", "", AS_THEY_ARE, ""]
        for verdict in outcome.verdicts:
            lines.append(
                f"- {_SIGNS[verdict.status][0]} **{verdict.status}**: {escape_markdown(verdict.criterion.says)}"
            )
            lines += [f"  - {escape_markdown(line)}" for line in _findings(outcome, verdict)]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def plain(outcome: RecipeOutcome) -> dict[str, Any]:
    """Give the outcome as plain JSON types.

    Parameters
    ----------
    outcome
        The outcome.

    Returns
    -------
    dict
        Everything that the tables show and more, unrounded; ``null`` where there is no finite number.
    """
    recipe = outcome.recipe
    return {
        "recipe": recipe.name,
        "paper": recipe.paper,
        "source": recipe.source,
        "title": recipe.title,
        "unit": recipe.unit,
        "quick": outcome.quick,
        "parts": [_plain_part(found) for found in outcome.parts],
        "criteria": [
            {
                "name": verdict.criterion.name,
                "says": verdict.criterion.says,
                "status": verdict.status,
                "findings": [
                    {
                        "part": finding.part,
                        "setting": finding.setting,
                        "holds": finding.holds,
                        "margin": _finite(finding.margin),
                        "evidence": finding.evidence,
                    }
                    for finding in verdict.findings
                ],
            }
            for verdict in outcome.verdicts
        ],
    }


def _plain_part(found: PartOutcome) -> dict[str, Any]:
    config = found.plan.runs[0].config
    asked, usual = circumstances(found.part, found.plan), circumstances(found.part, found.plan, {})
    common = ("data", "partition", "model", "clients", "rounds", "participation", "validation", "device", "precision")
    return {
        "name": found.part.name,
        "title": found.part.heading,
        "absent": found.absent,
        "failed": found.failed,
        "at": found.part.at,
        **({} if found.part.tuned_by is None else {"tuned_by": found.part.tuned_by}),
        "seeds": list(found.plan.seeds),
        "grid": found.plan.grid,
        **{name: getattr(config, name) for name in common if name not in found.plan.grid},
        **{name: value for name, value in asked.items() if value != usual[name]},
        "seconds": round(found.seconds, 1),
        "tuned": [each.sentence() for each in found.numbers.tuned],
        "tuning": [_plain_tuning(found, each) for each in found.numbers.tuned],
        "methods": {name: _plain_method(found, name) for name in found.plan.methods},
        "runs": {name: None if run is None else run.plain() for name, run in found.runs.items()},
        "cells": [] if found.absent or found.failed else [_plain_cell(found, name) for name in _names(found)],
    }


def _plain_tuning(found: PartOutcome, tuned: Tuned) -> dict[str, Any]:
    names = {title: name for name, title in found.plan.titles.items()}
    points = settings_of(found.part, found.plan).items()
    return {
        "setting": next(label for label, point in points if point == tuned.setting),
        "method": names[tuned.method],
        "chosen": tuned.chosen,
        "tried": [values for values, _ in tuned.scores],
        "edges": list(tuned.edges),
    }


def _plain_method(found: PartOutcome, name: str) -> dict[str, Any]:
    """Give a method with the settings that were neither tuned nor a point of the grid."""
    run = next(run for run in found.plan.runs if run.method == name)
    varied = {*run.candidate, *run.setting}
    settings = run.config.plain()["settings"]
    return {
        "algorithm": run.config.algorithm,
        "settings": {key: value for key, value in settings.items() if key not in varied},
    }


def _names(found: PartOutcome) -> Iterator[CellName]:
    for setting in found.settings:
        for method in found.plan.methods:
            for reading in found.part.readings:
                name = CellName(found.part.name, setting, method, reading)
                if name in found.numbers.values or name in found.theirs or (setting, method) in found.numbers.diverged:
                    yield name


def _plain_cell(found: PartOutcome, name: CellName) -> dict[str, Any]:
    ours, theirs = found.numbers.values.get(name), found.theirs.get(name)
    return {
        **({"setting": name.setting} if name.setting else {}),
        "method": name.method,
        "reading": name.reading,
        "mean": None if ours is None else _finite(ours.mean),
        "std": None if ours is None else _finite(ours.std),
        **({"each": list(ours.each)} if ours is not None and all(map(math.isfinite, ours.each)) and ours.each else {}),
        "paper": None if theirs is None else theirs.mean,
        "paper_std": None if theirs is None else theirs.std,
        **({"not_target": not_target(found.part, name)} if not_target(found.part, name) else {}),
        **({"diverged": True} if (name.setting, name.method) in found.numbers.diverged else {}),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
