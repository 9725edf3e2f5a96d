"""Comparisons: plans, runs that are stopped anywhere and go on, tuning, marks, and tables that others can read."""

from __future__ import annotations

import csv
import io
import itertools
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from rich.console import Console
from torch import Tensor
from typer.testing import CliRunner

from coterie import api
from coterie.cli.app import app
from coterie.config import ExperimentConfig
from coterie.errors import (
    AlgorithmError,
    ConfigError,
    CoterieError,
    CoterieWarning,
    Interrupted,
    ModelError,
    RunFolderError,
)
from coterie.results import Result, client_scores
from coterie.results.figures import Line
from coterie.results.report import tables as report_tables
from coterie.results.report.sources import read_runs
from coterie.runs.experiment import Experiment
from coterie.runs.storage.atomic_files import read_json, write_json
from coterie.simulation.processes import OneProcess
from coterie.simulation.simulation import Simulation
from coterie.studies.comparison import (
    ComparisonPlan,
    PlannedRun,
    Standings,
    chosen_runs,
    compare,
    csv_text,
    load_results,
    make_plan,
    runner,
    table,
    workers,
)
from coterie.studies.comparison import together as together_module
from coterie.studies.comparison.standings import Tuned, standings
from tests.small_runs import SMALL, Killed

SHARED: dict[str, Any] = {**SMALL, "rounds": 3, "threads": 1, "local_epochs": 1}
BOTH = {"methods": ["fedacs", "fedavg"], "seeds": [1, 10], **SHARED}
TABLES = ("table.md", "table.tex", "table.csv")


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "all"
    compare(make_plan(BOTH), path, progress=False)
    return path


def assert_same_tables(one: Path, two: Path) -> None:
    for name in TABLES:
        assert (one / name).read_bytes() == (two / name).read_bytes()


# ----------------------------------------------------------------------------------------------------- stopped anywhere


def test_stopped_between_runs_it_goes_on_and_repeats_nothing(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    play_config = api.play_config

    def counting(config: ExperimentConfig, processes: OneProcess | None, **more: Any) -> Result:
        if len(begun) == 2:
            raise KeyboardInterrupt
        begun.append(Path(more["out"]).name)
        return play_config(config, processes, **more)

    path = tmp_path / "all"
    with monkeypatch.context() as patched, pytest.raises(Interrupted, match=r"2 of 4 runs .* the same command"):
        patched.setattr(api, "play_config", counting)
        patched.setattr("coterie.studies.comparison.together.WIDEST", 2)
        compare(make_plan(BOTH), path, progress=False)
    assert begun == ["fedacs-seed1", "fedacs-seed10"] and not (path / "table.md").exists()
    kept = {name: (path / "runs" / name / "summary.json").stat().st_mtime_ns for name in begun}
    compare(make_plan(BOTH), path, progress=False)
    assert kept == {name: (path / "runs" / name / "summary.json").stat().st_mtime_ns for name in begun}
    assert_same_tables(whole, path)
    monkeypatch.setattr(api, "play_config", counting)
    monkeypatch.setattr(api, "play_on", counting)
    compare(make_plan(BOTH), path, progress=False)  # would be interrupted if anything were run again
    assert_same_tables(whole, path)


@pytest.mark.parametrize("error", [KeyboardInterrupt, Killed])
def test_stopped_within_runs_it_ends_with_the_same_table(
    error: type[BaseException], whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    play_round = Simulation.play_round

    def stopping(self: Simulation, clients: Tensor, round_number: int) -> Any:
        info = play_round(self, clients, round_number)
        if (self.algorithm.name, self.engine.seed, round_number) == ("fedavg", 1, 2):  # the third run of four
            raise error
        return info

    path = tmp_path / "all"
    with monkeypatch.context() as patched, pytest.raises(Interrupted if error is KeyboardInterrupt else error):
        patched.setattr(Simulation, "play_round", stopping)
        if error is Killed:
            patched.setattr(Experiment, "keep", lambda self: None)
        compare(make_plan(BOTH), path, progress=False)
    names = [run.name for run in make_plan(BOTH).runs]
    assert all((path / "runs" / name / "config.yaml").exists() for name in names)
    assert not any((path / "runs" / name / "summary.json").exists() for name in names)
    compare(make_plan(BOTH), path, progress=False)
    assert_same_tables(whole, path)
    for name in names:
        metrics = [place / "runs" / name / "metrics.parquet" for place in (whole, path)]
        assert metrics[0].read_bytes() == metrics[1].read_bytes()


def test_side_by_side_gives_the_same_table_and_stops_likewise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan({**BOTH, "seeds": [1], "rounds": 150})
    turn, side = tmp_path / "turn", tmp_path / "side"
    compare(plan, turn, together=False, progress=False)
    with monkeypatch.context() as patched, pytest.raises(Interrupted, match=r"0 of 2 runs .* the same command"):
        patched.setattr("coterie.studies.progress.PartProgress.round_ended", interrupt_after_a_round)
        compare(plan, side, jobs=2, progress=False)
    assert any((side / "runs" / run.name / "checkpoint").is_dir() for run in plan.runs)
    compare(plan, side, jobs=2, progress=False)
    assert_same_tables(turn, side)
    for run in plan.runs:
        metrics = [place / "runs" / run.name / "metrics.parquet" for place in (turn, side)]
        assert metrics[0].read_bytes() == metrics[1].read_bytes()


def test_runs_of_one_shape_play_together_unless_they_are_to_be_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[int] = []
    together = together_module.run_together

    def counting(runs: Sequence[PlannedRun], *rest: Any) -> Any:
        met.append(len(runs))
        return together(runs, *rest)

    monkeypatch.setattr(together_module, "run_together", counting)
    words = [word for name, value in SHARED.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    for place, (options, expected) in enumerate(((["--apart"], []), ([], [4]))):
        command = ["compare", "fedacs", "fedavg", "--seeds", "1", "10", *words, "--quiet", *options]
        assert CliRunner().invoke(app, [*command, "--out", str(tmp_path / str(place))]).exit_code == 0
        assert met == expected


def test_as_many_processes_as_pay_are_started_where_nothing_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[tuple[int, list[str]]] = []
    turn = workers.play_groups

    def counting(groups: Sequence[Sequence[PlannedRun]], play: Any, count: int, round_ended: Any) -> Any:
        met.append((count, [run.name for group in groups for run in group]))
        return turn([[run] for group in groups for run in group], play, 1, round_ended)

    monkeypatch.setattr(runner, "play_groups", counting)
    monkeypatch.setattr(workers, "usable_cores", lambda: 8)
    monkeypatch.setattr(workers, "free_memory", lambda: 2**40)
    plan = make_plan(BOTH)
    for place, (worth, jobs, count) in enumerate(((1, None, 4), (10**6, None, 1), (1, 1, 1), (10**6, 3, 3))):
        monkeypatch.setattr(workers, "_WORTH_A_START", worth)
        compare(plan, tmp_path / f"{place}", jobs=jobs, progress=False)
        assert met.pop() == (count, [run.name for run in plan.runs] if count < 3 else met_by_seed(plan))


def met_by_seed(plan: ComparisonPlan) -> list[str]:
    return [run.name for seed in plan.seeds for run in plan.runs if run.config.seed == seed]


def interrupt_after_a_round(self: Any, run: PlannedRun, round_number: int, mean: float | None) -> None:
    if round_number:
        raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"seeds": [1, 2]}, r"seeds: \[1, 10\] there, \[1, 2\] here"),
        ({"methods": ["fedacs", "local"]}, "methods: "),
        ({"rounds": 4}, "rounds of fedacs-seed1: 3 there, 4 here"),
        ({"lr": 0.3}, "settings of fedacs-seed1: "),
    ],
)
def test_another_plan_is_refused(change: dict[str, Any], said: str, whole: Path) -> None:
    with pytest.raises(RunFolderError, match=said) as refused:
        compare(make_plan({**BOTH, **change}), whole, progress=False)
    assert "\n" not in str(refused.value)


def test_a_plan_may_grow(whole: Path, tmp_path: Path) -> None:
    """What is there is not played again, and all ends as if it had been asked for at once."""
    shutil.copytree(whole, tmp_path / "grown")
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "grown").glob("runs/*/summary.json")}
    assert len(stamps) == 4
    more = {**BOTH, "methods": ["local", "fedacs", "fedavg"], "seeds": [1, 2, 10]}
    found = compare(make_plan(more), tmp_path / "grown", progress=False)
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}
    at_once = compare(make_plan(more), tmp_path / "at once", progress=False)
    assert csv_text(found) == csv_text(at_once)
    for name in TABLES:
        assert (tmp_path / "grown" / name).read_bytes() == (tmp_path / "at once" / name).read_bytes()
    with pytest.raises(RunFolderError, match=r"methods: .*, which may have more methods, seeds and values, or choose"):
        compare(make_plan(BOTH), tmp_path / "grown", progress=False)


def test_a_plan_is_mended_where_a_run_diverged(tmp_path: Path) -> None:
    folder = tmp_path / "mended"

    def play(lr: float | None, folder: Path = folder) -> Standings:
        methods = ["fedavg"] if lr is None else ["fedavg", {"algorithm": "fedacs", "settings": {"lr": lr}}]
        return compare(make_plan({**BOTH, "seeds": [1], "methods": methods}), folder, progress=False)

    assert list(play(1e30).diverged) == ["FedACS"] and read_json(folder / "diverged.json").keys() == {"fedacs-seed1"}
    stamp = (folder / "runs/fedavg-seed1/summary.json").stat().st_mtime_ns
    for lr, place in ((1e31, "fedacs-seed1"), (0.1, "fedacs-seed1-2")):
        with pytest.warns(
            CoterieWarning, match=f"no longer as it was planned: what it left is in .*set_aside/{place}$"
        ):
            found = play(lr)
    assert not found.diverged and read_json(folder / "diverged.json") == {}
    assert csv_text(found) == csv_text(play(0.1, tmp_path / "at once"))
    assert (folder / "runs/fedavg-seed1/summary.json").stat().st_mtime_ns == stamp
    with pytest.raises(RunFolderError, match="another plan"):  # what has ended well is not set aside
        play(0.2)


def test_a_run_that_diverged_may_be_left_out(tmp_path: Path) -> None:
    methods = ["fedavg", {"algorithm": "fedacs", "settings": {"lr": 1e30}}]
    compare(make_plan({**BOTH, "seeds": [1], "methods": methods}), tmp_path / "out", progress=False)
    with pytest.warns(CoterieWarning, match="set_aside/fedacs-seed1$"):
        found = compare(make_plan({**BOTH, "seeds": [1], "methods": ["fedavg"]}), tmp_path / "out", progress=False)
    assert [path.name for path in (tmp_path / "out/runs").iterdir()] == ["fedavg-seed1"]
    assert [row.title for row in found.rows] == ["FedAvg"] and not found.diverged


def test_a_comparison_in_which_all_diverged_is_an_error(tmp_path: Path) -> None:
    words = [word for name, value in SHARED.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = ["compare", "fedavg", "local", *words, "--lr", "1e30", "--out", str(tmp_path / "out")]
    ended = CliRunner().invoke(app, command)
    assert isinstance(ended.exception, CoterieError) and "all runs diverged" in str(ended.exception)
    assert "FedAvg diverged: round 1" in (tmp_path / "out" / "table.md").read_text()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ronds": 3}, "no field or parameter of a comparison called 'ronds': did you mean 'rounds'"),
        ({"methods": None, "method": ["fedavg"]}, "called 'method': did you mean 'methods'"),
        ({"methods": None}, "methods is missing, but must list at least one method"),
        ({"momentun": 0.5}, "called 'momentun': did you mean 'momentum'"),
    ],
)
def test_a_misspelt_name_is_told_with_the_nearest(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make_plan({**BOTH, **change})


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(RunFolderError, match="holds no comparison"):
        compare(make_plan(BOTH), tmp_path, progress=False)


# ---------------------------------------------------------------------------------------------------- numbers and marks


class Found(Result):
    """A finished run whose numbers are given."""

    def __init__(self, config: Mapping[str, Any], test: Sequence[float], validation: Sequence[float] = (0.0,)) -> None:
        self._path, self._config = Path("nowhere"), dict(config)
        rows = [
            (1, client, "personal", split, "accuracy", value)
            for split, values in (("test", test), ("validation", validation))
            for client, value in enumerate(values)
        ]
        self.metrics = pd.DataFrame(rows, columns=["round", "client", "model", "split", "metric", "value"])
        self.shares = pd.DataFrame({"client": range(len(test)), "role": "honest", "test": 20})
        self._given = {
            "metric": "accuracy",
            "higher_is_better": True,
            "personal": {"final": {"mean": sum(test) / len(test)}},
            "global": None,
        }

        self.answers = None

    @property
    def summary(self) -> dict[str, Any]:
        return self._given


def two_methods(best: Mapping[int, list[float]], other: Mapping[int, list[float]]) -> Standings:
    plan = make_plan({**BOTH, "seeds": list(best)})
    scores = {"fedacs": best, "fedavg": other}
    results = {run.name: Found(run.config.plain(), scores[run.method][run.config.seed]) for run in plan.runs}
    return standings(plan, results)


def exact(differences: Sequence[float]) -> float:
    """Two-sided p-value of the signed-rank test: how many of all choices of signs are at least as one-sided."""
    order = sorted(range(len(differences)), key=lambda place: abs(differences[place]))
    ranks = {place: rank for rank, place in enumerate(order, 1)}
    total = sum(ranks.values())

    def smaller(signs: Sequence[bool]) -> int:
        up = sum(ranks[place] for place, sign in enumerate(signs) if sign)
        return min(up, total - up)

    seen = smaller([difference > 0 for difference in differences])
    every = [smaller(signs) for signs in itertools.product((False, True), repeat=len(differences))]
    return sum(value <= seen for value in every) / len(every)


@pytest.mark.parametrize(
    ("differences", "mark"),
    [
        ({1: [0.01, 0.02, 0.03], 2: [0.04, 0.05, 0.06]}, "*"),  # 2/2⁶ = 0.031
        ({1: [0.01, 0.02, 0.03, 0.04], 2: [0.05, 0.06, 0.07, 0.08]}, "**"),  # 2/2⁸ = 0.0078
        ({1: [0.01 * k for k in range(1, 12)]}, "***"),  # 2/2¹¹ = 0.00098
        ({1: [0.01, 0.02, 0.03, -0.04], 2: [0.05, 0.06, -0.015, 0.08]}, ""),
    ],
)
def test_marks(differences: dict[int, list[float]], mark: str) -> None:
    best = {seed: [0.5 + value for value in values] for seed, values in differences.items()}
    found = two_methods(best, {seed: [0.5] * len(values) for seed, values in differences.items()})
    first, second = (row.scores["personal"] for row in found.rows)
    assert first.best and math.isnan(first.pvalue) and first.mark == ""
    pooled = [value for values in differences.values() for value in values]
    assert not second.best and second.pvalue == pytest.approx(exact(pooled), rel=1e-12)
    assert second.mark == mark
    means = [0.5 + sum(values) / len(values) for values in differences.values()]
    assert first.mean == pytest.approx(sum(means) / len(means), rel=1e-12)
    if len(means) == 2:  # the deviation of two numbers is their difference over the root of 2
        assert first.std == pytest.approx(abs(means[0] - means[1]) / math.sqrt(2), rel=1e-9)
    else:
        assert math.isnan(first.std)


def test_equal_methods_are_both_best() -> None:
    found = two_methods({1: [0.5, 0.7]}, {1: [0.5, 0.7]})
    assert [row.scores["personal"].best for row in found.rows] == [True, True]


def test_tuning_chooses_on_validation_and_not_on_test_data() -> None:
    plan = make_plan({**BOTH, "methods": ["fedavg"], "tune": {"lr": [0.1, 0.2, 0.3]}})
    validation = {(0.1, 1): 0.5, (0.1, 10): 0.5, (0.2, 1): 0.9, (0.2, 10): 0.3, (0.3, 1): 0.8, (0.3, 10): 0.2}
    results: dict[str, Result | None] = {
        run.name: Found(
            run.config.plain(), [run.candidate["lr"]] * 2, [validation[run.candidate["lr"], run.config.seed]]
        )
        for run in plan.runs
    }
    assert all(run.config.settings["lr"] == run.candidate["lr"] for run in plan.runs)
    found = standings(plan, results)
    (tuned,) = found.tuning
    assert tuned.chosen == {"lr": 0.2} == found.rows[0].tuned  # 0.6 on average; on test data it would be 0.3
    assert [score for _, score in tuned.scores] == pytest.approx([0.5, 0.6, 0.5])
    assert found.rows[0].scores["personal"].mean == pytest.approx(0.2)
    assert tuned.sentence().startswith("FedAvg: chose lr=0.2 on validation data")
    results["fedavg-lr-0.2-seed1"] = None  # diverged
    found = standings(plan, results)
    assert found.tuning[0].chosen == {"lr": 0.1} and "lr=0.2: diverged" in found.tuning[0].sentence()


def test_a_method_may_be_tuned_by_itself() -> None:
    """Its own values stand in place of those of all methods for the same parameter, and beside them for others."""
    methods: list[Any] = [
        "fedavg",
        {"algorithm": "fedacs", "tune": {"p": [0.0, 0.5]}},
        {"algorithm": "fedprox", "tune": {"lr": [0.01]}},
    ]
    values = {**BOTH, "methods": methods, "seeds": [1], "tune": {"lr": [0.1, 0.2]}}
    found: dict[str, list[dict[str, Any]]] = {}
    for run in make_plan(values).runs:
        found.setdefault(run.method, []).append(run.candidate)
        assert run.candidate.items() <= run.config.settings.items()
    assert found == {
        "fedavg": [{"lr": 0.1}, {"lr": 0.2}],
        "fedacs": [{"lr": lr, "p": p} for lr in (0.1, 0.2) for p in (0.0, 0.5)],
        "fedprox": [{"lr": 0.01}],
    }
    alone = make_plan({**values, "tune": None})
    assert [run.candidate for run in alone.runs] == [{}, {"p": 0.0}, {"p": 0.5}, {"lr": 0.01}]


@pytest.mark.parametrize(
    ("tune", "more", "words"),
    [
        ({"mu": [0.1, 1.0]}, {}, "mu"),
        ({"p": [0.5, 0.5]}, {}, "each once"),
        ({"p": [0.0, 0.5]}, {"grid": {"p": [0.1, 0.2]}}, "tunes p, which grid varies"),
        ({"p": [0.0, 0.5]}, {"validation": 0}, "validation is 0"),
    ],
)
def test_refuses_a_methods_own_tuning_that_cannot_be(tune: Any, more: dict[str, Any], words: str) -> None:
    with pytest.raises(CoterieError, match=words):
        make_plan({**BOTH, "methods": [{"algorithm": "fedacs", "tune": tune}], **more})
    with pytest.raises(CoterieError, match="sets p, which tune varies"):
        make_plan({**BOTH, "methods": [{"algorithm": "fedacs", "settings": {"p": 0.5}, "tune": {"p": [0.0, 0.5]}}]})


def test_an_optimum_at_the_edge_of_what_was_tried_is_told() -> None:
    def edges(chosen: dict[str, Any] | None, *tried: dict[str, Any]) -> tuple[str, ...]:
        return Tuned({}, "FedAvg", chosen, [(each, 0.5) for each in tried]).edges

    rates = [{"lr": 0.1}, {"lr": 1}, {"lr": 0.5}]
    assert edges({"lr": 0.5}, *rates) == ()
    assert edges({"lr": 0.1}, *rates) == ("lr=0.1 is the least that was tried",)
    assert edges({"lr": 1}, *rates) == ("lr=1 is the greatest that was tried",)
    assert edges({"lr": 0.1}, {"lr": 0.1}) == () == edges(None, *rates)  # no grid has an edge of one value
    assert edges({"on": True}, {"on": True}, {"on": False}) == () == edges({"w": "a"}, {"w": "a"}, {"w": "b"})
    both = [{"lr": rate, "mu": mu} for rate in (0.1, 0.2, 0.3) for mu in (1.0, 2.0)]
    assert edges({"lr": 0.2, "mu": 2.0}, *both) == ("mu=2.0 is the greatest that was tried",)
    assert (
        Tuned({}, "FedAvg", {"lr": 1}, [(each, 0.5) for each in rates])
        .sentence()
        .endswith("; " + edges({"lr": 1}, *rates)[0])
    )


def test_what_diverges_is_said_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {**BOTH, "methods": ["fedavg", "local"], "seeds": [1], "rounds": 4, "batch_size": 1}
    plan = make_plan({**values, "tune": {"lr": [0.1, 4000.0]}})
    found = compare(plan, tmp_path / "all", progress=False)
    assert [row.tuned for row in found.rows] == [{"lr": 0.1}] * 2
    assert set(read_json(tmp_path / "all/diverged.json")) == {"fedavg-lr-4000.0-seed1", "local-lr-4000.0-seed1"}
    monkeypatch.setattr(api, "play_config", None)
    monkeypatch.setattr(api, "play_on", None)
    assert csv_text(compare(plan, tmp_path / "all", progress=False)) == csv_text(found)


def test_where_all_diverge_the_table_says_why(tmp_path: Path) -> None:
    values = {**BOTH, "methods": ["fedavg", "local"], "seeds": [1], "rounds": 4, "batch_size": 1, "lr": 4000.0}
    shown = table(compare(make_plan(values), tmp_path / "all", progress=False))
    sentences = read_json(tmp_path / "all/diverged.json")
    assert shown.title == "all runs diverged"
    assert [column.header for column in shown.columns] == ["method", "result"]
    assert [[str(getattr(cell, "text", cell)) for cell in row.cells] for row in shown.rows] == [
        ["FedAvg", "diverged"],
        ["Local", "diverged"],
    ]
    assert shown.notes == tuple(
        f"{name} diverged: {sentences[f'{name.lower()}-seed1']}" for name in ("FedAvg", "Local")
    )


FAILING = '''
from coterie.algorithms.fedavg import FedAvg


class Failing(FedAvg):
    """Averages until it does not."""

    name = "failing"
    title = "Failing"
    last: int = 1

    def round(self, server, cohort):
        if cohort.round > self.last:
            raise ValueError("it is out of order")
        return (yield from super().round(server, cohort))
'''


@pytest.mark.parametrize("how", [{}, {"together": False}, {"jobs": 2}], ids=["together", "in turn", "side by side"])
def test_a_run_that_fails_leaves_the_others_alone(how: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FAILING, encoding="utf-8")
    methods: list[Any] = [{"algorithm": f"{tmp_path / 'mine.py'}", "name": "mine"}, "fedavg", "local"]
    plan = make_plan({**BOTH, "methods": methods, "seeds": [1, 2]})
    with pytest.raises(
        ConfigError, match=r"2 of 6 runs failed, the first of them mine-seed[12]: .*out of order.*the others"
    ):
        compare(plan, tmp_path / "some", progress=False, **how)
    finished = {path.parent.name for path in (tmp_path / "some/runs").glob("*/summary.json")}
    assert finished == {"fedavg-seed1", "fedavg-seed2", "local-seed1", "local-seed2"}
    shown = (tmp_path / "some/table.md").read_text()
    assert re.search(r"\| mine \| failed \|", shown) and re.search(
        r"mine failed: in 2 of 2 runs, first .*out of order", shown
    )
    assert not (tmp_path / "some/standings.json").exists()
    mended = make_plan({**BOTH, "methods": [{**methods[0], "settings": {"last": 9}}, *methods[1:]], "seeds": [1, 2]})
    with pytest.warns(CoterieWarning, match="set_aside/mine-seed"):
        found = compare(mended, tmp_path / "some", progress=False)
    assert all(row.scores for row in found.rows) and read_json(tmp_path / "some/failed.json") == {}


def test_numbers_that_yaml_takes_for_words_are_numbers() -> None:
    """PyYAML reads 1e-2 as text, as it has no point."""
    plan = make_plan(
        {**BOTH, "tune": yaml.safe_load("lr: [1e-2, 0.1]"), "grid": {"mu": ["1E+1"]}, "methods": ["fedprox"]}
    )
    assert plan.tune == {"lr": [0.01, 0.1]} and plan.grid == {"mu": [10.0]}
    with pytest.raises(ConfigError, match="each once"):
        make_plan({**BOTH, "tune": {"lr": ["1e-2", 0.01]}})


def test_a_script_that_its_own_workers_read_again_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "import coterie.studies.comparison as c\n"
        f"plan = c.make_plan({BOTH!r})\n"
        "c.compare(plan, 'out', jobs=2, progress=False)\n",
        encoding="utf-8",
    )
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode and 'put the call below if __name__ == "__main__"' in done.stderr
    assert "is in use by another process" not in done.stderr


def test_a_run_that_fails_before_anything_was_played_ends_all_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FAILING, encoding="utf-8")
    methods = [{"algorithm": f"{tmp_path / 'mine.py'}", "name": "mine", "settings": {"last": 0}}, "fedavg"]
    plan = make_plan({**BOTH, "methods": methods, "seeds": [1]})
    with pytest.raises(AlgorithmError, match="it is out of order"):
        compare(plan, tmp_path / "none", together=False, progress=False)
    assert not list((tmp_path / "none/runs").glob("*/summary.json"))


def test_what_is_refused_before_any_run_has_a_folder_leaves_none_behind(tmp_path: Path) -> None:
    plan = {**BOTH, "methods": ["fedavg"], "seeds": [1]}
    refused = make_plan({**plan, "model": "import:nowhere:Net"})
    with pytest.raises(ModelError, match="nowhere"):
        compare(refused, tmp_path / "some", progress=False)
    assert not (tmp_path / "some").exists()
    (tmp_path / "mine").mkdir()
    with pytest.raises(ModelError, match="nowhere"):
        compare(refused, tmp_path / "mine", progress=False)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [".lock"], "a folder that was there stays"
    compare(make_plan({**plan, "rounds": 1}), tmp_path / "some", progress=False)
    (tmp_path / "mine.py").write_text(FAILING, encoding="utf-8")
    failing = {"algorithm": f"{tmp_path / 'mine.py'}", "name": "mine", "settings": {"last": 0}}
    with pytest.raises(ConfigError, match="out of order"):
        compare(make_plan({**plan, "rounds": 1, "methods": ["fedavg", failing]}), tmp_path / "some", progress=False)
    assert (tmp_path / "some/runs/fedavg-seed1/summary.json").exists(), "what was there before stays"


def test_what_was_said_of_runs_that_are_over_or_gone_is_forgotten(tmp_path: Path) -> None:
    plan = {**BOTH, "methods": ["fedavg"], "seeds": [1], "rounds": 1}
    compare(make_plan(plan), tmp_path / "some", progress=False)
    # As where a process is killed between the end of a run that had failed before, and what crosses it out.
    write_json(tmp_path / "some/failed.json", {"fedavg-seed1": "it is out of order"})
    with pytest.raises(RunFolderError, match="another plan"):
        compare(make_plan({**plan, "lr": 0.3}), tmp_path / "some", progress=False)
    compare(make_plan(plan), tmp_path / "some", progress=False)
    assert read_json(tmp_path / "some/failed.json") == {}
    far = make_plan({**plan, "lr": 1e30})
    assert not compare(far, tmp_path / "far", progress=False).rows[0].scores
    shutil.rmtree(tmp_path / "far/runs")
    assert compare(make_plan({**plan, "lr": 0.1}), tmp_path / "far", progress=False).rows[0].scores


def test_where_a_setting_diverges_the_table_says_which(tmp_path: Path) -> None:
    rates = {"lr": [0.1, 4000.0]}
    values = {**BOTH, "methods": ["fedavg"], "seeds": [1], "rounds": 4, "batch_size": 1, "tune": None, "grid": rates}
    shown = table(compare(make_plan(values), tmp_path / "some", progress=False))
    (sentence,) = read_json(tmp_path / "some/diverged.json").values()
    assert [note for note in shown.notes if "diverged" in note] == [f"FedAvg at lr=4000.0 diverged: {sentence}"]


# ---------------------------------------------------------------------------------------------------------- the formats


@pytest.fixture(scope="module")
def grid() -> Standings:
    plan = make_plan(
        {
            **SHARED,
            "methods": ["fedavg", {"algorithm": "fedavg", "name": "a_b|c & d*", "settings": {"momentum": 0.5}}],
            "seeds": [1, 10],
            "grid": {"participation": [0.5, 1.0]},
        }
    )
    assert [run.config.participation for run in plan.runs] == [0.5] * 4 + [1.0] * 4
    shift = {"fedavg": 0.1, "a_b|c & d*": 0.0}
    results: dict[str, Result | None] = {
        run.name: Found(run.config.plain(), [0.1 * k + shift[run.method] * (1 + 0.01 * k) for k in range(6)])
        for run in plan.runs
    }
    return standings(plan, results)


def test_csv_parses(grid: Standings) -> None:
    rows = list(csv.DictReader(io.StringIO(csv_text(grid))))
    assert len(rows) == 4
    for written, row in zip(rows, grid.rows, strict=True):
        score = row.scores["personal"]
        assert float(written["mean"]) == score.mean and float(written["std"]) == score.std
        assert (written["best"] == "true") is score.best and written["mark"] == score.mark
        assert (written["method"], written["participation"], written["metric"]) == (
            row.method,
            str(row.setting["participation"]),
            "accuracy",
        )
    assert [row["method"] for row in rows] == ["fedavg", "a_b|c & d*"] * 2  # names, not titles: a program reads this
    assert [row["mark"] for row in rows] == ["", "***", "", "***"]  # six clients times two seeds, all one way


def test_markdown_parses(grid: Standings) -> None:
    lines = [line for line in table(grid).markdown().splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    assert {len(row) for row in cells} == {3} and len(cells) == 2 + 4
    assert cells[0] == ["participation", "method", "personal"] and set(cells[1]) == {"---", "---:"}
    assert [row[1] for row in cells[2:4]] == ["FedAvg", r"a\_b\|c & d\*"]
    assert [row[2].startswith("**0.") for row in cells[2:]] == [True, False, True, False]
    assert cells[3][2].endswith(r"\*\*\*")


def test_latex_parses(grid: Standings) -> None:
    text = "\n".join(line for line in table(grid).latex().splitlines() if not line.startswith("%"))
    match = re.fullmatch(
        r"\\begin\{tabular\}\{(l+r+)\}\n\\toprule\n(.*)\n\\bottomrule\n\\end\{tabular\}", text.strip(), re.S
    )
    assert match
    head, *blocks = match[2].split("\n\\midrule\n")
    assert len(blocks) == 2  # one for each point of the grid
    rows = [re.split(r"(?<!\\)&", row) for block in (head, *blocks) for row in block.splitlines()]
    assert {len(row) for row in rows} == {len(match[1])} == {3} and len(rows) == 1 + 4
    assert all(row[-1].endswith(r"\\") for row in rows)
    assert rows[2][1].strip() == r"a\_b\textbar{}c \& d*"
    assert text.count("{") - text.count(r"\{") == text.count("}") - text.count(r"\}")
    assert rows[1][2].strip().startswith(r"\textbf{0.") and "$^{***}$" in rows[2][2]


def test_the_terminal_shows_the_best_in_bold(grid: Standings) -> None:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system="standard")
    console.print(table(grid))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    first, second = (row.scores["personal"] for row in grid.rows[:2])
    assert f"\x1b[1m{first.mean:.4f} ± {first.std:.4f}\x1b[0m" in text
    assert f"{second.mean:.4f} ± {second.std:.4f}***" in text and "Wilcoxon" in text


def test_people_see_titles_and_plans_keep_names(tmp_path: Path) -> None:
    plan = make_plan({**BOTH, "methods": ["fedavg_ft", "fedacs", {"algorithm": "fedacs", "name": "FedACS"}]})
    # A title that is another method's name in the plan would make two of one.
    assert plan.titles == {"fedavg_ft": "FedAvg-FT", "fedacs": "fedacs", "FedACS": "FedACS"}
    assert plan.methods == ("fedavg_ft", "fedacs", "FedACS") and plan.runs[0].name == "fedavg_ft-seed1"
    assert plan.plain()["methods"][0] == plan.plain()["called"]["fedavg_ft-seed1"] == "fedavg_ft"
    found = standings(plan, {run.name: Found(run.config.plain(), [0.5, 0.6]) for run in plan.runs})
    assert [row.cells[0] for row in table(found).rows] == ["FedAvg-FT", "fedacs", "FedACS"]
    assert [row["method"] for row in csv.DictReader(io.StringIO(csv_text(found)))] == list(plan.methods)


def test_clients_are_compared_with_those_that_train_alone() -> None:
    plan = make_plan({**BOTH, "methods": ["fedavg_ft", "local", "fedacs"], "seeds": [1]})
    # Of 20 samples each, the first client has 18 right in place of 2: even if as many as possible are answered
    # differently, 18 are gained and 2 lost, p = 2 (1 + 20 + 190) / 2^20 = 0.0004, for two clients 0.0008 at most.
    scores = {"local": [0.1, 0.6], "fedacs": [0.9, 0.5], "fedavg_ft": [0.1, 0.6]}
    found = standings(plan, {run.name: Found(run.config.plain(), scores[run.method]) for run in plan.runs})
    assert found.references == ["Local", "FedAvg-FT"]
    gained = found.rows[2].gains["Local"]
    assert (gained.helped, gained.harmed, gained.test) == (1, 0, "bound")
    first = gained.clients.set_index("client").loc[0]
    assert first["pvalue"] == pytest.approx(2 * (1 + 20 + 190) / 2**20, rel=1e-12)
    assert first["adjusted"] == pytest.approx(2 * first["pvalue"], rel=1e-12) and gained.worst == pytest.approx(-0.1)
    shown = table(found)
    assert [column.header for column in shown.columns][2:5] == ["helped vs Local", "harmed vs Local", "worst vs Local"]
    texts = [[cell if isinstance(cell, str) else cell.text for cell in row.cells] for row in shown.rows]
    assert texts[2][2:5] == ["1", "0", "-0.1000"] and texts[1][2:5] == ["–"] * 3
    assert any("as many samples as accuracies allow" in note for note in shown.notes)


def test_a_report_shows_what_tuning_chose_and_nothing_else(tmp_path: Path) -> None:
    plan = make_plan({**BOTH, "methods": ["fedavg", "local"], "seeds": [1], "tune": {"lr": [0.01, 0.1]}})
    found = compare(plan, tmp_path / "all", progress=False)
    read = read_runs([tmp_path / "all"])
    assert read.runs.lines == [Line("FedAvg"), Line("Local")]  # values that were tuned tell no lines apart
    chosen = [row.tuned["lr"] for row in found.rows]
    assert [result.config["settings"]["lr"] for result in read.runs.results] == chosen
    assert read.tuned == [f"lr={value}" for value in chosen] and not read.undecided
    assert read.comparisons[0].table == table(found)
    # Answers to single samples were recorded, and say what the accuracies say.
    gained = found.rows[0].gains["Local"]
    assert gained.test == "exact" and len(gained) > 1
    run = read.runs.results[0]
    answers, scores = run.answers, client_scores(run, "personal")
    assert answers is not None
    own = answers[answers["model"] == "personal"]
    right = (own["answer"] > 0).groupby(own["client"].to_numpy()).mean()
    assert right.loc[scores.index].tolist() == pytest.approx(scores.tolist(), rel=1e-12)
    (tmp_path / "all/standings.json").unlink()  # as it is before the end
    open_read = read_runs([tmp_path / "all"])
    assert open_read.undecided and len(open_read.runs.results) == 4
    assert any("every candidate is shown" in sentence for sentence in open_read.left_out)
    assert "<b>" not in report_tables.summary(open_read).text and "<b>" in report_tables.summary(read).text


def test_the_table_is_what_the_runs_say(whole: Path) -> None:
    rows = list(csv.DictReader(io.StringIO((whole / "table.csv").read_text())))
    for row in rows:
        finals = [
            Result(whole / "runs" / f"{row['method']}-seed{seed}").summary[row["model"]]["final"]["mean"]
            for seed in (1, 10)
        ]
        assert float(row["mean"]) == pytest.approx(sum(finals) / 2, rel=1e-12)
    assert {(row["method"], row["model"]) for row in rows} == {
        (method, model) for method in ("fedacs", "fedavg") for model in ("personal", "global")
    }


def test_at_the_round_that_is_best_on_test_data(whole: Path) -> None:
    plan = make_plan(BOTH)
    results = load_results(plan, whole)
    found = standings(plan, results, "best_oracle")
    assert (
        table(found)
        .markdown()
        .startswith("test accuracy at the round that is best on test data, mean ± std over 2 seeds")
    )
    for row in found.rows:
        runs, tuned = chosen_runs(plan, results, row.setting, row.method)
        assert [run.config["seed"] for run in runs] == [1, 10] and tuned is None
        for model, score in row.scores.items():
            metrics = [
                run.metrics.query(f"model == '{model}' and split == 'test' and metric == 'accuracy'") for run in runs
            ]
            best = [each.groupby("round")["value"].mean().max() for each in metrics]
            assert score.mean == pytest.approx(sum(best) / 2)


# ----------------------------------------------------------------------------------------------------- the command line


def options(**more: Any) -> list[str]:
    return [word for name, value in {**SHARED, **more}.items() for word in (f"--{name.replace('_', '-')}", str(value))]


def test_the_command_plans_what_the_file_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, grid: Standings
) -> None:
    plans: list[ComparisonPlan] = []
    monkeypatch.setattr("coterie.studies.comparison.compare", lambda plan, out, **more: plans.append(plan) or grid)
    words = ["compare", "fedacs", "fedavg", "--seeds", "1", "10", *options(out=tmp_path), "--tune", "lr=0.1,0.2"]
    assert CliRunner().invoke(app, words, catch_exceptions=False).exit_code == 0
    file = tmp_path / "plan.yaml"
    file.write_text(yaml.safe_dump({**BOTH, "seeds": [7], "rounds": 9, "tune": {"lr": [0.1, 0.2]}}))
    words = ["compare", str(file), "--seeds", "1,10", "--rounds", "3", "--out", str(tmp_path)]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0 and "personal" in done.stdout
    assert plans[0].plain() == plans[1].plain() == make_plan({**BOTH, "tune": {"lr": [0.1, 0.2]}}).plain()
    assert {*plans[0].plain()["called"].values()} == {*plans[0].methods}
    assert len(plans[0].runs) == 2 * 2 * 2
