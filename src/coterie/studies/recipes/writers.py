"""A recipe's outcome for the terminal, as Markdown and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from coterie.studies.recipes.cells import CellName
from coterie.studies.recipes.runner import Outcome, Played
from coterie.studies.recipes.schema import Recipe
from coterie.studies.recipes.tables import ABSENT, Layout, layout, not_target
from coterie.studies.recipes.verdicts import Finding, Status, Verdict, shown

_SIGNS: dict[Status, tuple[str, str]] = {
    "holds": ("✓", "green"),
    "fails": ("✗", "red"),
    "open": ("?", "yellow"),
    "left out": ("·", "dim"),
}
_STAND_IN = "a small stand-in on other data: only orders can be compared with the paper's numbers"


def terminal(outcome: Outcome) -> Group:
    """Give the outcome for the terminal.

    Parameters
    ----------
    outcome
        The outcome.

    Returns
    -------
    rich.console.Group
        A table for each part, then the criteria.
    """
    recipe = outcome.recipe
    blocks: list[RenderableType] = [Text(f"{heading(recipe)}: {recipe.title}", style="bold")]
    if outcome.quick:
        blocks.append(Text(f"the quick version, {_STAND_IN}", style="yellow"))
    for played in outcome.parts:
        blocks += [Text(), Text(played.part.heading, style="bold"), Text(_setting(played, outcome.quick), style="dim")]
        if played.absent or played.failed:
            blocks.append(Text(_not_run(played), style="yellow" if played.absent else "red"))
            continue
        found = layout(played, recipe.unit, outcome.quick)
        blocks += [_Fitted(found), *(Text(sentence, style="dim") for sentence in _notes(played, found))]
    if outcome.verdicts:
        blocks += [Text(), Text(counted(outcome.verdicts), style="bold"), *_criteria(outcome)]
    return Group(*blocks)


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


class _Fitted:
    """A table that is cut into several below each other where it is too wide: a number is never broken."""

    def __init__(self, found: Layout) -> None:
        self._found = found

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        found = self._found
        left = sum(_width(title, [row.left[k] for row in found.rows]) for k, title in enumerate(found.left))
        blocks: list[list[int]] = [[]]
        used = left
        for k, title in enumerate(found.columns):
            wide = _width(title, [row.cells[k] for row in found.rows])
            if blocks[-1] and used + wide > options.max_width:
                blocks.append([])
                used = left
            blocks[-1].append(k)
            used += wide
        for block in blocks:
            yield _table(found, block)


def _width(title: str, texts: Sequence[str]) -> int:
    """Give what a column takes, with the space between columns; its heading may be broken between words."""
    return 2 + max(map(len, (*title.split(), *texts)), default=0)


def _table(found: Layout, columns: Sequence[int]) -> Table:
    out = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for title in found.left:
        out.add_column(title, overflow="fold")
    for k in columns:
        out.add_column(found.columns[k], justify="right", overflow="fold")
    styles = {"paper": "dim", "difference": "dim italic"}
    for row in found.rows:
        if row.kind in styles and all(row.cells[k] == ABSENT for k in columns):
            continue
        cells = [Text(row.cells[k], no_wrap=True) for k in columns]
        out.add_row(*map(Text, row.left), *cells, style=styles.get(row.kind, ""), end_section=row.last)
    return out


def _setting(played: Played, quick: bool) -> str:
    """Say in one line what was run."""
    config, plan = played.plan.runs[0].config, played.plan
    seeds = f"{len(plan.seeds)} seeds" if len(plan.seeds) > 1 else f"seed {plan.seeds[0]}"
    fields = [("data", config.data), ("partition", config.partition), ("model", config.model)]
    said = [value for name, value in fields if name not in plan.grid]
    said += [f"{config.clients} clients"] if "clients" not in plan.grid else []
    said += [f"{config.participation:g} of them a round"] if config.participation < 1 else []
    said += [f"products in {config.precision}"] if config.precision != "float32" else []
    when = {"final": "after the last", "best": "best on validation data", "best_oracle": "best on test data"}
    line = ", ".join([*said, f"{config.rounds} rounds, {when[played.part.at]}", seeds])
    return f"in its place: {line}" if quick else line


def _not_run(played: Played) -> str:
    return f"passed over: {played.absent}" if played.absent else f"failed: {played.failed}"


def _notes(played: Played, found: Layout) -> list[str]:
    notes = [f"{'†' * (place + 1)} not a target: {why}" for place, why in enumerate(found.notes)]
    return [
        *notes,
        *([played.part.note] if played.part.note else []),
        *(each.sentence() for each in played.cells.tuned),
    ]


def counted(verdicts: Sequence[Verdict]) -> str:
    """Count what became of the criteria.

    Parameters
    ----------
    verdicts
        The verdicts.

    Returns
    -------
    str
        One line.
    """
    words = {"holds": ("holds", "hold"), "fails": ("fails", "fail"), "open": ("could not be judged",) * 2}
    words["left out"] = ("is for the whole version", "are for the whole version")
    numbers = {status: sum(verdict.status == status for verdict in verdicts) for status in words}
    said = [f"{count} {words[status][count > 1]}" for status, count in numbers.items() if count]
    return f"Criteria: {', '.join(said)}"


def _criteria(outcome: Outcome) -> Iterator[RenderableType]:
    for verdict in outcome.verdicts:
        sign, colour = _SIGNS[verdict.status]
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=1)
        grid.add_column(overflow="fold")
        grid.add_row(Text(sign, style=colour), Text(verdict.criterion.says))
        for line in _findings(outcome, verdict):
            grid.add_row("", Padding(Text(line, style="dim"), (0, 0, 0, 2)))
        yield grid


def _findings(outcome: Outcome, verdict: Verdict) -> Iterator[str]:
    if verdict.status == "left out":
        return
    if not verdict.findings:
        yield "not judged: none of its parts was run"
    for finding in verdict.findings:
        where = _where(outcome, finding)
        yield f"{where}: {_outcome(finding)}" if where else _outcome(finding)
    if verdict.criterion.note:
        yield verdict.criterion.note


def _where(outcome: Outcome, finding: Finding) -> str:
    titles = {played.part.name: played.part.heading for played in outcome.parts}
    alone = len(outcome.parts) == 1
    pieces = ["" if alone else titles.get(finding.part, finding.part), finding.setting]
    return ", ".join(piece for piece in pieces if piece)


def _outcome(finding: Finding) -> str:
    if finding.margin is None:
        return f"not judged: {finding.evidence}"
    word = "holds" if finding.holds else "fails"
    by = f" by {shown(abs(finding.margin))}" if math.isfinite(finding.margin) and finding.margin else ""
    return f"{word}{by} ({finding.evidence})"


def markdown(outcome: Outcome) -> str:
    """Give the outcome as Markdown.

    Parameters
    ----------
    outcome
        The outcome.

    Returns
    -------
    str
        A heading, what the setting is, a table for each part, the criteria.
    """
    recipe = outcome.recipe
    blocks = [f"# {heading(recipe)}: {_escaped(recipe.title)}"]
    if outcome.quick:
        blocks.append(f"The quick version, {_STAND_IN}.")
    blocks += [_escaped(paragraph) for paragraph in recipe.about.strip().split("\n") if paragraph]
    for played in outcome.parts:
        blocks += [f"## {_escaped(played.part.heading)}", f"{_escaped(_setting(played, outcome.quick))}."]
        if played.absent or played.failed:
            blocks.append(f"*{_escaped(_not_run(played))}*")
            continue
        found = layout(played, recipe.unit, outcome.quick)
        blocks.append(_markdown_table(found))
        blocks += [_escaped(note) for note in _notes(played, found)]
    if outcome.verdicts:
        lines = [f"## {counted(outcome.verdicts)}", ""]
        for verdict in outcome.verdicts:
            lines.append(f"- {_SIGNS[verdict.status][0]} **{verdict.status}**: {_escaped(verdict.criterion.says)}")
            lines += [f"  - {_escaped(line)}" for line in _findings(outcome, verdict)]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _markdown_table(found: Layout) -> str:
    rows = [[*found.left, *found.columns], ["---"] * len(found.left) + ["---:"] * len(found.columns)]
    rows += [[*row.left, *row.cells] for row in found.rows]
    rule = rows.pop(1)
    lines = [[_escaped(text) for text in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [lines[0], rule, *lines[1:]])


def _escaped(text: str) -> str:
    for sign in "\\`*_|<#":
        text = text.replace(sign, f"\\{sign}")
    return text


def plain(outcome: Outcome) -> dict[str, Any]:
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
        "parts": [_plain_part(played) for played in outcome.parts],
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


def _plain_part(played: Played) -> dict[str, Any]:
    config, part = played.plan.runs[0].config, played.part
    common = ("data", "partition", "model", "clients", "rounds", "participation", "validation", "device", "precision")
    return {
        "name": part.name,
        "title": part.heading,
        "absent": played.absent,
        "failed": played.failed,
        "at": part.at,
        "seeds": list(played.plan.seeds),
        "grid": played.plan.grid,
        **{name: getattr(config, name) for name in common if name not in played.plan.grid},
        "seconds": round(played.seconds, 1),
        "tuned": [each.sentence() for each in played.cells.tuned],
        "cells": [] if played.absent or played.failed else [_plain_cell(played, name) for name in _names(played)],
    }


def _names(played: Played) -> Iterator[CellName]:
    for setting in played.settings:
        for method in played.plan.methods:
            for reading in played.part.readings:
                name = CellName(played.part.name, setting, method, reading)
                if name in played.cells.values or name in played.theirs or (setting, method) in played.cells.diverged:
                    yield name


def _plain_cell(played: Played, name: CellName) -> dict[str, Any]:
    ours, theirs = played.cells.values.get(name), played.theirs.get(name)
    return {
        **({"setting": name.setting} if name.setting else {}),
        "method": name.method,
        "reading": name.reading,
        "mean": None if ours is None else _finite(ours.mean),
        "std": None if ours is None else _finite(ours.std),
        "paper": None if theirs is None else theirs.mean,
        "paper_std": None if theirs is None else theirs.std,
        **({"not_target": not_target(played.part, name)} if not_target(played.part, name) else {}),
        **({"diverged": True} if (name.setting, name.method) in played.cells.diverged else {}),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
