"""The leaderboard's page and its record say the same, and the record was made by the protocol."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import numpy as np
import pytest

from coterie.studies.leaderboard import advice, one_method, page, record
from coterie.studies.leaderboard.protocol import load
from tests.documents import ROOT, TEXT, section

RECORD = ROOT / "results/leaderboard.json"
PAGE = "docs/leaderboard.md"
FOUND = record.read([RECORD], load())


@pytest.fixture(scope="module")
def values() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    return found


def test_the_page_is_what_the_record_gives() -> None:
    made = page.markdown(FOUND, "<!-- generated: leaderboard_picture -->")
    assert TEXT[PAGE].endswith(made), "write it anew: python docs/making/leaderboard_picture.py"


def test_the_page_on_choosing_says_what_the_record_gives() -> None:
    found = TEXT["docs/choose_a_method.md"].partition("<!-- table: leaderboard -->\n")[2]
    made = f"\n{advice.markdown(FOUND)}\n\n{page.in_short(FOUND)}\n\n<!-- table: end -->\n"
    assert found.startswith(made), "write it anew: python docs/making/leaderboard_picture.py"


def test_the_page_on_our_own_method_says_where_it_stands() -> None:
    path = ROOT / "results/own_method.json"
    found = record.read([RECORD, path], load())
    (method,) = {entry["method"] for entry in json.loads(path.read_text(encoding="utf-8"))["entries"]}
    made = f"{one_method.sentence(found, method)}\n\n{one_method.table(found, method).markdown()}"
    assert made in TEXT["docs/own_method.md"], "write it anew: python docs/making/leaderboard_picture.py"
    there = {name: placing for name, board in found.boards.items() if (placing := board.of(method)) is not None}
    beaten = [name for name, placing in there.items() if placing.beaten_by]
    rows = [row for row in section("docs/own_method.md", "On the leaderboard").splitlines() if row.startswith("| ")]
    assert [row.split(" | ")[0].strip("| ") for row in rows[2:] if " nobody " not in row] == beaten


def test_the_record_is_of_the_protocol_as_it_stands(values: dict[str, Any]) -> None:
    assert values["protocol"] == json.loads(json.dumps(load().model_dump(mode="json")))
    for entry in FOUND.entries:
        assert (entry.seeds, entry.rounds) == (load().seeds, load().same["rounds"]), entry.method
        assert entry.runs == load().runs(load().setting(entry.setting)), entry.method
        tune = load().contestant(entry.method).tune
        points = [dict(zip(tune, point, strict=True)) for point in itertools.product(*tune.values())]
        assert [tried for tried, _ in entry.tried] == points, entry.method


def test_means_and_counts_on_the_page_are_those_of_the_clients(values: dict[str, Any]) -> None:
    """Worked out of the record anew, without the program that writes the page."""
    text, rules = TEXT[PAGE], load()
    by_setting: dict[str, list[dict[str, Any]]] = {}
    for entry in values["entries"]:
        by_setting.setdefault(entry["setting"], []).append(entry)
    for name, entries in by_setting.items():
        setting = rules.settings[name]
        means = {}
        for entry in entries:
            if entry["chosen"] is not None:
                each = [np.mean(np.array(r) / np.array(t)) for r, t in zip(entry["right"], entry["tests"], strict=True)]
                means[entry["title"]] = float(np.mean(each))
        first = max(means, key=lambda title: means[title])
        under = section(PAGE, setting.place)
        assert f"- **{setting.partition}**: {first} is first with {100 * means[first]:.1f} %" in under
        assert all(f"{100 * mean:.1f} ±" in under for mean in means.values())
    for entry in values["entries"]:
        if entry["harm"] is not None:
            assert all(0 <= harmed <= len(t) for harmed, t in zip(entry["harm"]["harmed"], entry["tests"], strict=True))
    harmed = {
        entry["title"]: sum(
            sum(each["harm"]["harmed"]) for each in values["entries"] if each["method"] == entry["method"]
        )
        for entry in values["entries"]
        if entry["harm"] is not None
    }
    for title, count in harmed.items():
        assert re.search(rf"^\| {re.escape(title)} \|[^|]+\|[^|]+\|[^|]+\| {count} \(", text, re.M), title


def test_what_was_not_run_is_said() -> None:
    for setting in FOUND.not_run:
        assert re.search(rf"^- {re.escape(setting.place)}: .*{re.escape(setting.partition)}", TEXT[PAGE], re.M)


def test_the_site_has_a_picture_where_there_is_something_to_see() -> None:
    assert ("<!-- generated: leaderboard_picture -->" in TEXT[PAGE]) == bool(FOUND.boards)
    assert ("Nothing has been played yet" in TEXT[PAGE]) == (not FOUND.boards)
