"""The pages on reproduction say what the stored results say, and no more."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

import pytest

from coterie.studies import recipes
from coterie.studies.recipes import ledger
from tests.documents import REPRODUCTION, ROOT, TEXT
from tests.programs import load_program

RESULTS = ROOT / "results/recipes"
ANSWERS = ("holds", "does not hold", "undecided")
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]\d+)?")


def table(name: str) -> tuple[list[str], list[list[str]]]:
    """The columns and rows of a table that a comment names."""
    match = re.search(rf"^<!-- table: {name} -->\n((?:\|.*\n)+)", TEXT[REPRODUCTION], re.M)
    assert match, name
    lines = [[word.strip() for word in line.strip("|").split("|")] for line in match[1].splitlines()]
    return lines[0], lines[2:]


def test_the_claims_that_hold_are_counted_right() -> None:
    """The table by hand against the ledger, counted again here."""
    _, rows = table("verdicts")
    titles = {"fedacs": "FedACS", "fedamp": "FedAMP", "fedpg": "FedPG", "flame": "FLAME", "all": "all"}
    kinds = ("claims", "claims on one data set", "cases")
    assert [tuple(row[:2]) for row in rows] == [(title, kind) for title in titles.values() for kind in kinds]
    counts: Counter[tuple[str, str, str]] = Counter()
    for claim in ledger.plain(ledger.open_ledger(RESULTS)):
        found = ([claim["verdict"]], claim["on_one_data_set"].values(), [each["verdict"] for each in claim["places"]])
        for paper in (claim["paper"], "all"):
            for kind, answers in zip(kinds, found, strict=True):
                counts.update((titles[paper], kind, answer) for answer in answers)
    for title, kind, *shown in rows:
        expected = [counts[title, kind, answer] for answer in ANSWERS]
        assert [int(word.replace(",", "")) for word in shown] == [sum(expected), *expected], (title, kind)


def test_nothing_is_judged_by_hand() -> None:
    """Numbers of runs and words of judgement stand on the pages that are made from the results alone."""
    section = TEXT[REPRODUCTION].partition("## The papers' tables")[2]
    assert len(re.findall(r"^\|[-| :]+\|$", section, re.M)) == 1, "one table, which is counted above"
    assert not re.search(r"\b0?\.\d{3}\b|\d\d\.\d %?", section), "a number of a run"
    assert not re.search(r"\*(?:Holds|Does not hold|Undecided)\*", section), "a verdict"


@pytest.fixture(scope="module")
def measured() -> str:
    page: str = load_program(ROOT / "docs/making/measured.py", "measured_page").measured(RESULTS)
    return page


def best(parts: list[dict[str, Any]]) -> dict[str, Any]:
    return max(parts, key=lambda part: (part["rounds"], len(part["seeds"])))


def test_the_measured_page_has_every_number_of_the_results(measured: str) -> None:
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    ran: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for each in files:
        for part in each["parts"]:
            if part["cells"] and not each["quick"]:
                ran.setdefault((each["recipe"], part["title"]), []).append(part)
    sections = dict(re.findall(r"^### [^\n]*\{ #([\w-]+) \}\n(.*?)(?=^### |\Z)", measured, re.M | re.S))
    assert set(sections) == {recipe for recipe, _ in ran}
    looked = 0
    for (name, title), parts in ran.items():
        part, recipe = best(parts), recipes.load(name)
        (now,) = [each for each in recipe.parts if each.heading == title]
        block = re.search(rf"^\*\*{re.escape(title)}\*\*, (.*?)(?=^\*\*|^- \*|\Z)", sections[name], re.M | re.S)
        assert block, (name, title)
        assert f"{part['rounds']:,}" in block[1].partition("\n")[0] and f"{len(part['seeds'])}" in block[1]
        step = 0.005 if recipe.unit == "percent" else 0.00005
        methods = recipes.planned(now).methods
        for cell in part["cells"]:
            if cell["mean"] is None or cell["reading"] not in now.readings or cell["method"] not in methods:
                continue
            rows = [line for line in block[1].splitlines() if f"| {cell['method']} |" in line]
            shown = [float(word) for row in rows for word in NUMBER.findall(row)]
            mean = cell["mean"]
            slack = step if abs(mean) >= step else 0.05 * abs(mean)  # what rounds to nothing is a power of ten
            assert min(abs(number - mean) for number in shown) <= slack * 1.001, (name, cell)
            looked += 1
    assert looked > 100
