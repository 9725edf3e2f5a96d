"""The ledger: intervals over seeds, what can only be undecided, and that its page says what the results say."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from coterie.cli import console
from coterie.cli.app import app
from coterie.errors import ConfigError, UnknownName
from coterie.studies import recipes
from coterie.studies.comparison import ComparisonPlan
from coterie.studies.recipes import ledger
from coterie.studies.recipes.cells import CellName
from coterie.studies.recipes.checks import parse
from coterie.studies.recipes.demands import Estimate
from coterie.studies.recipes.ledger.claims import (
    CLAIMS,
    FEWEST_SEEDS,
    Basis,
    Claim,
    Protocol,
    TuningNeeded,
    checked,
    claims_of,
    criterion_of,
)
from coterie.studies.recipes.ledger.intervals import interval
from coterie.studies.recipes.ledger.judgement import Judgement, PlaceJudgement, judge_claim
from coterie.studies.recipes.ledger.page import counted, in_short, reasons, sentence
from coterie.studies.recipes.ledger.records import PartRecord, Records, changes, read_records
from coterie.studies.recipes.outcomes import PartOutcome
from coterie.studies.recipes.plans import planned
from coterie.studies.recipes.readings import Value, _pseudo_values
from coterie.studies.recipes.schema import Reading
from tests.programs import load_program
from tests.studies.recipes.small_recipe import values

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "results" / "recipes"

T_2, T_4, T_8 = 4.302652729911275, 2.7764451051977987, 2.306004135033371  # Student's 97.5 % points, from tables
A, B = CellName("one", "", "ours", "personal"), CellName("one", "", "theirs", "personal")
PLAIN = {A: Reading(), B: Reading()}


# ------------------------------------------------------------------------------------------------------------ intervals


def test_slopes_are_derivatives() -> None:
    def value(a: float, b: float) -> float:
        return (a - b) / b + 0.25

    a, b, step = 0.8, 0.5, 1e-6
    found = (Estimate(a, {A: 1.0}) - Estimate(b, {B: 1.0})) / Estimate(b, {B: 1.0}) + 0.25
    assert found.value == pytest.approx(value(a, b), rel=1e-12)
    assert found.slopes[A] == pytest.approx((value(a + step, b) - value(a - step, b)) / (2 * step), rel=1e-6)
    assert found.slopes[B] == pytest.approx((value(a, b + step) - value(a, b - step)) / (2 * step), rel=1e-6)


def test_seeds_are_paired_where_they_are_kept() -> None:
    ours, theirs = (0.1, 0.2, 0.3, 0.4, 0.5), (0.0, 0.2, 0.2, 0.4, 0.3)  # differences 0.1, 0, 0.1, 0, 0.2
    cells = {A: Value(0.3, 9.0, 5, ours), B: Value(0.22, 9.0, 5, theirs)}
    found = interval(Estimate(0.08, {A: 1.0, B: -1.0}), cells, PLAIN)
    error = math.sqrt((2 * 0.02**2 + 2 * 0.08**2 + 0.12**2) / 4 / 5)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((0.08 - T_4 * error, 0.08 + T_4 * error), rel=1e-9)


def test_cells_are_independent_where_seeds_are_not_kept() -> None:
    cells = {A: Value(0.3, 0.1, 5), B: Value(0.2, 0.1, 5)}  # equal deviations: Welch has 2 (n - 1) degrees of freedom
    found = interval(Estimate(0.1, {A: 1.0, B: -1.0}), cells, PLAIN)
    error = 0.1 * math.sqrt(2 / 5)
    assert found is not None
    assert (found.low, found.high) == pytest.approx((0.1 - T_8 * error, 0.1 + T_8 * error), rel=1e-9)


@pytest.mark.parametrize(
    ("value", "reading"),
    [
        (Value(0.3, math.nan, 1), Reading()),
        (Value(0.3, 0.1, 5), Reading(spread="clients")),
        (Value(0.3, 0.1, 5), Reading(of_seeds="std")),
    ],
    ids=["one seed", "deviation over clients", "a deviation itself"],
)
def test_without_a_deviation_over_seeds_there_is_no_interval(value: Value, reading: Reading) -> None:
    assert interval(Estimate(0.3, {A: 1.0}), {A: value}, {A: reading}) is None


def test_a_pooled_test_has_no_other_interval() -> None:
    reading = Reading(paired="pvalue", against="theirs")
    found = interval(Estimate(0.01, {A: 1.0}), {A: Value(0.01, math.nan, 3)}, {A: reading})
    assert found is not None and found.low == found.high == 0.01


# ------------------------------------------------------------------------------------------------------------- verdicts


@pytest.fixture
def basis(tmp_path: Path) -> Basis:
    """The small recipe's part on which a claim rests: ours above theirs, at four rounds."""
    made = values()
    made["parts"] = made["parts"][:1]
    made["parts"][0]["plan"]["methods"][1]["tune"] = {"lr": [1, 2]}
    made["criteria"] = [
        {"name": "ahead", "says": "So it is.", "above": {"of": ["ours"], "than": ["theirs"]}},
        {"name": "all", "says": "So it is.", "above": {"of": ["ours"], "than": ["*"]}},
    ]
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(made, sort_keys=False))
    return Basis(recipe=str(path), criterion="ahead")


def record(ours: Sequence[float], theirs: Sequence[float], **changes: Any) -> Records:
    cells = [
        {"method": method, "reading": "personal", "mean": sum(each) / len(each), "std": None, "each": list(each)}
        for method, each in (("ours", ours), ("theirs", theirs), ("alone", [0.0] * len(ours)))
    ]
    made = {
        "name": "one",
        "seeds": list(range(1, len(ours) + 1)),
        "rounds": 4,
        "grid": {},
        "data": "synthetic:clients=5,samples=14,features=6,classes=3",
        "partition": "natural",
        "model": "linear",
        "clients": 5,
        "participation": 1.0,
        "validation": 0.1,
        "at": "final",
        "cells": cells,
        "tuning": [{"setting": "", "method": "theirs", "tried": [{"lr": 1}, {"lr": 2}], "edges": ["lr=2 is at it"]}],
    }
    return {("small", "one"): PartRecord("small.json", {**made, **changes})}


PROTOCOL = Protocol(seeds=3, rounds=4, tuned=TuningNeeded(methods=("theirs",), values=2))
FAR, NEAR, BEHIND = (90.0, 91.0, 92.0), (79.0, 81.0, 80.0), (99.0, 98.0, 97.0)


def judged(basis: Basis, records: Records, protocol: Protocol = PROTOCOL) -> Judgement:
    return judge_claim(Claim(id="fedamp-x", where="Table 9", claim="So.", rests_on=(basis,)), protocol, records)


def test_what_is_beyond_the_threshold_holds_and_what_is_short_of_it_does_not(basis: Basis) -> None:
    found = judged(basis, record(FAR, NEAR))  # differences 11, 10, 12: mean 11, deviation 1
    assert (found.answer, found.places[0].reasons) == ("holds", ())
    (place,) = found.places
    assert place.over_seeds is not None
    reach = T_2 / math.sqrt(3)
    assert (place.over_seeds.low, place.over_seeds.high) == pytest.approx((11 - reach, 11 + reach), rel=1e-9)
    assert place.notes == ("theirs: lr=2 is at it",)  # the edge of what was tried is told, and changes nothing
    assert "ours 91 against theirs 80, met by 11" in sentence(found)
    found = judged(basis, record(FAR, BEHIND))
    assert found.answer == "does not hold" and sentence(found).startswith("It does not hold.")


def test_one_case_of_many_may_fail_by_chance(basis: Basis) -> None:
    found = judged(basis, record((75.0, 75.0, 76.0), NEAR))  # differences -4, -6, -4: mean -14/3, deviation sqrt(4/3)
    (failed,) = found.places
    t = (-14 / 3) / math.sqrt(4 / 3 / 3)
    chance = 0.5 + t / (2 * math.sqrt(2 + t * t))  # Student's t with two degrees of freedom has this closed form
    assert failed.chance == pytest.approx(chance, rel=1e-9)
    most = math.floor(0.025 / chance)  # so many times the chance is at most that of lying below a 95 % interval
    assert failed.answer == found.answer == "does not hold" and most > 1
    held = place("holds", "EMNIST")
    assert Judgement(found.claim, (failed, *(held,) * (most - 1))).answer == "does not hold"
    among = Judgement(found.claim, (failed, *(held,) * most))
    assert among.answer == "undecided"
    assert f"it fails, as one of {most + 1} cases may by chance" in sentence(among)
    every = basis.model_copy(update={"criterion": "all"})  # two demands: the other is met by far
    assert judged(every, record((75.0, 75.0, 76.0), NEAR)).places[0].chance == pytest.approx(2 * chance, rel=1e-9)


@pytest.mark.parametrize(
    ("changed", "protocol", "why"),
    [
        ({"rounds": 3}, {}, "3 of 4 rounds"),
        ({}, {"rounds": 2000}, "4 of 2,000 rounds"),
        ({}, {"seeds": 5}, "three seeds of five"),
        ({"tuning": []}, {}, "theirs was not tuned"),
        ({}, {"tuned": TuningNeeded(methods=("*",), values=2)}, "ours was not tuned"),
        ({}, {"tuned": TuningNeeded(methods=("theirs",), values=5)}, "theirs was tuned over two values of five"),
        ({"clients": 4}, {}, "clients was 4, and is 5 in the recipe"),
        ({"validation": 0.0}, {}, "validation was 0.0, and is 0.1 in the recipe"),
        ({"at": "best"}, {}, "numbers were read at best, and are at final in the recipe"),
        ({"scarcity": 9}, {}, "scarcity was 9, and is not set in the recipe"),
        ({"attack": "sign_flip:0.2"}, {}, "attack was sign_flip:0.2, and is not set in the recipe"),
        ({"partition": "iid"}, {}, "partition was iid, and is natural in the recipe"),
        (
            {"methods": {"theirs": {"algorithm": "fedavg", "settings": {"local_epochs": 7}}}},
            {},
            "local_epochs of theirs was 7, and is 1 in the recipe",
        ),
        ({"absent": "no data", "cells": []}, {}, "not run"),
        ({"failed": "no memory", "cells": []}, {}, "it failed: no memory"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("theirs", [NEAR, BEHIND], ids=["ahead", "behind"])
def test_what_was_not_done_as_the_paper_says_is_undecided(
    basis: Basis, theirs: tuple[float, ...], changed: dict[str, Any], protocol: dict[str, Any], why: str
) -> None:
    found = judged(basis, record(FAR, theirs, **changed), PROTOCOL.but(Protocol(**protocol)))
    assert found.answer == "undecided" and found.places[0].reasons == (why,)
    assert why in sentence(found)


@pytest.mark.parametrize("at", ["final", "mean"])
def test_a_record_says_on_which_samples_and_when_its_numbers_were_taken(at: str) -> None:
    made = values()
    made["parts"][0]["plan"] |= {"scarcity": 9, "test_fraction": 0.25, "eval_every": 2}
    made["parts"][0]["readings"]["personal"]["at"] = at
    part = parse(made, "small").part("one")
    outcome = PartOutcome(part, planned(part))
    (kept,) = recipes.plain(recipes.RecipeOutcome(parse(made, "small"), False, (outcome,), ()))["parts"]
    assert changes(outcome, PartRecord("small.json", kept), frozenset()) == []
    del kept["scarcity"]
    other = PartRecord("small.json", {**kept, "test_fraction": 0.5, "eval_every": 4})
    assert changes(outcome, other, frozenset()) == [
        "test_fraction was 0.5, and is 0.25 in the recipe",
        "scarcity was not set, and is 9 in the recipe",
        *(["eval_every was 4, and is 2 in the recipe"] if at == "mean" else []),  # the last round is always evaluated
    ]


def test_an_interval_that_includes_the_threshold_is_undecided(basis: Basis) -> None:
    found = judged(basis, record((81.0, 82.0, 80.0), NEAR))  # differences 2, 1, 0: mean 1, and 2.48 around it
    assert found.answer == "undecided"
    assert found.places[0].reasons == ("the interval over seeds includes the threshold",)
    assert "on its side in the one case" in sentence(found)


def test_one_seed_decides_nothing_even_where_one_is_enough(basis: Basis) -> None:
    found = judged(basis, record((90.0,), (80.0,)), Protocol(seeds=1, rounds=4))
    assert found.answer == "undecided"
    assert found.places[0].reasons == ("no interval over seeds can be taken from what was kept",)


def test_a_rival_that_diverged_or_is_not_there_leaves_it_open(basis: Basis) -> None:
    gone = record(FAR, NEAR)
    cells = gone["small", "one"].values["cells"]
    cells[1] = {"method": "theirs", "reading": "personal", "mean": None, "std": None, "diverged": True}
    assert judged(basis, gone).places[0].reasons == ("theirs diverged",)
    every = basis.model_copy(update={"criterion": "all"})
    assert judged(every, gone).places[0].reasons == ("theirs diverged",)
    del cells[1]
    assert judged(every, gone).places[0].reasons == ("theirs was not run",)
    assert judged(basis, {}).places[0].reasons == ("not run",)


def test_other_values_than_the_recipes_decide_nothing(basis: Basis) -> None:
    path = Path(basis.recipe)
    made = yaml.safe_load(path.read_text())
    made["parts"][0]["plan"]["methods"][1]["tune"] = {"lr": [1, 3]}
    path.write_text(yaml.safe_dump(made, sort_keys=False))
    then = {"theirs": {"algorithm": "fedavg", "settings": {}}}
    (found,) = judged(basis, record(FAR, NEAR, methods=then)).places
    assert found.reasons == ("theirs was tuned over other values than the recipe's",)
    tuning = [{"setting": "", "method": "theirs", "tried": [{"lr": 3.0}, {"lr": 1.0}], "edges": []}]
    assert judged(basis, record(FAR, NEAR, methods=then, tuning=tuning)).answer == "holds"


def test_what_the_recipe_tunes_and_the_run_did_not_decides_nothing_nor_the_reverse(basis: Basis) -> None:
    """Where the paper asks for no tuning, too: the recipe does."""
    lax = Protocol(seeds=3, rounds=4)
    then = {"theirs": {"algorithm": "fedavg", "settings": {}}}
    made = yaml.safe_load(Path(basis.recipe).read_text())
    del made["parts"][0]["plan"]["methods"][1]["tune"]
    made["name"] = "untuned"
    (path := Path(basis.recipe).with_name("untuned.yaml")).write_text(yaml.safe_dump(made, sort_keys=False))
    untuned = basis.model_copy(update={"recipe": str(path)})
    made["parts"][0]["plan"]["methods"][1]["tune"] = {"lr": [1, 2]}
    made["parts"][0]["tuned_by"], made["name"] = "global", "by-global"
    (path := path.with_name("by-global.yaml")).write_text(yaml.safe_dump(made, sort_keys=False))
    by_global = basis.model_copy(update={"recipe": str(path)})
    other = "theirs was tuned by the model of the first column, and is by its global model in the recipe"
    tuning = record(FAR, NEAR)["small", "one"].values["tuning"]
    for recipe, tried, protocol, why in (
        (basis, [], lax, "theirs was not tuned, and is in the recipe"),
        (basis, [], PROTOCOL, "theirs was not tuned"),
        (untuned, tuning, lax, "theirs was tuned, and is not in the recipe"),
        (by_global, tuning, PROTOCOL, other),
    ):
        kept = record(FAR, NEAR, methods=then, tuning=tried)["small", "one"]
        (found,) = judged(recipe, {(name, "one"): kept for name in ("small", "untuned", "by-global")}, protocol).places
        assert found.reasons == (why,)


def test_a_part_that_was_not_run_has_all_of_its_cases(basis: Basis) -> None:
    path = Path(basis.recipe)
    made = yaml.safe_load(path.read_text())
    made["parts"].append({**values()["parts"][1], "readings": {"personal": {}}, "numbers": {}})  # a grid of three rates
    made["parts"][1]["plan"]["methods"] = values()["parts"][0]["plan"]["methods"]
    path.write_text(yaml.safe_dump(made, sort_keys=False))
    claim = Claim(id="fedamp-x", where="Table 9", claim="So.", rests_on=(basis,), most=True)
    found = judge_claim(claim, PROTOCOL, record(FAR, NEAR))
    assert [place.answer for place in found.places] == ["holds", *3 * ["undecided"]]
    assert len({place.setting for place in found.places[1:]}) == 3
    assert found.answer == "undecided", "one of four is not most"


def test_equal_runs_decide_nothing_strict(basis: Basis) -> None:
    (found,) = judged(basis, record(FAR, FAR)).places
    assert found.answer == "undecided" and found.reasons == ("what is compared are the same runs",)


def test_what_is_so_by_definition_needs_no_interval(basis: Basis) -> None:
    path = Path(basis.recipe)
    made = yaml.safe_load(path.read_text())
    made["criteria"][0] |= {"at_least": made["criteria"][0].pop("above"), "always": True}
    path.write_text(yaml.safe_dump(made, sort_keys=False))
    close = record((80.1, 80.0, 80.0), (80.0, 80.0, 80.0))  # an interval over seeds would include zero
    assert judged(basis, close).answer == "holds"
    assert judged(basis, record((79.9, 80.0, 80.0), (80.0, 80.0, 80.0))).answer == "does not hold"
    assert judged(basis, record((80.1, 80.0, 80.0), (80.0, 80.0, 80.0), rounds=3)).answer == "undecided"


def test_shares_of_clients_have_an_interval_over_seeds_and_name_whom_they_are_compared_with(basis: Basis) -> None:
    path = Path(basis.recipe)
    made = yaml.safe_load(path.read_text())
    made["parts"][0]["readings"] = {"personal": {}, "ahead": {"paired": "ahead", "against": "ours"}}
    made["parts"][0]["numbers"] = {}
    made["parts"][0]["not_targets"] = []
    made["criteria"][0] = {"name": "ahead", "says": "So.", "between": {"of": ["theirs | ahead"], "high": 0.4999}}
    path.write_text(yaml.safe_dump(made, sort_keys=False))

    def shares(*each: float, **more: Any) -> Records:
        found = record(FAR, NEAR, **more)
        mean = sum(each) / len(each)
        cell = {"method": "theirs", "reading": "ahead", "mean": mean, "std": None, "each": list(each)}
        found["small", "one"].values["cells"].append(cell)
        return found

    (narrow,) = judged(basis, shares(0.46, 0.50, 0.51)).places  # below a half in the mean, and not beyond chance
    assert narrow.answer == "undecided" and narrow.over_seeds is not None
    assert narrow.over_seeds.low < 0 < narrow.over_seeds.high
    assert judged(basis, shares(0.30, 0.31, 0.32)).answer == "holds"
    both = PROTOCOL.but(Protocol(tuned=TuningNeeded(methods=("*",), values=2)))
    (found,) = judged(basis, shares(0.30, 0.31, 0.32), both).places
    assert found.reasons == ("ours was not tuned",)


def place(answer: Any, part: str, *why: str) -> PlaceJudgement:
    return PlaceJudgement("small", part, "", answer, why, "a against b", 1.0 if answer == "holds" else -1.0)


@pytest.mark.parametrize(
    ("answers", "whole"),
    [
        (("holds", "holds"), "holds"),
        (("holds", "undecided"), "undecided"),
        (("holds", "does not hold"), "does not hold"),
        (("undecided", "does not hold"), "does not hold"),
        ((), "undecided"),
    ],
)
def test_a_claim_is_as_its_cases_are(answers: Sequence[Any], whole: str) -> None:
    claim = Claim(id="fedamp-x", where="Table 9", claim="So.", nothing="nobody can")
    assert Judgement(claim, tuple(place(answer, "MNIST") for answer in answers)).answer == whole


@pytest.mark.parametrize(
    ("held", "failed", "open_", "whole"),
    [
        (3, 0, 2, "holds"),
        (2, 0, 2, "undecided"),
        (2, 2, 0, "does not hold"),
        (3, 2, 0, "holds"),
        (2, 1, 1, "undecided"),
        (0, 2, 2, "does not hold"),
        (0, 0, 0, "undecided"),
    ],
)
def test_a_claim_of_most_cases_is_as_more_than_half_of_them_are(
    held: int, failed: int, open_: int, whole: str, basis: Basis
) -> None:
    claim = Claim(id="fedamp-x", where="Table 9", claim="So, in most cases.", rests_on=(basis,), most=True)
    answers = ["holds"] * held + ["does not hold"] * failed + ["undecided"] * open_
    judgement = Judgement(claim, tuple(place(answer, "MNIST") for answer in answers))
    assert judgement.answer == whole
    if whole == "holds":
        assert f"It holds in most cases, {held} hold" in sentence(judgement)
        assert "met by 1" in sentence(judgement), "the closest is one of those that hold"
    if whole == "does not hold":
        assert f"{failed} do not hold of {len(answers)} cases" in sentence(judgement)


def test_cases_with_the_same_reasons_are_told_together(basis: Basis) -> None:
    claim = Claim(id="fedamp-x", where="Table 9", claim="So.", rests_on=(basis,))
    places = (
        place("undecided", "MNIST", "one seed of five"),
        place("undecided", "EMNIST", "not run"),
        place("undecided", "Fashion-MNIST", "one seed of five"),
    )
    assert reasons(Judgement(claim, places)) == ["MNIST and Fashion-MNIST: one seed of five", "not run: EMNIST (small)"]


def test_a_claim_is_judged_on_each_data_set_alone(basis: Basis) -> None:
    claim = Claim(id="fedamp-x", where="Table 9", claim="So.", rests_on=(basis,))
    there = {
        "MNIST": ("holds", "holds"),
        "Fashion-MNIST": ("does not hold",),
        "EMNIST": ("undecided", "holds"),
        "": ("holds",),  # a mean over several
    }
    places = [replace(place(each, data), data=data) for data, answers in there.items() for each in answers]
    # Beyond chance among the cases of its own data set, and not among all.
    places = [replace(each, chance=0.02) if each.answer == "does not hold" else each for each in places]
    found = Judgement(claim, tuple(places))
    assert found.answer == "undecided"
    assert found.by_data == {"MNIST": "holds", "Fashion-MNIST": "does not hold", "EMNIST": "undecided"}
    assert in_short(found) == "undecided; holds on MNIST; does not hold on Fashion-MNIST"
    assert "As far as single data sets go, it holds on MNIST and does not hold on Fashion-MNIST." in sentence(found)
    assert counted([found]) == (
        "Of 1 claims 0 hold, 0 do not hold, 1 is undecided; on one data set alone, of 3, 1 holds, 1 does not hold, "
        "1 is undecided"
    )


def test_headings_begin_with_the_name_of_the_data_set() -> None:
    titles: dict[str, set[str]] = {}
    for recipe in map(recipes.load, recipes.names()):
        for part in recipe.parts:
            titles.setdefault(part.plan["data"].partition(":")[0], set()).add(part.data_set)
    assert all(len(found) == 1 for found in titles.values()), titles
    assert titles["fashion_mnist"] == {"Fashion-MNIST"} and len(set.union(*titles.values())) == len(titles)


@pytest.mark.parametrize(
    ("setting", "counts"), [("newcomers", {"hold_out": 0.4}), ("returning", {"participation": 0.5})]
)
def test_settings_that_could_change_nothing_are_not_held_against_a_record(
    setting: str, counts: dict[str, Any], tmp_path: Path
) -> None:
    ends = []
    for fields in ({}, counts):
        made = values()
        made["parts"] = [{**made["parts"][0], "plan": made["parts"][0]["plan"] | fields}]
        made["criteria"] = [{"name": "ahead", "says": "So it is.", "above": {"of": ["ours"], "than": ["theirs"]}}]
        path = tmp_path / str(len(fields)) / "small.yaml"
        path.parent.mkdir()
        path.write_text(yaml.safe_dump(made, sort_keys=False))
        then = {"ours": {"algorithm": "fedamp", "settings": {setting: "another"}}}
        records = record(FAR, NEAR, methods=then, **fields)
        ends.append(judged(Basis(recipe=str(path), criterion="ahead"), records).places[0].reasons)
    assert ends[0] == () and f"{setting} of ours was another" in ends[1][0]


# --------------------------------------------------------------------------------------------------- claims and results


def test_all_claims_rest_on_criteria_that_are_there() -> None:
    found = [claim for name in ledger.papers() for claim in claims_of(name).claims]
    assert ledger.papers() == ["fedacs", "fedamp", "fedpg", "flame"] and len(found) >= 50
    with pytest.raises(UnknownName, match="paper with claims called"):
        claims_of("fedsgd")


@pytest.mark.parametrize("paper", ["fedacs", "fedamp", "fedpg", "flame"])
def test_every_claim_can_be_decided_by_the_recipes_as_they_stand(paper: str) -> None:
    """What a whole run of a recipe would leave undecided is not worth running."""
    found, plans = claims_of(paper), dict[tuple[str, str], ComparisonPlan]()
    for claim in found.claims:
        protocol = found.protocol.but(claim.protocol)
        for basis in claim.rests_on:
            recipe, criterion = criterion_of(basis)
            for name in basis.parts or criterion.parts or [part.name for part in recipe.parts]:
                key = (recipe.name, name)
                plan = plans[key] = plans.get(key) or recipes.planned(recipe.part(name))
                assert len(plan.seeds) >= (protocol.seeds or FEWEST_SEEDS), (claim.id, name)
                assert plan.runs[0].config.rounds >= (protocol.rounds or 0), (claim.id, name)
                if protocol.tuned is None:
                    continue
                named = {address.method for term in criterion.terms for address in term.cells}
                others = set(plan.methods) - {*criterion.leave_out} if "*" in named else set()
                for method in (named | others) - {"*"}:
                    tried = {tuple(run.candidate.items()) for run in plan.runs if run.method == method}
                    if method in protocol.tuned.methods or "*" in protocol.tuned.methods:
                        assert len(tried) >= protocol.tuned.values, (claim.id, name, method)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rests_on": [{"recipe": "fedamp-table3", "criterion": "nonsense"}]}, "criterion of fedamp-table3 called"),
        ({"rests_on": [{"recipe": "fedpg-table1", "criterion": "drift-fits"}]}, "a recipe of fedpg"),
        (
            {"rests_on": [{"recipe": "fedamp-table3", "criterion": "both-alike", "parts": ["svhn"]}]},
            "part of both-alike",
        ),
        ({"rests_on": []}, "exactly one of rests_on and nothing"),
        ({"id": "flame-x"}, "must begin with fedamp-"),
    ],
)
def test_a_claim_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str) -> None:
    made = yaml.safe_load((CLAIMS / "fedamp.yaml").read_text(encoding="utf-8"))
    made["claims"] = [{**made["claims"][0], **changes}]
    with pytest.raises((ConfigError, UnknownName), match=message):
        checked(made, "fedamp")


def test_the_longest_run_with_the_most_seeds_counts_and_quick_ones_do_not(tmp_path: Path) -> None:
    part = record(FAR, NEAR)["small", "one"].values
    for name, rounds, quick in (("a", 10, False), ("b", 30, False), ("c", 20, False), ("d", 99, True)):
        (tmp_path / name).mkdir()
        text = json.dumps({"recipe": "small", "quick": quick, "parts": [{**part, "rounds": rounds}]})
        (tmp_path / name / "recipe.json").write_text(text)
    assert read_records(tmp_path)["small", "one"].rounds == 30
    (tmp_path / "other.json").write_text("[1]")
    with pytest.raises(ConfigError, match=r"other\.json' is not the result of a recipe"):
        read_records(tmp_path)


def generated(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "docs" / "making")  # as the site's builder has it
    return load_program(ROOT / "docs" / "making" / "generated.py")


AGAINST = re.compile(r"(?P<one>.+) (?P<a>[-\d.e]+) against (?P<other>.+) (?P<b>[-\d.e]+)")


def check_numbers(part: dict[str, Any], case: dict[str, Any]) -> bool:
    """Look the two numbers of a comparison up in the part's file; say whether it is one."""
    found = AGAINST.fullmatch(case["evidence"])
    if found is None or re.search(" minus | over ", case["evidence"]):
        return False
    for name, number in (("one", "a"), ("other", "b")):
        method, *rest = found[name].split(" | ")
        reading = rest[0] if rest else part["cells"][0]["reading"]
        setting = rest[1] if len(rest) > 1 else case["setting"]
        means = [
            cell["mean"]
            for cell in part["cells"]
            if (cell["method"], cell["reading"], cell.get("setting", "")) == (method, reading, setting)
        ]
        digits = 0.05 if "e" in found[number] else 1e-3  # a power of ten has two digits
        assert means and float(found[number]) == pytest.approx(means[0], rel=digits), (case, means)
    return True


def test_the_page_says_what_the_results_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page, its verdicts and its numbers against the files themselves, read without the ledger's help."""
    files = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    ran = {(each["recipe"], part["title"]): part for each in files for part in each["parts"] if part["cells"]}
    page = generated(monkeypatch).PAGES["verdicts"]()
    sections = {text.split("\n", 1)[0]: text for text in page.split("\n### ")[1:]}
    compared = 0
    found = ledger.plain(ledger.open_ledger(RESULTS))
    assert list(sections) == [each["id"] for each in found]
    for each in found:
        protocol = yaml.safe_load((CLAIMS / f"{each['paper']}.yaml").read_text(encoding="utf-8"))["protocol"]
        (bold,) = re.findall(r"^\*\*(.+)\*\* · ", sections[each["id"]], re.M)
        assert bold.split("; ")[0] == each["verdict"]
        for data, answer in each["on_one_data_set"].items():
            said = re.search(rf"; {answer} on [^;]*\b{data}\b", bold)
            assert bool(said) == (answer not in ("undecided", each["verdict"])), (each["id"], data)
        held = sum(case["verdict"] == "holds" for case in each["places"])
        most = next(claim for claim in claims_of(each["paper"]).claims if claim.id == each["id"]).most
        assert each["verdict"] != "holds" or (2 * held > len(each["places"]) if most else held == len(each["places"]))
        for case in each["places"]:
            key = (case["recipe"], case["part"])
            if case["margin"] is not None and case["part"]:
                part = ran[key]
                compared += check_numbers(part, case)
                if len(part["seeds"]) < (protocol.get("seeds") or 3):
                    assert case["verdict"] == "undecided" and any("seed" in why for why in case["reasons"]), key
            elif case["part"]:
                assert case["verdict"] == "undecided" and (key not in ran or case["reasons"]), key
    assert compared > 50


def test_the_command_prints_claims_or_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console.out._console, "_width", 200)  # names in one piece, whatever the terminal is

    def call(*words: str) -> Any:
        return CliRunner().invoke(app, ["recipe", "verdicts", *words])

    shown = call("--results", str(RESULTS), "--paper", "fedacs")
    assert shown.exit_code == 0, shown.output
    plain = json.loads(call("--results", str(RESULTS), "--paper", "fedacs", "--json").output)
    assert {each["paper"] for each in plain} == {"fedacs"} and all(each["why"] for each in plain)
    assert all(each["id"] in shown.output for each in plain) and f"Of {len(plain)} claims" in shown.output
    one = call("--results", str(RESULTS), "fedacs-steadiest", "flame-hybrid-best")
    assert one.output.index("fedacs-steadiest") < one.output.index("flame-hybrid-best") and "fedamp" not in one.output
    (each,) = json.loads(call("--results", str(RESULTS), "flame-hybrid-best", "--json").output)
    measured = [place for place in each["places"] if place["margin"] is not None]
    assert measured and all(place["evidence"] in one.output for place in measured), "the cases' numbers are shown"
    other = call("--results", str(RESULTS), "--paper", "fedpg", "flame-hybrid-best").exception
    assert isinstance(other, ConfigError) and "there is no claim 'flame-hybrid-best'" in str(other)
    gone = call("--results", str(tmp_path / "none"))
    assert isinstance(gone.exception, ConfigError) and "give their folder with --results" in str(gone.exception)


def test_one_s_own_results_are_judged_beside_those_that_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    def verdict() -> str:
        found = CliRunner().invoke(app, ["recipe", "verdicts", "flame-hybrid-converges-highest", "--json"])
        if found.exception is not None:
            raise found.exception
        (claim,) = json.loads(found.output)
        return str(claim["on_one_data_set"]["MNIST"])

    with pytest.raises(ConfigError, match=r"no results yet, neither in results/recipes nor in runs: play a recipe"):
        verdict()
    shutil.copytree(RESULTS, "results/recipes")
    assert verdict() == "holds"
    Path("runs/mine").mkdir(parents=True)
    Path("results/recipes/flame-figure3.json").rename("runs/mine/recipe.json")
    assert verdict() == "holds", "this one is judged by what was played here"
    shutil.rmtree("results")
    assert verdict() == "holds"
    shutil.rmtree("runs/mine")
    assert verdict() == "undecided"


def test_pseudo_values_of_a_deviation_vary_as_its_error() -> None:
    """Of three numbers -x, 0, x the deviation is x, and without one of them x/√2, √2x and x/√2."""
    x = 0.6
    found = _pseudo_values([-x, 0.0, x])
    assert found == pytest.approx([3 * x - 2 * x / 2**0.5, 3 * x - 2 * x * 2**0.5, 3 * x - 2 * x / 2**0.5], rel=1e-12)
    assert _pseudo_values([1.0, 2.0]) == ()
