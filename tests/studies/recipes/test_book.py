"""The book: every table and figure that has numbers is in it, and every recipe in it makes sense."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path

import pytest

from coterie.config import ExperimentConfig
from coterie.studies import recipes
from coterie.studies.comparison import ComparisonPlan
from coterie.studies.recipes.checks import row_of
from coterie.studies.recipes.outcomes import PartOutcome, paper_numbers
from coterie.studies.recipes.plans import planned, work
from coterie.studies.recipes.readings import PartValues, Value
from coterie.studies.recipes.registry import BOOK
from coterie.studies.recipes.runner import chosen_parts
from coterie.studies.recipes.verdicts import judge

NAMES = sorted(path.stem for path in BOOK.glob("*.yaml"))
load = cache(recipes.load)

# Numbers that the paper prints in each table.
FEDAMP_CELLS = 9 * 4  # methods by data sets

SKEWS = ("hybrid", "label", "quality", "quantity", "feature")

# Every table and figure of the papers that has numbers or says how its curves lie.
BOOKED = {
    "fedacs": ("table1", "table2", "figure1"),
    "fedamp": ("table1", "table2", "table3", "figure2", "figure3"),
    "fedpg": ("table1", "table2", "figure4", "figure5"),
    "flame": (
        *(f"table3-{skew}" for skew in SKEWS),
        *(f"figure{number}" for number in range(3, 13)),
        *(f"appendix-{skew}" for skew in ("label", "quality", "quantity")),  # Figures 13 to 20 and 36 to 43
    ),
}

# What "reproduced" means for each paper, by the names of criteria.
EACH_SKEW = {"personal-above-pfedme", "personal-above-ditto", "global-above-pfedme", "hybrid-best"}
REPRODUCED = {
    "fedamp-table1": {"message-passing-as-averaging", "collaboration-far-above-separate"},
    "fedamp-table2": {"personalised-alike", "averaging-collapses"},
    "fedamp-table3": {
        "message-passing-above-fine-tuning",
        "fine-tuning-above-separate",
        "fine-tuning-above-global",
        "both-alike",
    },
    "fedamp-figure2": {"not-by-chance"},
    "fedamp-figure3": {"blocks", "groups-recovered"},
    "flame-table3-hybrid": EACH_SKEW,
    "flame-table3-label": EACH_SKEW | {"personal-above-global", "more-classes-harder", "more-classes-better-together"},
    "flame-table3-quality": EACH_SKEW | {"global-above-personal", "alike-on-mnist", "stored-order"},
    "flame-table3-quantity": EACH_SKEW | {"global-above-personal"},
    "flame-table3-feature": EACH_SKEW,
    "fedpg-table1": {
        "g-acc-first",
        "s-acc-first",
        "global-performance-preserved",
        "personal-fit-below-fedavg",
        "drift-fits",
        "drift-costs",
    },
    "fedpg-table2": {"common-direction-matters", "fairness-matters", "history-matters", "no-drift-no-fit"},
    "fedpg-figure4": {"flat", "others-fall"},
    "fedacs-table1": {
        "fedacs-first",
        "ditto-not-below-local",
        "local-above-peravg",
        "one-model-does-not-fit-all",
    },
    "fedacs-table2": {"rises"},
    "fedacs-figure1": {"fedacs-steadiest"},
}


def test_every_table_and_figure_is_in_the_book() -> None:
    assert sorted(f"{paper}-{what}" for paper, found in BOOKED.items() for what in found) == NAMES


def test_the_book_is_listed_in_the_papers_order() -> None:
    listed = recipes.names()
    assert sorted(listed) == NAMES
    assert [name for name in listed if name.startswith("fedamp")] == [
        "fedamp-table1",
        "fedamp-table2",
        "fedamp-table3",
        "fedamp-figure2",
        "fedamp-figure3",
    ]


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_loads_and_its_plans_expand(name: str) -> None:
    recipe = load(name)
    assert recipe.paper == name.split("-")[0]
    for quick in (False, True):
        parts = chosen_parts(recipe, quick=quick)
        assert parts
        for part in parts:
            plan = planned(part, quick=quick)
            assert all(isinstance(run.config, ExperimentConfig) for run in plan.runs)
            assert len(plan.runs) >= len(plan.methods) * len(plan.seeds)


@pytest.mark.parametrize("name", NAMES)
def test_quick_versions_are_small_and_need_no_download(name: str) -> None:
    recipe = load(name)
    for part in chosen_parts(recipe, quick=True):
        for run in planned(part, quick=True).runs:
            assert run.config.data.split(":")[0] in ("digits", "synthetic")
    total = sum((work(planned(part, quick=True)) for part in chosen_parts(recipe, quick=True)), recipes.Work())
    assert total.updates <= 60_000
    assert any(criterion.quick for criterion in recipe.criteria)


@pytest.mark.parametrize("name", NAMES)
def test_every_number_is_one_that_a_paper_can_print(name: str) -> None:
    recipe = load(name)
    for part in recipe.parts:
        for cell, number in paper_numbers(part).items():
            reading = part.readings[cell.reading]
            plain = reading.metric in (None, "accuracy") or reading.split == "cross"
            if plain and reading.weights is None and reading.paired is None:
                most = 100 if recipe.unit == "percent" else 1
                assert 0 < number.mean <= most, cell
                assert number.std is None or 0 <= number.std < most / 2, cell


@pytest.mark.parametrize("name", NAMES)
def test_every_criterion_says_a_whole_sentence(name: str) -> None:
    for criterion in load(name).criteria:
        assert criterion.says[0].isupper() and criterion.says.endswith(".")
        assert not criterion.note or criterion.note.endswith(".")


@pytest.mark.parametrize("name", ["fedamp-table1", "fedamp-table2", "fedamp-table3"])
def test_fedamps_tables_are_whole(name: str) -> None:
    parts = [part for part in load(name).parts if part.name != "fmnist-mlp"]  # which is not the paper's
    numbers = [number for part in parts for number in paper_numbers(part).values()]
    assert len(numbers) == FEDAMP_CELLS and all(number.std is None for number in numbers)
    assert [part.name for part in parts] == ["mnist", "fmnist", "emnist", "cifar100"]
    for part in parts:
        assert part.at == "best_oracle" and {row_of(row)[0] for row in part.numbers.rows} == {*planned(part).methods}


@pytest.mark.parametrize(
    ("name", "part", "method", "number"),
    [  # one from each corner, and those in the middle that are easily mixed up
        ("fedamp-table1", "mnist", "Separate", 99.27),
        ("fedamp-table1", "cifar100", "HeurFedAMP", 45.88),
        ("fedamp-table1", "emnist", "APFL", 73.95),
        ("fedamp-table2", "fmnist", "FedProx", 83.80),
        ("fedamp-table2", "cifar100", "SCAFFOLD", 2.04),
        ("fedamp-table2", "emnist", "FedAMP", 99.27),
        ("fedamp-table3", "mnist", "SCAFFOLD", 98.50),
        ("fedamp-table3", "fmnist", "HeurFedAMP", 91.37),
        ("fedamp-table3", "cifar100", "Separate", 39.99),
    ],
)
def test_fedamps_numbers(name: str, part: str, method: str, number: float) -> None:
    (found,) = [found for cell, found in paper_numbers(load(name).part(part)).items() if cell.method == method]
    assert math.isclose(found.mean, number)


@pytest.mark.parametrize("name", REPRODUCED)
def test_what_reproduced_means_is_there(name: str) -> None:
    assert REPRODUCED[name] <= {criterion.name for criterion in load(name).criteria}


@pytest.mark.parametrize("number", range(4, 8))
def test_attacks_hurt_flame_least(number: int) -> None:
    assert any(
        "least" in criterion.says or "less" in criterion.says for criterion in load(f"flame-figure{number}").criteria
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_files_are_part_of_the_package(name: str) -> None:
    assert BOOK.parent == Path(recipes.__file__).parent and (BOOK / f"{name}.yaml").is_file()


@pytest.mark.parametrize("name", NAMES)
def test_the_papers_own_numbers_fulfil_what_they_say(name: str) -> None:
    recipe = load(name)
    parts = []
    for part in recipe.parts:
        ours = {cell: Value(number.mean, math.nan, 1) for cell, number in paper_numbers(part).items()}
        parts.append(PartOutcome(part, planned(part), PartValues(ours)))
    verdicts = judge(recipe, parts)
    failing = [f for verdict in verdicts for f in verdict.findings if f.holds is False]
    assert failing == []
    if "table" in name:
        assert any(verdict.status == "holds" for verdict in verdicts)


STEPS = [0.01, 0.05, 0.1, 0.2, 0.5]  # of the global models of FLAME's rivals, in its paper
RATES = [0.01, 0.05, 0.1]  # learning rates of all methods in FedPG's paper


@cache
def whole(name: str, part: str) -> ComparisonPlan:
    return planned(load(name).part(part))


def tried(name: str, part: str, method: str, parameter: str) -> list[float]:
    """The values of a parameter among which a method's best is taken."""
    runs = [run for run in whole(name, part).runs if run.method == method]
    return sorted({run.candidate[parameter] for run in runs if parameter in run.candidate})


@pytest.mark.parametrize(
    "name", [*(f"flame-table3-{skew}" for skew in SKEWS), *(f"flame-figure{number}" for number in range(3, 9))]
)
def test_flames_rivals_move_as_often_as_flame_and_are_tuned(name: str) -> None:
    """Personal models, clients' copies and the global model change equally often in all three."""
    for part in load(name).parts:
        assert tried(name, part.name, "pFedMe", "eta") == STEPS
        assert tried(name, part.name, "Ditto", "lr") == STEPS
        for run in whole(name, part.name).runs:
            settings = run.config.settings
            assert settings["local_epochs"] == 1
            if run.method == "pFedMe":
                assert settings["moves"] == "round" and settings["inner_steps"] == 1
            if run.method == "Ditto":
                assert settings["local_steps"] == 1 and settings["personal_lr"] == 0.01
    paper = {method for part in load(name).parts for method in (row_of(row)[0] for row in part.numbers.rows)}
    assert not {"pFedMe full", "Ditto full"} & paper


@pytest.mark.parametrize("name", ["fedacs-table1", "fedacs-table2", "fedacs-figure1"])
def test_fedacs_and_its_rivals_are_tuned_alike(name: str) -> None:
    for part in load(name).parts:
        for method in whole(name, part.name).methods:
            assert tried(name, part.name, method, "lr") == ([0.001, *RATES] if method == "PerAvg" else RATES)


@pytest.mark.parametrize("name", ["fedamp-table1", "fedamp-table2", "fedamp-table3"])
def test_scaffold_is_tuned(name: str) -> None:
    for part in load(name).parts:
        assert tried(name, part.name, "SCAFFOLD", "lr") == [0.001, *RATES]


@pytest.mark.parametrize("name", ["fedpg-table1", "fedpg-table2", "fedpg-figure4", "fedpg-figure5"])
def test_all_methods_of_fedpgs_paper_have_their_best_rate(name: str) -> None:
    for part in load(name).parts:
        for method in whole(name, part.name).methods:
            assert method == "FedPG'" or tried(name, part.name, method, "lr") == RATES


def test_two_classes_each_are_independent_draws_but_in_fedpgs_setting() -> None:
    """FedAMP's and FedACS's are McMahan's shards; FedPG's fills classes in the order of clients."""
    found: dict[str, set[str]] = {}
    for name in NAMES:
        for part in load(name).parts:
            for run in whole(name, part.name).runs:
                kind = run.config.partition.split(":")[0]
                if kind in ("shards", "pathological"):
                    found.setdefault(name, set()).add(kind)
    fedpg = {f"fedpg-{what}": {"pathological"} for what in ("table2", "figure5")}
    assert found == {"fedamp-table2": {"shards"}, "fedacs-figure1": {"shards"}} | fedpg
