"""The page on reproduction says what the stored results say, and no more."""

from __future__ import annotations

import json
import re
from functools import cache
from typing import Any

import pytest

from tests.documents import REPRODUCTION, ROOT, TEXT

NAMES = {"MNIST": "mnist", "Fashion-MNIST": "fmnist"}
CLASSES = {"Dirichlet(0.5)": "Dir(0.5)"} | {
    f"{word} classes": f"#label={count}" for count, word in enumerate(("two", "three", "four", "five", "six"), 2)
}
FLAME_COLUMNS = (("FLAME", "PM"), ("FLAME", "GM"), ("FLAME", "HM"), ("pFedMe", "PM"), ("pFedMe", "GM"), ("Ditto", "PM"))


@cache
def stored(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / f"results/recipes/{name}.json").read_text(encoding="utf-8"))
    return found


def cell(name: str, part: str, method: str, reading: str, setting: str = "") -> dict[str, Any] | None:
    (cells,) = [each["cells"] for each in stored(name)["parts"] if each["name"] == part]
    key = (method, reading, setting)
    found = [each for each in cells if (each["method"], each["reading"], each.get("setting", "")) == key]
    return found[0] if found else None


def table(name: str) -> tuple[list[str], list[list[str]]]:
    """The columns and rows of a table that a comment names."""
    match = re.search(rf"^<!-- table: {name} -->\n((?:\|.*\n)+)", TEXT[REPRODUCTION], re.M)
    assert match, name
    lines = [[word.strip() for word in line.strip("|").split("|")] for line in match[1].splitlines()]
    return lines[0], lines[2:]


def check(text: str, found: dict[str, Any] | None, step: float) -> None:
    """Hold ``ours (theirs)`` to a stored cell, each rounded to ``step``."""
    if found is None:
        assert text == ""
        return
    match = re.fullmatch(r"(?P<ours>[\d.]+|diverged)(?: \((?P<theirs>[\d.]+)\))?", text)
    assert match, text
    for word, value in (("ours", found["mean"]), ("theirs", found.get("paper"))):
        if match[word] == "diverged" or match[word] is None:
            assert value is None, (text, found)
        else:
            assert float(match[word]) == pytest.approx(value, abs=step / 2 + 1e-9), (text, found)


def test_flame_table_3() -> None:
    _, rows = table("flame-table3")
    assert len(rows) == 2 * (3 + 6)
    for title, *numbers in rows:
        data, skew, *classes = title.split(", ")
        setting = CLASSES[classes[0]] if classes else ""
        for text, (method, reading) in zip(numbers, FLAME_COLUMNS, strict=True):
            found = cell(f"flame-table3-{skew.removesuffix(' skew')}", NAMES[data], method, reading, setting)
            assert found is not None
            check(text, found, 0.001)


def test_fedpg_table_1() -> None:
    (_, *methods), rows = table("fedpg-table1")
    assert [row[0] for row in rows] == ["L", "G", "GM"]
    for reading, *numbers in rows:
        for method, text in zip(methods, numbers, strict=True):
            check(text, cell("fedpg-table1", "fmnist", method, reading), 0.001)


def test_fedpg_table_2() -> None:
    methods, (row,) = table("fedpg-table2")
    for method, text in zip(methods, row, strict=True):
        check(text, cell("fedpg-table2", "fmnist", method.split(",")[0], "GM"), 0.001)


def test_fedacs_table_2() -> None:
    (_, *alphas), rows = table("fedacs-table2")
    for method, *numbers in rows:
        for alpha, text in zip(alphas, numbers, strict=True):
            check(text, cell("fedacs-table2", "fmnist", method, "accuracy", f"α = {alpha}"), 0.1)


def test_fedamps_tables() -> None:
    (_, *methods), rows = table("fedamp")
    runs = (("fedamp-table2", "fmnist"), ("fedamp-table3", "fmnist"), ("fedamp-table3-mlp", "fmnist-mlp"))
    for (name, part), (_, *numbers) in zip(runs, rows, strict=True):
        for method, text in zip(methods, numbers, strict=True):
            check(text, cell(name, part, method, "BMTA"), 0.1)


def flame_rows(skew: str) -> list[dict[str, float]]:
    """FLAME's readings in each part and setting, in points."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for part in stored(f"flame-table3-{skew}")["parts"]:
        for each in part["cells"]:
            row = found.setdefault((part["name"], each.get("setting", "")), {})
            row[f"{each['method']} {each['reading']}"] = 100 * each["mean"]
            row[f"paper {each['method']} {each['reading']}"] = 100 * (each.get("paper") or float("nan"))
    return list(found.values())


def test_what_the_sentences_about_flame_say() -> None:
    def off(skew: str, reading: str) -> float:
        return max(abs(row[f"FLAME {reading}"] - row[f"paper FLAME {reading}"]) for row in flame_rows(skew))

    for skew, points in (("hybrid", 0.7), ("quantity", 2.7), ("quality", 0.9), ("label", 2.5)):
        assert points - 0.1 < off(skew, "PM") <= points
    assert off("label", "GM") == pytest.approx(7.1, abs=0.05)
    label = flame_rows("label")
    gains = [row["FLAME HM"] - max(row["FLAME PM"], row["FLAME GM"]) for row in label]
    assert len(label) == 12 and sum(gain > 1e-9 for gain in gains) == 2
    assert all(row["FLAME PM"] > row["FLAME GM"] for row in label)
    ahead = [row["pFedMe PM"] - row["FLAME PM"] for skew in ("hybrid", "quality", "label") for row in flame_rows(skew)]
    assert sum(each <= 0 for each in ahead) == 1 and max(ahead) < 2.3
    assert all(5.9 < row["pFedMe PM"] - row["FLAME PM"] < 6.3 for row in flame_rows("quantity"))


def test_only_whole_runs_decide() -> None:
    """*Holds* is said of no recipe whose stored runs have fewer rounds or seeds than the recipe."""
    from coterie.studies import recipes

    section = TEXT[REPRODUCTION].partition("## The papers' tables")[2]
    verdicts = re.findall(r"\*(Holds|Does not hold)\*, under (\w+) skew", section)
    assert len(verdicts) == len(re.findall(r"^(?:- )?\*(?:Holds|Does not hold)\*", section, re.M)) > 0
    for _, skew in verdicts:
        name = f"flame-table3-{skew}"
        for part in stored(name)["parts"]:
            plan = recipes.load(name).part(part["name"]).plan
            assert part["rounds"] >= plan["rounds"] and part["seeds"] == plan["seeds"]
