"""A recipe small enough to be written down, and numbers made by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from typing import Any

from coterie.studies.recipes.cells import CellName
from coterie.studies.recipes.checks import parse
from coterie.studies.recipes.outcomes import PartOutcome
from coterie.studies.recipes.plans import planned
from coterie.studies.recipes.readings import PartValues, Value
from coterie.studies.recipes.schema import Recipe

METHODS = ("ours", "theirs", "alone")

VALUES: dict[str, Any] = {
    "name": "small",
    "title": "A small one",
    "paper": "fedamp",
    "source": "Table 9",
    "unit": "percent",
    "about": "Three methods.\nOn little data.",
    "parts": [
        {
            "name": "one",
            "title": "First",
            "plan": {
                "methods": [
                    {"algorithm": "fedamp", "name": "ours"},
                    {"algorithm": "fedavg", "name": "theirs"},
                    {"algorithm": "local", "name": "alone"},
                ],
                "seeds": [1, 10],
                "data": "synthetic:clients=5,samples=14,features=6,classes=3",
                "partition": "natural",
                "clients": 5,
                "rounds": 4,
                "model": "linear",
                "local_epochs": 1,
                "threads": 1,
            },
            "quick": {"rounds": 2, "seeds": [1]},
            "readings": {"personal": {}, "global": {"model": "global"}},
            "numbers": {"rows": {"ours": ["91.5±0.5", None], "theirs": [80, 70], "alone": [60.25, None]}},
            "not_targets": [{"cells": ["theirs | global"], "why": "It is a made-up number."}],
        },
        {
            "name": "two",
            "plan": {
                "methods": [
                    {"algorithm": "fedamp", "name": "ours"},
                    {"algorithm": "fedavg", "name": "theirs"},
                    {"algorithm": "local", "name": "alone"},
                ],
                "grid": {"lr": [0.1, 0.2, 0.3]},
                "clients": 5,
            },
            "labels": {"lr": {0.1: "low", 0.2: "middle"}},
            "readings": {"accuracy": {}},
        },
    ],
    "criteria": [
        {
            "name": "first",
            "says": "Ours is above the others.",
            "parts": ["one"],
            "above": {"of": ["ours"], "than": ["*"]},
            "quick": True,
        }
    ],
}


def values(**changes: Any) -> dict[str, Any]:
    """The small recipe's values, with some of them changed at the top."""
    return {**copy.deepcopy(VALUES), **changes}


def recipe(*criteria: Mapping[str, Any], **changes: Any) -> Recipe:
    """The small recipe with other criteria."""
    named = [{"name": f"c{place}", "says": "So it is.", **each} for place, each in enumerate(criteria)]
    return parse(values(**changes, **({"criteria": named} if criteria else {})), "small")


def outcome_of(
    made: Recipe, part: str, numbers: Mapping[tuple[str, ...], float], diverged: Iterable[tuple[str, str]] = ()
) -> PartOutcome:
    """A part with numbers by ``(method, reading)`` or ``(method, reading, setting)``."""
    found = made.part(part)
    cells = {
        CellName(part, key[2] if len(key) > 2 else "", key[0], key[1]): Value(number, math.nan, 1)
        for key, number in numbers.items()
    }
    return PartOutcome(found, planned(found), PartValues(cells, frozenset(diverged)))
