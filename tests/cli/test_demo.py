"""The demo: the same runs, only shorter."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from coterie import cli
from coterie.cli import demo
from coterie.results import Result


def test_the_demo_ends_in_one_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(demo.SETTING, "rounds", 1)
    monkeypatch.setitem(demo.SETTING, "model", "linear")
    mine = tmp_path / "demo-runs"
    (mine / "001").mkdir(parents=True)
    (mine / "001" / "kept").touch()
    demo.main(mine)
    out, err = capsys.readouterr()
    assert [line.split()[:2] for line in out.splitlines() if "personal" in line or "global" in line] == [
        ["Local", "personal"],
        ["FedAvg", "personal"],
        ["FedAMP", "personal"],
        ["FedACS", "personal"],
        ["FedAvg", "global"],
        ["FedACS", "global"],
    ]
    assert err.rstrip().splitlines()[-1].startswith("Next, ") and "FedACS" in err
    assert (mine / "001" / "kept").exists()
    assert {path.name for path in (mine / "002").iterdir()} == set(demo.METHODS)
    assert Result(mine / "002" / "fedacs").config["clients"] == 20


def test_what_the_demo_says_to_try_next_is_a_command_that_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    monkeypatch.setattr(sys, "argv", [*demo.NEXT.split(), "--rounds", "1", "--out", str(tmp_path / "run")])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert not end.value.code and Result(tmp_path / "run").summary["algorithm"] == "fedacs"
