"""The numbers of FedACS, FLAME and FedPG in the book agree with what the papers' prose derives from them."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from coterie.config import ExperimentConfig
from coterie.studies import recipes
from coterie.studies.recipes.cells import CellName, PaperNumber
from coterie.studies.recipes.outcomes import paper_numbers
from coterie.studies.recipes.plans import planned
from coterie.studies.recipes.tables import not_target

load = cache(recipes.load)

TABLE_3 = tuple(f"flame-table3-{skew}" for skew in ("hybrid", "label", "quality", "quantity", "feature"))
ROWS = {"hybrid": 4, "label": 24, "quality": 4, "quantity": 4, "feature": 1}
COLUMNS = (
    ("FLAME", "HM"),
    ("FLAME", "PM"),
    ("FLAME", "GM"),
    *((m, k) for m in ("pFedMe", "Ditto") for k in ("PM", "GM")),
)
FEDPG = ("FedPG", "S-FedPG", "FedPG gamma=0.3", "FedPG gamma=0.6", "FedPG gamma=1")


def numbers(name: str) -> dict[tuple[str, str, str, str], PaperNumber]:
    """A recipe's numbers by part, setting, method and reading."""
    return {
        (cell.part, cell.setting, cell.method, cell.reading): number
        for part in load(name).parts
        for cell, number in paper_numbers(part).items()
    }


def table_3(*names: str) -> NDArray[np.float64]:
    """Rows of FLAME's Table III, with its seven columns."""
    found = []
    for name in names:
        cells = numbers(name)
        for part, setting in dict.fromkeys((part, setting) for part, setting, _, _ in cells):
            found.append([cells[part, setting, method, reading].mean for method, reading in COLUMNS])
    return np.array(found)


# FLAME


@pytest.mark.parametrize("name", TABLE_3)
def test_flames_table_is_whole(name: str) -> None:
    cells = numbers(name)
    assert len(cells) == 7 * ROWS[name.rpartition("-")[2]]
    assert all(number.std is not None and number.std > 0 for number in cells.values())


def test_the_hybrid_is_the_best_of_every_row() -> None:
    table = table_3(*TABLE_3)
    assert table.shape == (37, 7)
    assert (table[:, :1] >= table[:, 1:]).all()


def test_flames_personal_and_global_models_are_above_the_others_in_every_row() -> None:
    _, personal, shared, *others = table_3(*TABLE_3).T
    assert (personal > others[0]).all() and (personal > others[2]).all()
    assert (shared > others[1]).all() and (shared > others[3]).all()


def test_flames_mean_gains_are_those_of_the_prose() -> None:
    _, personal, shared, pfedme, pfedme_global, ditto, ditto_global = 100 * table_3(*TABLE_3).T
    assert np.mean(personal - (pfedme + ditto) / 2) == pytest.approx(3.94, abs=0.005)  # "3.9 % more accurate"
    # The prose has 14.2; the printed columns give 14.36, so that a digit of these may be another.
    assert np.mean(shared - (pfedme_global + ditto_global) / 2) == pytest.approx(14.2, abs=0.2)


def test_the_hybrids_gain_under_hybrid_skew_is_that_of_the_prose() -> None:
    hybrid, personal, shared = 100 * table_3("flame-table3-hybrid").T[:3]
    assert np.mean(hybrid - (personal + shared) / 2) == pytest.approx(4.22, abs=0.005)  # "an average of 4.2 %"


@pytest.mark.parametrize(("name", "sign"), [("label", 1), ("quantity", -1), ("feature", -1)])
def test_which_of_flames_models_is_ahead_under_which_skew(name: str, sign: int) -> None:
    _, personal, shared = table_3(f"flame-table3-{name}").T[:3]
    assert (sign * (personal - shared) > 0).all()


def test_under_quality_skew_only_fashion_mnist_and_cifar_have_a_better_global_model() -> None:
    cells = numbers("flame-table3-quality")
    ahead = {
        part: cells[part, setting, "FLAME", "GM"].mean > number.mean
        for (part, setting, method, reading), number in cells.items()
        if (method, reading) == ("FLAME", "PM")
    }
    assert ahead == {"mnist": False, "fmnist": True, "mmnist": False, "cifar10": True}


@pytest.mark.parametrize("name", TABLE_3)
def test_dittos_global_model_is_no_target(name: str) -> None:
    for part in load(name).parts:
        reasons = {
            (cell.method, cell.reading): not_target(part, cell)
            for cell in paper_numbers(part)
            if cell.method != "pFedMe"
        }
        assert reasons["Ditto", "GM"] and not reasons["Ditto", "PM"]
        assert bool(reasons["FLAME", "HM"]) == (part.name == "femnist")


@pytest.mark.parametrize(
    ("names", "clients", "lam", "epochs", "rho"),
    [
        ((*TABLE_3, "flame-figure3", "flame-figure8"), 10, {1.0}, {1}, {0.1}),
        (("flame-figure4", "flame-figure5", "flame-figure6", "flame-figure7"), 50, {1.0}, {1}, {0.02}),
        (("flame-figure9",), 10, {1.0, 3.0, 5.0}, {3}, {0.1}),
        (("flame-figure10",), 10, {5.0}, {1, 5, 10}, {0.1}),
        (("flame-figure11",), 10, {3.0}, {3}, {0.1, 0.5, 1.0}),
        (("flame-figure12",), 100, {3.0}, {3}, {0.03}),
    ],
)
def test_flame_has_the_papers_parameters(
    names: tuple[str, ...], clients: int, lam: set[float], epochs: set[int], rho: set[float]
) -> None:
    for name in names:
        for part in load(name).parts:
            runs = [run.config for run in planned(part).runs if run.config.algorithm == "flame"]
            assert {config.clients for config in runs} == {clients} and {config.rounds for config in runs} == {100}
            assert {config.seed for config in runs} == {1, 10, 100, 1000, 10000}
            found = {key: {config.settings[key] for config in runs} for key in ("lam", "local_epochs", "rho", "lr")}
            assert found == {"lam": lam, "local_epochs": epochs, "rho": rho, "lr": {0.01}}
            assert all(_has_the_programs_preset(config) for config in runs)


def _has_the_programs_preset(config: ExperimentConfig) -> bool:
    wanted = {"batch_size": 100, "momentum": 0.5, "weight_decay": 0.01, "centre": "global"}
    return wanted.items() <= config.settings.items()


@pytest.mark.parametrize("figure", [4, 5, 6, 7])
def test_attacks_are_by_the_papers_fractions(figure: int) -> None:
    kind = {4: "label_poisoning", 5: "same_value", 6: "sign_flip", 7: "gaussian"}[figure]
    for part in load(f"flame-figure{figure}").parts:
        plan = planned(part)
        assert plan.grid == {"attack": [f"{kind}:{fraction}" for fraction in (0, 0.2, 0.5, 0.8)]}
        assert plan.methods == ("FLAME", "pFedMe", "Ditto", "multi-Krum")


# FedPG


def test_fedpgs_tables_are_whole() -> None:
    # Local and FedAMP have no global model.
    assert len(numbers("fedpg-table1")) == 3 * (17 * 4 - 2)
    assert len(numbers("fedpg-table2")) == 2 * 5 * 4


@pytest.mark.parametrize(
    ("method", "percents"),
    [  # for pFedMe on CIFAR-100 the prose repeats APFL's 21.4
        ("APFL", {"fmnist": 12.3, "cifar10": 12.0, "cifar100": 21.4}),
        ("pFedMe", {"fmnist": 4.6, "cifar10": 6.0}),
    ],
)
def test_what_personal_models_lose_is_what_the_prose_says(method: str, percents: dict[str, float]) -> None:
    cells = numbers("fedpg-table1")
    for part, percent in percents.items():
        whole, kept = (cells[part, "", method, reading].mean for reading in ("GM", "G"))
        assert 100 * (whole - kept) / whole == pytest.approx(percent, abs=0.1)


@pytest.mark.parametrize("part", ["fmnist", "cifar10", "cifar100"])
@pytest.mark.parametrize("reading", ["S", "G"])
def test_every_fedpg_is_above_every_other_method_on_others_samples(part: str, reading: str) -> None:
    cells = {
        key[2]: number.mean for key, number in numbers("fedpg-table1").items() if (key[0], key[3]) == (part, reading)
    }
    ours = [cells.pop(name) for name in FEDPG]
    assert len(cells) == 12 and min(ours) > max(cells.values())


@pytest.mark.parametrize("part", ["fmnist", "cifar10", "cifar100"])
def test_more_drift_fits_clients_better_and_others_worse(part: str) -> None:
    cells = numbers("fedpg-table1")
    own, others = (
        [cells[part, "", name, reading].mean for name in FEDPG if name != "S-FedPG"] for reading in ("L", "G")
    )
    assert own == sorted(own) and others == sorted(others, reverse=True)
    assert len({cells[part, "", name, "GM"].mean for name in FEDPG if name != "S-FedPG"}) == 1  # drift leaves it alone


def test_on_fashion_mnist_fedamp_has_locals_numbers() -> None:
    cells = numbers("fedpg-table1")
    assert all(cells["fmnist", "", "FedAMP", key] == cells["fmnist", "", "Local", key] for key in ("L", "S", "G"))
    assert not_target(load("fedpg-table1").part("fmnist"), next(iter(_cells("fedpg-table1", "fmnist", "FedAMP"))))


def _cells(name: str, part: str, method: str) -> list[CellName]:
    return [cell for cell in paper_numbers(load(name).part(part)) if cell.method == method]


def test_without_a_common_direction_the_global_model_falls_as_the_prose_says() -> None:
    cells = numbers("fedpg-table2")
    found = [cells["cifar10", "", name, "GM"].mean for name in ("M1", "FedPG")]
    assert found == [0.563, 0.741]  # "decreased to 56.3 % on CIFAR-10, … FedPG (74.1 %)"
    for reading, std in (("L", 0.071), ("S", 0.053), ("G", 0.055), ("GM", 0.057)):
        assert cells["fmnist", "", "M2", reading].std == std  # the table prints them in a second line


def test_fedpgs_curves_pass_through_the_tables_numbers() -> None:
    table, curve = numbers("fedpg-table1"), numbers("fedpg-figure4")
    assert {key[3] for key in curve} == {"0 %", "50 %", "100 %"}
    for (part, setting, method, reading), number in curve.items():
        assert number == table[part, setting, method, {"0 %": "L", "50 %": "S", "100 %": "G"}[reading]]


# FedACS


def test_fedacs_rises_with_alpha_in_its_table() -> None:
    cells = numbers("fedacs-table2")
    for part in ("cifar10", "fmnist"):
        found = [cells[part, f"α = {alpha}", "FedACS", "accuracy"].mean for alpha in (0.1, 0.5, 1, 5, 10)]
        assert found == sorted(found) and len({*found}) == 5
    assert len(cells) == 10


def test_fedacs_has_the_same_number_in_both_tables() -> None:
    first, second = numbers("fedacs-table1"), numbers("fedacs-table2")
    for part in ("cifar10", "fmnist"):
        assert first[part, "", "FedACS", "P"] == second[part, "α = 0.5", "FedACS", "accuracy"]
    assert len(first) == 2 * (5 + 1)


def test_no_single_model_fits_all_clients_of_cifar() -> None:
    cells = numbers("fedacs-table1")
    alone = cells["cifar10", "", "Local", "P"].mean
    assert all(cells["cifar10", "", method, "G"].mean < alone / 1.9 for method in ("Ditto", "PerAvg"))
