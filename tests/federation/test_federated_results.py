"""The folder of a run between machines reads like a simulation's, and makes a report."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie.federation.agreement import Promise
from coterie.federation.plan import Plan
from coterie.federation.server import serve
from coterie.results import Result, report
from coterie.runs.storage import events
from tests.federation.grid import make_federation


def test_everything_that_a_run_leaves_can_be_read(tmp_path: Path) -> None:
    local = make_federation(tmp_path)
    local.grid.away = lambda done: {99} if done == 2 else set()
    serve(local.agreement, local.grid, Plan(algorithm="fedacs", rounds=3, wait=0.0), tmp_path / "run")
    result = Result(tmp_path / "run")
    assert result.finished and "personal" in result.summary
    assert result.timings["round"].tolist() == [1, 2, 3]
    assert bool((result.timings["training"] > 0).all())
    assert result.weight_rounds == [1, 2, 3]
    assert result.weights(2).columns.tolist() == [0, 1, 2]
    held = result.shares
    assert held["member"].tolist() == ["silo-0", "silo-1", "silo-2"]
    assert held[["train", "validation", "test"]].sum(axis=1).tolist() == [len(each) for each in local.datasets]
    replies = result.metrics.query("metric == 'wire_replies'")
    assert replies["value"].tolist() == [3, 2, 3]
    told = [(event.round, event.what) for event in events.read(result.path) if event.client == 1]
    assert told == [(0, "joined"), (2, "no reply"), (3, "returned")]
    made = report.write([result.path], tmp_path / "report.html", progress=False)
    assert {"summary", "curves", "weights", "shares", "costs", "events", "repeat"} <= set(made.sections)


def test_a_member_that_joins_late_is_counted_from_then_on(tmp_path: Path) -> None:
    local = make_federation(tmp_path)
    local.grid.away = lambda done: {99} if done < 3 else set()
    serve(local.agreement, local.grid, Plan(algorithm="fedavg", rounds=4, wait=0.0), tmp_path / "run")
    assert Result(tmp_path / "run").shares["train"].tolist() == [
        int(0.9 * round(0.8 * len(each)) + 0.5) for each in local.datasets
    ]


def test_a_run_that_measured_nothing_makes_a_report_of_the_rest(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting", reason="dp-accounting is not installed: these tests need coterie[privacy]")
    local = make_federation(tmp_path, privacy=Promise(clip=1.0, noise=4.0))
    serve(local.agreement, local.grid, Plan(algorithm="fedavg", rounds=2, wait=0.0), tmp_path / "run")
    made = report.write([tmp_path / "run"], tmp_path / "report.html", progress=False)
    assert {"costs", "events", "repeat"} <= set(made.sections)
    assert "shares" not in made.sections
