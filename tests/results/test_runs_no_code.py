"""Looking at a run runs nothing that its folder holds or names."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

import coterie
from coterie.cli.app import app
from coterie.results import Result
from coterie.results.partial_summary import partial_summary
from coterie.runs import launch
from tests.small_runs import config_of, finish, stop


def booby_trapped(run: Path, mine: Path) -> Path:
    """Let a run name code that leaves a trace where it is executed."""
    trap, trace = mine / "trap.py", mine / "trace"
    trap.write_text(f"open({str(trace)!r}, 'w').close()\n")
    config = yaml.safe_load((run / "config.yaml").read_text())
    config |= {
        "algorithm": str(trap),
        "model": "import:trap:Net",
        "loss": "import:trap:loss",
        "data": "import:trap:all",
    }
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    return trace


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "stopped"])
def test_show_report_and_load_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finished: bool) -> None:
    run = tmp_path / "run"
    playing = launch.begin(config_of("fedavg", rounds=2), run)
    if finished:
        finish(playing)
    else:
        stop(playing, "in a round", 2)
    monkeypatch.syspath_prepend(str(tmp_path))
    trace = booby_trapped(run, tmp_path)
    result = coterie.load(run)
    assert isinstance(result, Result)
    assert len(result.metrics)
    if finished:
        assert "FedAvg" in str(result.table())
    else:
        assert partial_summary(result)["algorithm"] == "trap"
    for command in (["show", str(run)], ["report", str(run), "--out", str(tmp_path / "report.html")]):
        assert CliRunner().invoke(app, command, catch_exceptions=False).exit_code == 0
    assert not trace.exists()
