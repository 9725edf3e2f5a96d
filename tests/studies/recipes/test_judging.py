"""The vocabulary of criteria, on numbers made by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from coterie.studies.recipes.outcomes import Finding, PartOutcome, Verdict
from coterie.studies.recipes.plans import planned
from coterie.studies.recipes.verdicts import judge
from tests.studies.recipes.small_recipe import outcome_of, recipe, values

ONE = {("ours", "personal"): 90.0, ("theirs", "personal"): 80.0, ("alone", "personal"): 60.0}
ONE |= {("theirs", "global"): 70.0}


def verdict(criterion: Mapping[str, Any], numbers: Mapping[tuple[str, ...], float] = ONE, **more: Any) -> Verdict:
    made = recipe({"parts": ["one"], **criterion})
    return judge(made, [outcome_of(made, "one", numbers, **more)])[0]


def finding(criterion: Mapping[str, Any], numbers: Mapping[tuple[str, ...], float] = ONE, **more: Any) -> Finding:
    (found,) = verdict(criterion, numbers, **more).findings
    return found


@pytest.mark.parametrize(
    ("criterion", "margin", "holds"),
    [
        # above: the least of these must exceed the most of those
        ({"above": {"of": ["ours"], "than": ["theirs"]}}, 10, True),
        ({"above": {"of": ["ours", "theirs"], "than": ["alone", "theirs | global"]}}, 10, True),
        ({"above": {"of": ["ours", "alone"], "than": ["theirs"]}}, -20, False),
        ({"above": {"of": ["ours"], "than": ["ours"]}}, 0, False),
        ({"above": {"of": ["ours"], "than": ["theirs"], "by": 10}}, 0, False),
        ({"above": {"of": ["ours"], "than": ["theirs"], "by": 9.5}}, 0.5, True),
        # at least: a tie is enough, and slack may be used up
        ({"at_least": {"of": ["ours"], "than": ["ours"]}}, 0, True),
        ({"at_least": {"of": ["theirs"], "than": ["ours"]}}, -10, False),
        ({"at_least": {"of": ["theirs"], "than": ["ours"], "slack": 10}}, 0, True),
        ({"at_least": {"of": ["theirs"], "than": ["ours"], "slack": 9}}, -1, False),
        # close: the span
        ({"close": {"of": ["ours", "theirs", "alone"], "within": 30}}, 0, True),
        ({"close": {"of": ["ours", "theirs", "alone"], "within": 29}}, -1, False),
        ({"close": {"of": ["ours"], "within": 0}}, 0, True),
        # between: both limits included
        ({"between": {"of": ["ours", "theirs"], "low": 80}}, 0, True),
        ({"between": {"of": ["ours", "theirs"], "high": 85}}, -5, False),
        ({"between": {"of": ["theirs"], "low": 70, "high": 85}}, 5, True),
        # monotone: steps may go against the direction by the slack, but not the whole
        ({"monotone": {"of": ["alone", "theirs", "ours"], "direction": "up"}}, 10, True),
        ({"monotone": {"of": ["ours", "theirs", "alone"], "direction": "down"}}, 10, True),
        ({"monotone": {"of": ["alone", "ours", "theirs"], "direction": "up"}}, -10, False),
        ({"monotone": {"of": ["alone", "ours", "theirs"], "direction": "up", "slack": 10}}, 0, True),
        ({"monotone": {"of": ["alone", "ours", "alone"], "direction": "up", "slack": 50}}, 0, False),
        ({"monotone": {"of": ["ours", "ours"], "direction": "down"}}, 0, False),
        # near: the paper has 91.5, 80 and 60.25
        ({"near": {"of": ["ours", "theirs"], "within": 2}}, 0.5, True),
        ({"near": {"of": ["*"], "within": 1}}, -0.5, False),
        # differences and ratios
        ({"above": {"of": ["ours minus theirs"], "than": ["alone minus ours"]}}, 40, True),
        ({"between": {"of": ["alone over ours"], "high": 0.5}}, 0.5 - 60 / 90, False),
        ({"above": {"of": ["ours minus alone"], "than": ["* minus alone"]}}, 10, True),
    ],
)
def test_the_vocabulary(criterion: Mapping[str, Any], margin: float, holds: bool) -> None:
    found = finding(criterion)
    assert found.margin == pytest.approx(margin) and found.holds is holds
    assert verdict(criterion).status == ("holds" if holds else "fails")


@pytest.mark.parametrize(
    ("criterion", "evidence"),
    [
        ({"above": {"of": ["ours", "theirs"], "than": ["*"]}}, "theirs 80 against alone 60"),
        ({"close": {"of": ["ours", "alone"], "within": 1}}, "from alone 60 to ours 90"),
        ({"between": {"of": ["ours", "theirs"], "low": 1, "high": 99}}, "ours 90"),
        ({"monotone": {"of": ["alone", "theirs | global"], "direction": "up"}}, "60, 70"),
        ({"near": {"of": ["ours"], "within": 1}}, "ours 90, the paper's 91.5"),
    ],
)
def test_the_numbers_that_decide_are_told(criterion: Mapping[str, Any], evidence: str) -> None:
    assert finding(criterion).evidence == evidence


@pytest.mark.parametrize(
    ("criterion", "numbers", "reason"),
    [
        ({"above": {"of": ["ours"], "than": ["alone"]}}, {}, "there is no number for ours | personal"),
        (
            {"above": {"of": ["ours"], "than": ["alone"]}},
            {**ONE, ("ours", "personal"): math.nan},
            "ours | personal is not a number",
        ),
        ({"close": {"of": ["ours | global"], "within": 1}}, ONE, "there is no number for ours | global"),
        ({"near": {"of": ["theirs | global", "ours"], "within": 1}}, {("theirs", "global"): 1}, "there is no number"),
        (
            {"between": {"of": ["ours over theirs"], "high": 1}},
            {**ONE, ("theirs", "personal"): 0.0},
            "a ratio has a zero below its line",
        ),
        ({"above": {"of": ["ours", "theirs", "alone"], "than": ["*"]}}, ONE, "no method is left for *"),
    ],
)
def test_without_a_number_it_stays_open(
    criterion: Mapping[str, Any], numbers: Mapping[tuple[str, ...], float], reason: str
) -> None:
    found = finding(criterion, numbers)
    assert (found.margin, found.holds) == (None, None) and reason in found.evidence
    assert verdict(criterion, numbers).status == "open"


def test_the_paper_may_have_no_number() -> None:
    found = finding({"near": {"of": ["ours | global"], "within": 1}}, {("ours", "global"): 1.0})
    assert found.holds is None and found.evidence == "the paper has no number for ours | global"


def test_others_are_those_that_are_not_named_and_have_a_number() -> None:
    criterion: dict[str, Any] = {"above": {"of": ["ours"], "than": ["*"]}}
    assert finding(criterion).margin == 10
    assert finding({**criterion, "leave_out": ["theirs"]}).margin == 30
    # Only `theirs` has a global model.
    assert finding({"above": {"of": ["ours"], "than": ["* | global"]}}).margin == 20
    # One that diverged is missed, though.
    numbers = {key: number for key, number in ONE.items() if key[0] != "alone"}
    assert finding(criterion, numbers).holds is True
    missed = finding(criterion, numbers, diverged=[("", "alone")])
    assert (missed.holds, missed.margin) == (None, None)
    assert missed.evidence == "alone diverged; without, it would hold by 10 (ours 90 against theirs 80)"


def test_what_fails_for_the_rest_fails_whatever_one_that_diverged_would_have_given() -> None:
    numbers = {key: number for key, number in ONE.items() if key[0] != "alone"}
    criterion: dict[str, Any] = {"above": {"of": ["ours"], "than": ["*"], "by": 15}}
    found = finding(criterion, numbers, diverged=[("", "alone")])
    assert (found.holds, found.margin) == (False, -5)
    assert found.evidence == "ours 90 against theirs 80; alone diverged"
    # Where nobody else is left, or the one that diverged is named, there is nothing to say.
    for criterion in (
        {"above": {"of": ["ours"], "than": ["*"], "by": 15}, "leave_out": ["theirs"]},
        {"above": {"of": ["ours"], "than": ["alone"]}},
    ):
        found = finding(criterion, numbers, diverged=[("", "alone")])
        assert (found.holds, found.evidence) == (None, "alone diverged")


GRID = {
    (method, "accuracy", label): value
    for label, values in {"low": (90, 80, 70), "middle": (85, 84, 83), "lr=0.3": (60, 66, 50)}.items()
    for method, value in zip(("ours", "theirs", "alone"), values, strict=True)
}


def over_grid(criterion: Mapping[str, Any], numbers: Mapping[tuple[str, ...], float] = GRID) -> Verdict:
    made = recipe({"parts": ["two"], **criterion})
    return judge(made, [outcome_of(made, "two", numbers)])[0]


def test_every_setting_is_judged_by_itself() -> None:
    found = over_grid({"above": {"of": ["ours"], "than": ["theirs"]}})
    assert [(each.setting, each.margin, each.holds) for each in found.findings] == [
        ("low", 10, True),
        ("middle", 1, True),
        ("lr=0.3", -6, False),
    ]
    assert found.status == "fails"
    some = over_grid({"settings": ["low", "middle"], "above": {"of": ["ours"], "than": ["theirs"]}})
    assert [each.setting for each in some.findings] == ["low", "middle"] and some.status == "holds"


def test_cells_that_name_their_settings_are_judged_once() -> None:
    falls = {"of": ["ours | accuracy | low", "ours | accuracy | middle", "ours | accuracy | lr=0.3"]}
    found = over_grid({"monotone": {**falls, "direction": "down"}})
    assert [(each.setting, each.margin) for each in found.findings] == [("", 5)]
    drop = "| accuracy | low minus {} | accuracy | lr=0.3"
    steeper = {"of": ["ours " + drop.format("ours")], "than": ["theirs " + drop.format("theirs")]}
    assert over_grid({"above": steeper}).findings[0].margin == (90 - 60) - (80 - 66)


def test_means_are_judged_once() -> None:
    found = over_grid({"take": "mean", "above": {"of": ["ours"], "than": ["theirs"]}})
    (only,) = found.findings
    assert only.margin == pytest.approx((90 + 85 + 60) / 3 - (80 + 84 + 66) / 3) and only.holds
    assert only.evidence == "ours 78.33 against theirs 76.67, means over 3 of 3"
    numbers = {key: value for key, value in GRID.items() if key != ("ours", "accuracy", "low")}
    (partly,) = over_grid({"take": "mean", "above": {"of": ["ours"], "than": ["theirs"]}}, numbers).findings
    assert partly.margin == pytest.approx((85 + 60) / 2 - (84 + 66) / 2) and "means over 2 of 3" in partly.evidence
    (none,) = over_grid({"take": "mean", "above": {"of": ["ours"], "than": ["theirs"]}}, {}).findings
    assert none.holds is None and "there is no number for ours" in none.evidence


def test_means_of_ratios_are_not_ratios_of_means() -> None:
    (found,) = over_grid({"take": "mean", "between": {"of": ["ours over theirs"], "high": 1}}).findings
    assert found.margin == pytest.approx(1 - (90 / 80 + 85 / 84 + 60 / 66) / 3)


def test_parts_together() -> None:
    made = recipe({"above": {"of": ["ours"], "than": ["theirs"]}})
    one, two = outcome_of(made, "one", ONE), outcome_of(made, "two", {})

    def absent(name: str) -> PartOutcome:
        part = made.part(name)
        return PartOutcome(part, planned(part), absent="the data set is not there")

    assert judge(made, [one, two])[0].status == "holds"  # wherever it could be judged
    found = judge(made, [one, absent("two")])[0]
    assert found.status == "holds" and found.findings[0] == Finding("two", "", None, None, "the data set is not there")
    assert judge(made, [absent("one"), absent("two")])[0].status == "open"
    assert judge(made, [])[0] == Verdict(made.criteria[0], "open", ())
    assert judge(made, [outcome_of(made, "one", {**ONE, ("ours", "personal"): 1.0}), two])[0].status == "fails"


def test_evidence_calls_methods_by_their_titles() -> None:
    parts = values()["parts"]
    parts[0]["plan"]["methods"][1] = "fedavg_ft"
    parts[0] |= {"numbers": {}, "not_targets": []}
    made = recipe({"parts": ["one"], "above": {"of": ["ours"], "than": ["fedavg_ft", "alone"]}}, parts=parts)
    numbers = {("ours", "personal"): 90.0, ("fedavg_ft", "personal"): 80.0, ("alone", "personal"): 60.0}
    assert judge(made, [outcome_of(made, "one", numbers)])[0].findings[0].evidence == "ours 90 against FedAvg-FT 80"
    del numbers["fedavg_ft", "personal"]
    (finding,) = judge(made, [outcome_of(made, "one", numbers, diverged=[("", "fedavg_ft")])])[0].findings
    assert finding.evidence == "FedAvg-FT diverged"


def test_when_quick_only_what_is_expected_is_judged() -> None:
    made = recipe(
        {"parts": ["one"], "above": {"of": ["ours"], "than": ["theirs"]}},
        {"parts": ["one"], "above": {"of": ["ours"], "than": ["theirs"]}, "quick": True},
    )
    parts = [outcome_of(made, "one", ONE)]
    assert [each.status for each in judge(made, parts, quick=True)] == ["left out", "holds"]
    assert [each.status for each in judge(made, parts)] == ["holds", "holds"]
