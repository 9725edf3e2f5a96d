"""What people see at the end of a recipe."""

from __future__ import annotations

import io
import json
import math
from typing import Any

import pytest
from rich.console import Console

from coterie.studies.recipes import writers
from coterie.studies.recipes.cells import CellName, PaperNumber
from coterie.studies.recipes.outcomes import PartOutcome, RecipeOutcome, paper_numbers
from coterie.studies.recipes.plans import planned
from coterie.studies.recipes.readings import PartValues, Value
from coterie.studies.recipes.tables import DIVERGED, part_table, written
from coterie.studies.recipes.verdicts import judge
from coterie.tables import ABSENT, Cell, Table
from tests.studies.recipes.small_recipe import recipe, values

NAN = math.nan
ONE = {
    ("ours", "personal"): Value(92.0, 0.25, 2),
    ("theirs", "personal"): Value(81.5, NAN, 1),
    ("theirs", "global"): Value(71.25, 1.0, 2),
}


def played(cells: dict[tuple[str, ...], Value], part: str = "one", diverged: Any = (), **changes: Any) -> PartOutcome:
    made = recipe(**changes).part(part)
    named = {CellName(part, key[2] if len(key) > 2 else "", key[0], key[1]): value for key, value in cells.items()}
    return PartOutcome(made, planned(made), PartValues(named, frozenset(diverged)), seconds=1.5)


def outcome(*parts: PartOutcome, quick: bool = False, **changes: Any) -> RecipeOutcome:
    made = recipe(**changes)
    return RecipeOutcome(made, quick, parts, tuple(judge(made, parts, quick)))


def headings(table: Table) -> tuple[list[str], list[str]]:
    """The headings of the labels, and of the numbers."""
    found = [column.header for column in table.columns]
    return found[: table.labels], found[table.labels :]


def texts(table: Table) -> list[tuple[str, ...]]:
    cells = [[Cell(cell) if isinstance(cell, str) else cell for cell in row.cells] for row in table.rows]
    return [tuple(cell.text + cell.mark for cell in row) for row in cells]


def printed(found: RecipeOutcome, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(writers.terminal(found))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(len(line) <= width for line in text.splitlines()) and "…" not in text
    return str(text)


def test_several_readings_stand_below_the_papers() -> None:
    found = part_table(played(ONE, diverged=[("", "alone")]), "percent", quick=False)
    assert headings(found) == (["method", ""], ["personal", "global"])
    assert texts(found) == [
        ("ours", "ours", "92.00±0.25", ABSENT),
        ("", "paper", "91.50±0.50", ABSENT),
        ("", "diff", "+0.50", ABSENT),
        ("theirs", "ours", "81.50", "71.25±1.00"),
        ("", "paper", "80.00", "70.00†"),
        ("", "diff", "+1.50", "+1.25"),
        ("alone", "ours", DIVERGED, DIVERGED),
        ("", "paper", "60.25", ABSENT),
        ("", "diff", ABSENT, ABSENT),
    ]
    assert [row.muted for row in found.rows] == [False, True, True] * 3
    assert found.notes == ("† not a target: It is a made-up number.",)


def test_when_quick_there_are_no_differences() -> None:
    found = part_table(played(ONE), "percent", quick=True)
    assert {row.cells[1] for row in found.rows} == {"ours", "paper"}


def single(**more: Any) -> dict[str, Any]:
    parts = values()["parts"]
    parts[0] |= {"readings": {"personal": {}}, "not_targets": [], **more}
    return {"parts": parts}


def test_one_reading_stands_beside_the_papers() -> None:
    changes = single(numbers={"rows": {"ours": 91.5, "theirs": "80±1"}})
    cells = {key: value for key, value in ONE.items() if key[1] == "personal"}
    found = part_table(played(cells, **changes), "percent", quick=False)
    assert headings(found)[1] == ["ours", "paper", "difference"]
    # Without our number and the paper's there is no line for `alone`.
    assert texts(found) == [
        ("ours", "92.00±0.25", "91.50", "+0.50"),
        ("theirs", "81.50", "80.00±1.00", "+1.50"),
    ]
    alone = part_table(played(cells, **single(numbers={})), "percent", quick=False)
    assert headings(alone)[1] == ["ours"] and texts(alone)[0] == ("ours", "92.00±0.25")


def test_one_reading_over_a_grid_has_a_column_for_each_point() -> None:
    cells = {("ours", "accuracy", "low"): Value(90.0, NAN, 1), ("ours", "accuracy", "lr=0.3"): Value(60.0, NAN, 1)}
    found = part_table(played(cells, "two"), "percent", quick=False)
    assert headings(found)[1] == ["low", "middle", "lr=0.3"]
    assert texts(found) == [("ours", "90.00", ABSENT, "60.00")]


def test_several_readings_over_a_grid_have_a_line_for_each_point() -> None:
    parts = values()["parts"]
    parts[1] |= {"readings": {"a": {}, "b": {"metric": "loss"}}, "numbers": {"rows": {"ours | low": [91, 0.5]}}}
    cells = {("ours", "a", "low"): Value(90.0, NAN, 1), ("ours", "a", "middle"): Value(80.0, NAN, 1)}
    found = part_table(played(cells, "two", parts=parts), "percent", quick=False)
    assert headings(found) == (["lr", "method", ""], ["a", "b"])
    assert texts(found) == [
        ("low", "ours", "ours", "90.00", ABSENT),
        ("", "", "paper", "91.00", "0.5000"),
        ("", "", "diff", "-1.00", ABSENT),
        ("middle", "ours", "ours", "80.00", ABSENT),  # no number of the paper's, so no line for it
    ]


@pytest.mark.parametrize(
    ("number", "digits", "text"),
    [
        (Value(0.12345, 0.001, 2), 4, "0.1235±0.0010"),
        (Value(2.5e-6, NAN, 1), 4, "2.5e-06"),
        (Value(2.5e-6, 1e-7, 2), 4, "2.5e-06±1.0e-07"),
        (Value(3.2e37, 4.4e37, 2), 2, "3.2e+37±4.4e+37"),
        (Value(math.inf, NAN, 1), 2, "∞"),
        (Value(0.0, NAN, 1), 2, "0.00"),
        (Value(NAN, NAN, 1), 2, "NaN"),
        (PaperNumber(0.9494, 0.0129), 4, "0.9494±0.0129"),
    ],
)
def test_numbers_of_any_size(number: Value | PaperNumber, digits: int, text: str) -> None:
    assert written(number, digits) == text


@pytest.mark.parametrize("width", [80, 120])
def test_the_terminal(width: int) -> None:
    made = recipe().part("two")
    absent = PartOutcome(made, planned(made), absent="the data set 'emnist' is not there")
    text = printed(outcome(played(ONE), absent), width)
    words = " ".join(text.split())
    assert words.startswith("FedAMP, Table 9: A small one First synthetic:clients=5")
    assert "theirs ours 81.50 71.25±1.00 paper 80.00 70.00† diff +1.50 +1.25" in words
    assert "† not a target: It is a made-up number." in words
    assert "two digits, dirichlet:0.5, mlp, 5 clients" in words
    assert "passed over: the data set 'emnist' is not there" in words
    assert "Criteria: 1 holds ✓ Ours is above the others. First: holds by 10.5 (ours 92 against theirs 81.5)" in words


@pytest.mark.parametrize(("width", "tables"), [(80, 2), (160, 1)])
def test_a_wide_table_is_cut_between_columns_and_never_within_a_number(width: int, tables: int) -> None:
    parts = values()["parts"]
    names = [f"number {k}" for k in range(7)]
    parts[0] |= {"readings": {name: {} for name in names}, "numbers": {}, "not_targets": []}
    parts[0]["numbers"] = {"readings": names[:1], "rows": {"ours": "81.25±1.25"}}
    cells = {("ours", name): Value(90 + k, 0.25, 2) for k, name in enumerate(names)}
    text = printed(outcome(played(cells, parts=parts), parts=parts), width)
    assert all(f"{90 + k}.00±0.25" in text for k in range(7))
    assert len([line for line in text.splitlines() if line.strip().startswith("method")]) == tables
    assert (
        text.partition("By these numbers")[0].count("paper") == 1
    )  # where the paper has no number, there is no line for it


def test_a_criterion_that_fails_says_by_how_much() -> None:
    worse = {**ONE, ("ours", "personal"): Value(80.0, NAN, 1)}
    assert "✗ Ours is above the others. fails by 1.5 (ours 80 against theirs 81.5)" in " ".join(
        printed(outcome(played(worse))).split()
    )
    nothing = " ".join(printed(outcome(played({}))).split())
    assert "Criteria: 1 could not be judged ?" in nothing
    assert "not judged: there is no number for ours | personal" in nothing


def test_the_quick_version_says_so() -> None:
    text = " ".join(printed(outcome(played(ONE), quick=True)).split())
    assert "the quick version, a small stand-in on other data" in text and "in its place: synthetic" in text
    left = recipe({"parts": ["one"], "above": {"of": ["ours"], "than": ["*"]}})
    found = RecipeOutcome(left, True, (played(ONE),), tuple(judge(left, [], quick=True)))
    assert "Criteria: 1 is for the whole version" in " ".join(printed(found).split())


def test_markdown_is_a_table_that_others_can_read() -> None:
    parts = values()["parts"]
    parts[0]["title"] = "A|B *c* _d_"
    text = writers.markdown(outcome(played(ONE, parts=parts), parts=parts))
    assert text.startswith("# FedAMP, Table 9: A small one\n\nThree methods.\n\nOn little data.\n")
    assert "## A\\|B \\*c\\* \\_d\\_" in text
    lines = [line for line in text.splitlines() if line.startswith("|")]
    assert lines[:3] == [
        "| method |  | personal | global |",
        "| --- | --- | ---: | ---: |",
        "| ours | ours | 92.00±0.25 | – |",
    ]
    assert {line.count("|") for line in lines} == {5}
    assert "- ✓ **holds**: Ours is above the others.\n  - holds by 10.5 (ours 92 against theirs 81.5)" in text


def test_json_holds_everything_and_no_nan() -> None:
    cells = {**ONE, ("ours", "global"): Value(math.inf, NAN, 2)}
    made = writers.plain(outcome(played(cells, diverged=[("", "alone")])))
    found = json.loads(json.dumps(made, allow_nan=False))
    assert (found["recipe"], found["paper"], found["quick"]) == ("small", "fedamp", False)
    part = found["parts"][0]
    assert (part["seeds"], part["rounds"], part["seconds"]) == ([1, 10], 4, 1.5)
    by_name = {(cell["method"], cell["reading"]): cell for cell in part["cells"]}
    assert by_name["theirs", "global"] == {
        "method": "theirs",
        "reading": "global",
        "mean": 71.25,
        "std": 1.0,
        "paper": 70.0,
        "paper_std": None,
        "not_target": "It is a made-up number.",
    }
    assert by_name["ours", "personal"]["paper_std"] == 0.5 and by_name["ours", "global"]["mean"] is None
    assert by_name["alone", "personal"]["diverged"] is True
    (criterion,) = found["criteria"]
    assert criterion["status"] == "open"  # for want of one of the others
    (said,) = criterion["findings"]
    assert (said["part"], said["setting"], said["holds"], said["margin"]) == ("one", "", None, None)
    assert said["evidence"].startswith("alone diverged; without, it would hold by 10.5")


def test_the_papers_numbers_by_cell() -> None:
    assert paper_numbers(recipe().part("one")) == {
        CellName("one", "", "ours", "personal"): PaperNumber(91.5, 0.5),
        CellName("one", "", "theirs", "personal"): PaperNumber(80.0),
        CellName("one", "", "theirs", "global"): PaperNumber(70.0),
        CellName("one", "", "alone", "personal"): PaperNumber(60.25),
    }
