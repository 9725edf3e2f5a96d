"""What a recipe's file may say: cells, terms, numbers, and sentences for what makes no sense."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from coterie.errors import ConfigError, UnknownName
from coterie.studies.recipes import registry
from coterie.studies.recipes.cells import Address, PaperNumber, Term
from coterie.studies.recipes.checks import parse
from coterie.studies.recipes.plans import Work, planned, settings_of, work
from tests.studies.recipes.small_recipe import recipe, values


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("FLAME", Address("FLAME")),
        ("FLAME | PM", Address("FLAME", "PM")),
        ("FedPG g=.3|G-acc| Dir(0.5)", Address("FedPG g=.3", "G-acc", "Dir(0.5)")),
        ("*", Address("*")),
    ],
)
def test_addresses(text: str, found: Address) -> None:
    assert Address.parse(text) == found == Address.parse(str(found))


@pytest.mark.parametrize("text", ["", " | PM", "a | b | c | d"])
def test_addresses_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match="must be METHOD"):
        Address.parse(text)


def test_terms() -> None:
    assert Term.parse("A | r") == Term((Address("A", "r"),))
    difference = Term.parse("A | r | 0 % minus A | r | 80 %")
    assert difference == Term((Address("A", "r", "0 %"), Address("A", "r", "80 %")), "minus")
    assert str(difference) == "A | r | 0 % minus A | r | 80 %"
    assert Term.parse("A over B").operation == "over"
    assert Term.parse("minuscule | overall").operation == ""
    with pytest.raises(ValueError, match="minus or over between them"):
        Term.parse("A minus B minus C")


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (81, PaperNumber(81.0)),
        (0.25, PaperNumber(0.25)),
        ("0.9494±0.0129", PaperNumber(0.9494, 0.0129)),
        (".947 ± .063", PaperNumber(0.947, 0.063)),
        ("-1.5e-3", PaperNumber(-0.0015)),
    ],
)
def test_numbers_as_papers_print_them(given: Any, found: PaperNumber) -> None:
    assert PaperNumber.parse(given) == found


@pytest.mark.parametrize("given", ["0.9+0.1", "", "±1", "12,5", True, None, float("nan"), [1]])
def test_numbers_that_are_none(given: Any) -> None:
    with pytest.raises(ValueError, match="must be a number, or MEAN±STD"):
        PaperNumber.parse(given)


Change = Callable[[dict[str, Any]], None]


def at(path: str, value: Any) -> Change:
    """Put a value at a place of the recipe; pieces of the path that are numbers are places in lists."""

    def change(made: dict[str, Any]) -> None:
        *before, last = (int(piece) if piece.isdigit() else piece for piece in path.split("/"))
        place: Any = made
        for piece in before:
            place = place[piece]
        place[last] = value

    return change


ABOVE = {"of": ["ours"], "than": ["theirs"]}
NONSENSE: dict[str, tuple[Change, str]] = {
    "an unknown method in a plan": (
        at("parts/0/plan/methods", ["fedam"]),
        "part 'one': there is no algorithm 'fedam': did you mean 'fedamp'?",
    ),
    "an unknown setting in a plan": (at("parts/0/plan/client", 5), "called 'client': did you mean 'clients'?"),
    "an unknown setting when quick": (at("parts/0/quick/rond", 5), "called 'rond': did you mean 'rounds'?"),
    "an unknown method in a criterion": (
        at("criteria/0/above", {"of": ["our"], "than": ["*"]}),
        "the criterion 'first' names the method 'our', which the part 'one' does not have: did you mean 'ours'?",
    ),
    "an unknown reading in a criterion": (
        at("criteria/0/above", {"of": ["ours | persona"], "than": ["*"]}),
        "names the reading 'persona', which the part 'one' does not have: did you mean 'personal'?",
    ),
    "an unknown setting in a criterion": (
        at("criteria/0", {"name": "c", "says": "x", "parts": ["two"], "settings": ["hih"], "above": ABOVE}),
        "names the setting 'hih', which the part 'two' does not have",
    ),
    "a setting in a term that has no grid": (
        at("criteria/0/above", {"of": ["ours | personal | low"], "than": ["*"]}),
        "names the setting 'low', which the part 'one' does not have: it has none",
    ),
    "a criterion of a part that is not there": (
        at("criteria/0/parts", ["on"]),
        "the criterion 'first' names the part 'on': did you mean 'one'? there are one, two",
    ),
    "a reading that not all parts have": (
        at("criteria/0", {"name": "c", "says": "x", "above": {"of": ["ours | global"], "than": ["*"]}}),
        "names the reading 'global', which the part 'two' does not have",
    ),
    "no test in a criterion": (
        at("criteria/0", {"name": "c", "says": "x"}),
        "criteria.0: the criterion 'c' must have exactly one of above, at_least, close, between, monotone, near, not "
        "none",
    ),
    "two tests in a criterion": (
        at("criteria/0/close", {"of": ["ours"], "within": 1}),
        "exactly one of above, at_least, close, between, monotone, near, not above and close",
    ),
    "limits the wrong way round": (
        at("criteria/0", {"name": "c", "says": "x", "between": {"of": ["ours"], "low": 2, "high": 1}}),
        "between has low 2 above high 1",
    ),
    "no limit": (at("criteria/0", {"name": "c", "says": "x", "between": {"of": ["ours"]}}), "between needs low, high"),
    "a margin below zero": (at("criteria/0/above/by", -1), "criteria.0.above.by: -1 is not allowed"),
    "a step of one": (
        at("criteria/0", {"name": "c", "says": "x", "monotone": {"of": ["ours"], "direction": "up"}}),
        "criteria.0.monotone.of",
    ),
    "near without numbers": (
        at("criteria/0", {"name": "c", "says": "x", "parts": ["two"], "near": {"of": ["ours"], "within": 1}}),
        "compares with the paper's numbers, and one of its parts has none",
    ),
    "a number that is none": (at("parts/0/numbers/rows/ours", ["91,5", None]), "the number '91,5' must be a number"),
    "a number too few": (at("parts/0/numbers/rows/ours", [1]), "the row 'ours' of numbers has 1 entries for 2"),
    "numbers of nobody": (at("parts/0/numbers/rows/nobody", [1, 2]), "the row 'nobody' of numbers names the method"),
    "numbers without a setting": (
        at("parts/1/numbers", {"rows": {"ours": 1}}),
        "the row 'ours' of numbers names the setting ''",
    ),
    "no target of nobody": (at("parts/0/not_targets/0/cells", ["nobody"]), "not_targets names the method 'nobody'"),
    "an unknown field": (at("parts/0/colour", 1), "parts.0: there is no field 'colour'"),
    "a missing field": (at("parts/0", {"name": "one", "plan": {}}), "parts.0: 'readings' must be given"),
    "an unknown paper": (at("paper", "fedavg"), "paper: 'fedavg' is not allowed"),
    "two parts of one name": (at("parts/1/name", "one"), "there are two of the part 'one'"),
    "a label for nothing": (
        at("parts/0/labels", {"lr": {1: "x"}}),
        "labels speaks of 'lr', which is not in the plan's",
    ),
    "two settings of one name": (at("parts/1/labels/lr", {0.1: "x", 0.2: "x"}), "two points of the grid the same name"),
    "a name that criteria cannot say": (at("parts/1/labels/lr", {0.1: "a | b"}), "'a | b' holds one of '|'"),
    "another's model of nobody": (
        at("parts/0/readings/personal", {"models": {"nobody": "global"}}),
        "the reading 'personal' names the method 'nobody'",
    ),
    "a pair without the other": (at("parts/0/readings/personal", {"paired": "pvalue"}), "paired and against belong"),
    "a matrix that is not measured": (
        at("parts/0/readings/personal", {"split": "cross", "metric": "l_acc"}),
        "the reading 'personal' is of the accuracy matrix: give the plan matrix: true",
    ),
    "a fraction that is not measured": (
        lambda made: (
            at("parts/0/plan/matrix", True)(made),
            at("parts/0/readings/personal", {"split": "cross", "metric": "s_acc 0.7"})(made),
        )[0],
        "the reading 'personal' is of S-acc(0.7): give the plan that fraction under s_acc",
    ),
    "a model that nobody has": (at("parts/0/readings/personal", {"model": "globl"}), "there is no model 'globl'"),
    "training samples that are not measured": (
        at("parts/0/readings/personal", {"split": "train"}),
        "the reading 'personal' is of training samples: give the plan eval_train: true",
    ),
    "the best without validation": (
        lambda made: (at("parts/0/plan/validation", 0)(made), at("parts/0/at", "best")(made))[0],
        "is at the best round on validation data, but validation is 0",
    ),
    "nothing that is quick": (at("parts/0/quick", None), "no part has a quick version"),
}


@pytest.mark.parametrize("what", NONSENSE)
def test_nonsense_is_refused_with_a_sentence(what: str) -> None:
    change, said = NONSENSE[what]
    made = values()
    change(made)
    with pytest.raises(ConfigError) as refused:
        parse(made, "small")
    assert str(refused.value).startswith("the recipe 'small': ")
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_settings_have_labels() -> None:
    part = recipe().part("two")
    assert settings_of(part, planned(part)) == {"low": {"lr": 0.1}, "middle": {"lr": 0.2}, "lr=0.3": {"lr": 0.3}}
    assert settings_of(recipe().part("one"), planned(recipe().part("one"))) == {"": {}}


def test_quick_and_options_stand_over_the_plan() -> None:
    part = recipe().part("one")
    whole, quick, cut = planned(part), planned(part, quick=True), planned(part, over={"rounds": 3, "seeds": [7]})
    assert [plan.seeds for plan in (whole, quick, cut)] == [(1, 10), (1,), (7,)]
    assert [plan.runs[0].config.rounds for plan in (whole, quick, cut)] == [4, 2, 3]
    assert planned(part, over={"precision": "tf32"}).runs[0].config.precision == "tf32"


def test_work_is_rounds_times_those_who_train() -> None:
    part = recipe().part("one")
    assert work(planned(part)) == Work(3 * 2, 3 * 2 * 4, 3 * 2 * 4 * 5)
    assert work(planned(part, over={"participation": 0.4, "seeds": [1]})) == Work(3, 12, 12 * 2)
    assert (Work(1, 2, 3) + Work(10, 20, 3000)).sentence() == "11 runs, 22 rounds, 3,003 times a client trains"


# ------------------------------------------------------------------------------------------------------- the catalogue


def written(path: Path, **changes: Any) -> str:
    path.write_text(yaml.safe_dump(values(**changes)))
    return str(path)


def test_a_recipe_of_the_users_own(tmp_path: Path) -> None:
    assert registry.load(written(tmp_path / "small.yaml")) == recipe()
    with pytest.raises(ConfigError, match=r"the recipe in other\.yaml has the name 'small': it must be its file's"):
        registry.load(written(tmp_path / "other.yaml"))


def test_a_part_like_that_of_another_recipe(tmp_path: Path) -> None:
    like = {"name": "x", "like": "fedamp-table3/fmnist", "readings": {"a": {}}}
    made = registry.load(written(tmp_path / "small.yaml", parts=[like], criteria=[]))
    theirs = registry.load("fedamp-table3").part("fmnist")
    assert (made.parts[0].plan, made.parts[0].quick) == (theirs.plan, theirs.quick)
    with pytest.raises(ConfigError, match="'fedamp-table3/nobody', which is no part with a plan"):
        registry.load(written(tmp_path / "small.yaml", parts=[{**like, "like": "fedamp-table3/nobody"}], criteria=[]))
    with pytest.raises(ConfigError, match="has a quick of its own: leave it out"):
        registry.load(written(tmp_path / "small.yaml", parts=[{**like, "quick": {}}], criteria=[]))


@pytest.mark.parametrize("name", ["fedamp-table4", "../book/fedamp-table3", ""])
def test_a_recipe_that_is_not_there(name: str) -> None:
    with pytest.raises(UnknownName, match="there is no recipe"):
        registry.load(name)
