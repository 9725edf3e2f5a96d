"""The protocol is fair: as many candidates, the same budget, the same samples and seeds for all."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.algorithms import registry
from coterie.errors import ConfigError, UnknownName
from coterie.studies.leaderboard.protocol import OURS, load
from coterie.yaml_file import read_yaml

RULES = load()
ONE_GRADIENT = {"fedsgd", "sfedpg"}  # whose round is one gradient of all samples


def test_all_methods_take_part() -> None:
    assert sorted(RULES.methods) == registry.names()


@pytest.mark.parametrize("presence", ["all", "tenth", "late"])
def test_every_method_has_the_same_candidates_seeds_and_budget(presence: str) -> None:
    setting = RULES.setting(f"fmnist-shards-{presence}")
    for method in RULES.methods:
        plan = RULES.plan(setting, method)
        assert len(plan.runs) == 9 * 3, method
        assert len({tuple(run.candidate.items()) for run in plan.runs}) == 9, method
        assert {run.config.seed for run in plan.runs} == {1, 10, 100}
        for run in plan.runs:
            assert "lr" in run.candidate, method
            own = registry.make(method, run.config.settings).settings()
            epochs = own.get("local_epochs", 0) + own.get("head_epochs", 0)
            if method in ONE_GRADIENT:
                assert own.get("grad_mode", "full") == "full"
            else:
                assert (epochs, own["batch_size"], own.get("momentum", 0)) == (3, 50, 0), method
                assert own.get("inner_steps", 1) == 1 and own.get("least_epochs", 3) == 3
            assert own.get("grad_mode", "pseudo") == ("full" if method == "sfedpg" else "pseudo")
        shared = {
            (run.config.rounds, run.config.validation, run.config.scarcity, run.config.max_test) for run in plan.runs
        }
        assert shared == {(100, 0.2, 600, 500)}


def test_settings_are_all_combinations_and_know_their_fields() -> None:
    assert len(RULES.settings) == 2 * 4 * 3
    found = RULES.setting("cifar10-dir0.1-tenth")
    assert (found.place, found.partition) == ("CIFAR-10, 100 clients, a tenth present", "Dirichlet 0.1")
    assert found.fields["participation"] == 0.1 and found.fields["partition"] == "dirichlet:0.1"
    with pytest.raises(UnknownName, match=r"fmnist-dir0\.2-all"):
        RULES.setting("fmnist-dir0.2-all")


def test_a_method_of_ones_own_has_as_many_candidates() -> None:
    found = RULES.with_method("mine.py", {"lr": [0.1, 0.2, 0.3], "mu": [1, 2, 3]}, {}).contestant("mine.py")
    assert found.candidates == 9
    assert RULES.with_method("mine.py", {}, {}).contestant("mine.py").tune == {"lr": RULES.rates}
    with pytest.raises(ConfigError, match=r"'mine.py' would be tuned over 2 combinations, but every method has 9"):
        RULES.with_method("mine.py", {"lr": [0.1, 0.2]}, {})


def test_a_file_that_favours_a_method_is_refused(tmp_path: Path) -> None:
    text = OURS.read_text(encoding="utf-8").replace("lr: [0.01, 0.05, 0.2], p: [", "lr: [0.01], p: [")
    (tmp_path / "own.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"'own.yaml': the method 'fedacs' would be tuned over 3 combinations"):
        load(tmp_path / "own.yaml")
    del (values := read_yaml(OURS))["budget"]
    (tmp_path / "less.yaml").write_text(str(values), encoding="utf-8")
    with pytest.raises(ConfigError, match="budget"):
        load(tmp_path / "less.yaml")
