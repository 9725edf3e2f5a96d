"""One schema of what silos told: columns and categories united, statistics put together, disagreements named.

Exact statistics are put together by the pooled formula of :mod:`coterie.data.statistics`, in the order of the roster:
they are those that a simulation of the same silos takes, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from coterie.data.bounded_statistics import BoundedColumns
from coterie.data.dataset import Preparation
from coterie.data.statistics import Constants, Moments, constants_of
from coterie.data.table_schema import MOST_TEXTS, ColumnSchema, TableSchema, features_of, preparation_of
from coterie.errors import ConfigError
from coterie.federation.agreement import Origin, Schema
from coterie.federation.statement import Statement
from coterie.runs.storage.atomic_files import write_text


class Disagreement(Exception):
    """Silos do not tell the same; ``sentences`` say where."""

    def __init__(self, sentences: Sequence[str]) -> None:
        super().__init__("; ".join(sentences))
        self.sentences = list(sentences)


def unite(tables: Mapping[str, Mapping[str, ColumnSchema]]) -> TableSchema:
    """Unite what silos' columns are; where they cannot be, :class:`Disagreement` says why."""
    problems: list[str] = []
    columns: dict[str, ColumnSchema] = {}
    for name in dict.fromkeys(name for table in tables.values() for name in table):
        there = {who: table[name] for who, table in tables.items() if name in table}
        absent = [who for who in tables if who not in there]
        if absent:
            problems.append(
                f"column {name!r} is at {_listed(there)}, but not at {_listed(absent)}: give drop={name} where it is, "
                "or add it where it is not"
            )
            continue
        found = _united(name, there, problems)
        if found is not None:
            columns[name] = found
    if problems:
        raise Disagreement(problems)
    return TableSchema(columns=columns)


def _united(name: str, there: Mapping[str, ColumnSchema], problems: list[str]) -> ColumnSchema | None:
    before = len(problems)
    kinds = _by({who: f"a {column.kind}" for who, column in there.items()})
    if len(kinds) > 1:
        problems.append(f"column {name!r} is {_told(kinds)}: write down what it is in a file for columns=")
        return None
    gaps = _by({who: column.gaps for who, column in there.items() if column.gaps != "none"})
    indicators = _by({who: str(column.indicator).lower() for who, column in there.items() if column.gaps != "none"})
    bounds = _by({who: str(list(column.bounds)) for who, column in there.items() if column.bounds is not None})
    for what, found in (("gaps are filled with", gaps), ("indicator is", indicators), ("bounds are", bounds)):
        if len(found) > 1:
            problems.append(f"of column {name!r} {what} {_told(found)}")
    first = next(iter(there.values()))
    categories = sorted({text for column in there.values() for text in column.categories})
    if len(categories) > MOST_TEXTS:
        problems.append(
            f"column {name!r} has {len(categories)} different texts together, more than {MOST_TEXTS}: give drop={name}"
        )
    if len(problems) > before:
        return None
    holder = next((column for column in there.values() if column.gaps != "none"), first)
    bounded = next((column.bounds for column in there.values() if column.bounds is not None), None)
    return ColumnSchema(
        kind=first.kind,
        gaps=holder.gaps,
        indicator=holder.indicator,
        categories=tuple(categories),
        bounds=bounded,
    )


def agree(told: Sequence[Statement]) -> Schema:
    """Make one schema of what silos told; :class:`Disagreement` says all that stands against it."""
    told = sorted(told, key=lambda each: each.place)
    problems = _differences(told)
    united: TableSchema | None = None
    if any(each.table for each in told):
        try:
            united = unite({each.member: each.table for each in told})
        except Disagreement as error:
            problems += error.sentences
    classes, more = _classes(told)
    problems += more
    if problems:
        raise Disagreement(problems)
    names, preparation = _prepared(told, united)
    values = Constants((0.0,), (1.0,), ()) if preparation is None else _constants(told, names, preparation)
    first = told[0]
    origin = Origin(
        members=tuple(each.member for each in told),
        seed=first.seed,
        validation=first.validation,
        test_fraction=first.test_fraction,
    )
    return Schema(
        task=first.task,
        input_shape=(len(names),) if united is not None else first.input_shape,
        words=first.words,
        classes=classes,
        columns=names if united is not None else (),
        mean=values.mean,
        std=values.std,
        fill=values.fill,
        table=united.columns if united is not None else {},
        told=origin,
    )


def write_schema(schema: Schema, path: Path) -> None:
    """Write a schema as ``data`` of ``federation.yaml`` may name it; every number can be read back to the last bit."""
    plain = schema.model_dump(mode="json", exclude_defaults=True)
    if "table" in plain:
        plain["table"] = {
            name: column.model_dump(mode="json", exclude_defaults=True) for name, column in schema.table.items()
        }
    text = yaml.safe_dump({"task": schema.task, **plain}, sort_keys=False, allow_unicode=True, width=120)
    write_text(path, "# What a sample is, as the members told: in federation.yaml, `data: FILE` takes it.\n" + text)


def _differences(told: Sequence[Statement]) -> list[str]:
    problems = []
    for place, each in enumerate(told):
        if each.place != place:
            problems.append(
                f"statements are of the members {', '.join(f'{one.place} ({one.member})' for one in told)} of the "
                "roster, but there must be one of each, from 0 on"
            )
            break
    for what, values in (
        ("the task is", {each.member: each.task for each in told}),
        ("the label is", {each.member: repr(each.label) for each in told}),
        ("the seed is", {each.member: str(each.seed) for each in told}),
        ("validation is", {each.member: str(each.validation) for each in told}),
        ("test_fraction is", {each.member: str(each.test_fraction) for each in told}),
        ("data are", {each.member: "a table" if each.table else "no table" for each in told}),
        ("inputs are", {each.member: "scaled" if each.scale else "not scaled" for each in told}),
        ("inputs are", {each.member: "words" if each.words else "no words" for each in told}),
        ("noise is", {each.member: _noise(each) for each in told}),
        (
            "a sample has shape",
            {} if told[0].table else {each.member: str(list(each.input_shape)) for each in told},
        ),
    ):
        found = _by(values)
        if len(found) > 1:
            problems.append(f"{what} {_told(found)}")
    if told[0].privacy is not None and any(each.table != told[0].table for each in told):
        problems.append("under privacy all must have the same file of columns=, which their samples decide nothing of")
    return problems


def _classes(told: Sequence[Statement]) -> tuple[tuple[str, ...], list[str]]:
    """Unite class names in the order in which one file with all samples would have them."""
    task, names = told[0].task, {name for each in told for name in each.classes}
    if task == "regression":
        return (), []
    numbers = _by({each.member: "numbers" if all(map(_is_whole, each.classes)) else "texts" for each in told})
    if len(numbers) > 1:
        return (), [f"class names are {_told(numbers)}: make them the same"]
    if task == "binary" and len(names) != 2:
        return (), [f"a binary task has 2 classes, but together there are {', '.join(sorted(names))}"]
    return tuple(sorted(names, key=int) if "numbers" in numbers else sorted(names)), []


def _prepared(told: Sequence[Statement], united: TableSchema | None) -> tuple[tuple[str, ...], Preparation | None]:
    """Name the entries of axis 1 of the inputs, and say what is to be done to them."""
    if united is not None:
        features = features_of(united)
        return tuple(each.name for each in features), preparation_of(features, told[0].scale)
    channels = told[0].input_shape[0]
    names = tuple(str(place) for place in range(channels))
    return names, Preparation((True,) * channels) if told[0].scale else None


def _constants(told: Sequence[Statement], names: tuple[str, ...], preparation: Preparation) -> Constants:
    if told[0].privacy is not None:
        columns = BoundedColumns(preparation, names, is_bytes=not told[0].table)
        parts = [columns.together({place: _noisy(each, names[place]) for place in columns.places}) for each in told]
        return constants_of(preparation, *columns.moments(torch.stack(parts).mean(0), len(told)))
    total, rows = Moments(*torch.zeros(3, len(names), dtype=torch.float64).unbind()), 0
    for each in told:
        sums = [each.exact.get(name) for name in names]
        mine = [[0.0 if one is None else getattr(one, part) for one in sums] for part in ("count", "mean", "squares")]
        total, rows = total + Moments(*torch.tensor(mine, dtype=torch.float64).unbind()), rows + (each.rows or 0)
    gaps = preparation.gaps or ("",) * len(names)
    for place, name in enumerate(names):
        lacking = [each.member for each in told if name not in each.exact]
        if lacking and (preparation.scaled[place] or gaps[place] == "mean"):
            raise ConfigError(f"the statement of {lacking[0]} has no statistics of {name!r}: write it again")
    return constants_of(preparation, total, rows)


def _noisy(each: Statement, name: str) -> dict[str, float | None]:
    found = each.noisy.get(name)
    if found is None:
        raise ConfigError(f"the statement of {each.member} has no statistics of {name!r}: write it again")
    return found.model_dump()


def _noise(each: Statement) -> str:
    return "none" if each.privacy is None else f"clip={each.privacy.clip:g},noise={each.privacy.noise:g}"


def _is_whole(name: str) -> bool:
    return name.removeprefix("-").isdigit()


def _by(values: Mapping[str, Any]) -> dict[Any, list[str]]:
    """Sort members by what they say."""
    found: dict[Any, list[str]] = {}
    for who, value in values.items():
        found.setdefault(value, []).append(who)
    return found


def _told(found: Mapping[Any, Iterable[str]]) -> str:
    return ", but ".join(f"{value} at {_listed(who)}" for value, who in found.items())


def _listed(members: Iterable[str]) -> str:
    return ", ".join(members)
