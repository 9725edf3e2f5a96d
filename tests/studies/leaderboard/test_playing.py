"""A small protocol, played: entries are what the runs say, and a method from a file stands beside the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.errors import ConfigError, RunFolderError
from coterie.results import Result, gains
from coterie.studies.leaderboard import advice, page, record
from coterie.studies.leaderboard.board import harm_of
from coterie.studies.leaderboard.playing import play, read_entries
from coterie.studies.leaderboard.protocol import LeaderboardProtocol, load

SMALL = """
seeds: [1, 2]
candidates: 2
same: {rounds: 2, validation: 0.2, max_test: 30}
budget: {local_epochs: 1, batch_size: 20}
data: {digits: {title: Digits, fields: {data: digits, model: "mlp:hidden=8"}}}
partitions: {dir: {title: Dirichlet, fields: {partition: "dirichlet:0.5"}}}
presences:
  all: {title: "4 clients", fields: {clients: 4}}
  late: {title: "one newcomer", fields: {clients: 4, hold_out: 0.25}, model: newcomer}
rates: [0.0001, 0.1]
methods: {local: {}, fedavg: {}, fedsgd: {tune: {lr: [0.1, 1.0e+38]}}}
"""
MINE = '''
from typing import ClassVar

from coterie.algorithms.fedavg import FedAvg


class Mine(FedAvg):
    """As FedAvg, by another name."""

    name: ClassVar[str] = "mine"
    title: ClassVar[str] = "Mine"
    citation: ClassVar[str] = "nobody"
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("leaderboard")
    (place / "small.yaml").write_text(SMALL, encoding="utf-8")
    (place / "mine.py").write_text(MINE, encoding="utf-8")
    rules = load(place / "small.yaml")
    play(rules, ["digits-dir-all"], list(rules.methods), place / "kept", keep_runs=True)
    return place


@pytest.fixture
def rules(folder: Path) -> LeaderboardProtocol:
    return load(folder / "small.yaml")


def test_entries_are_what_the_runs_say(folder: Path) -> None:
    entries = {entry.method: entry for entry in read_entries(folder / "kept")}
    place = folder / "kept" / "digits-dir-all"
    runs = {
        method: [Result(place / method / "runs" / f"{method}-lr-0.1-seed{seed}") for seed in (1, 2)]
        for method in ("local", "fedavg")
    }
    for method, found in runs.items():
        entry = entries[method]
        assert entry.chosen == {"lr": 0.1} and entry.edges == ("lr=0.1 is the greatest that was tried",)
        assert entry.means() == pytest.approx([run.summary["personal"]["final"]["mean"] for run in found])
        worst = [run.summary["personal"]["fairness"]["worst_decile"] for run in found]
        assert entry.worst_tenths() == pytest.approx(worst)
        assert [list(tests) for tests in entry.tests] == [run.shares["test"].tolist() for run in found]
    assert entries["fedavg"].global_model == pytest.approx(
        [run.summary["global"]["final"]["mean"] for run in runs["fedavg"]], abs=1e-6
    )
    expected = gains(runs["fedavg"], runs["local"])
    harm = harm_of(entries["fedavg"], entries["local"])
    assert harm is not None and expected.test == "exact"
    assert (sum(harm.helped), sum(harm.harmed)) == (expected.helped, expected.harmed)
    assert harm.worst == pytest.approx(expected.worst, abs=1e-6)


def test_runs_that_diverge_are_counted(folder: Path) -> None:
    found = next(entry for entry in read_entries(folder / "kept") if entry.method == "fedsgd")
    assert (found.model, found.chosen) == ("global", {"lr": 0.1})
    assert (found.diverged, found.runs) == (2, 4)
    assert [score is None for _, score in found.tried] == [False, True]


def test_what_is_finished_is_not_repeated_and_another_length_is_refused(
    folder: Path, rules: LeaderboardProtocol
) -> None:
    told: list[str] = []
    assert len(play(rules, ["digits-dir-all"], ["local"], folder / "kept", tell=told.append)) == 1
    assert told == []
    with pytest.raises(RunFolderError, match=r"is of 2 rounds with the seeds 1, 2, not of 1 with 1, 2"):
        play(rules, ["digits-dir-all"], ["local"], folder / "kept", over={"rounds": 1})


def test_a_method_from_a_file_stands_beside_those_of_a_record(folder: Path, rules: LeaderboardProtocol) -> None:
    record.write(record.read([folder / "kept"], rules), folder / "record.json")
    common, where = ["--protocol", str(folder / "small.yaml")], ["--out", str(folder / "mine")]
    done = CliRunner().invoke(
        app,
        ["leaderboard", "run", str(folder / "mine.py"), "--setting", "digits-dir-all", *common, *where, "--quiet"],
    )
    assert done.exit_code == 0, done.output
    assert [path.name for path in (folder / "mine" / "digits-dir-all").iterdir()] == ["mine.json"]
    shown = [folder / "record.json", folder / "mine"]
    found = record.read(shown, rules)
    board = found.boards["digits-dir-all"]
    mine, fedavg = board.of("mine"), board.of("fedavg")
    assert mine is not None and fedavg is not None
    assert (mine.rank, mine.mean) == (fedavg.rank, fedavg.mean)
    assert mine.harm == fedavg.harm is not None  # the one from its answers, the other as the record keeps it
    printed = CliRunner().invoke(
        app,
        ["leaderboard", "show", *map(str, shown), *common, "--markdown", str(folder / "page.md")],
    )
    assert printed.exit_code == 0, printed.output
    text = (folder / "page.md").read_text(encoding="utf-8")
    assert "Mine" in text and "- Digits, one newcomer: Dirichlet" in text
    assert page.percent(mine.mean.mean) in text
    first = board.placings[0]
    row = f"`{first.entry.method}` has {page.percent(first.mean.mean)} %"
    assert advice.markdown(found).startswith(
        "| where you are | try | why |\n|---|---|---|\n| Dirichlet; 4 clients (Digits) |"
    )
    assert row in advice.markdown(found)


def test_a_record_keeps_the_answers_of_the_reference_alone(folder: Path, rules: LeaderboardProtocol) -> None:
    found = record.read([folder / "kept"], rules)
    record.write(found, folder / "again.json")
    values = json.loads((folder / "again.json").read_text(encoding="utf-8"))
    assert {entry["method"] for entry in values["entries"] if entry["answers"]} == {"local"}
    assert record.plain(record.read([folder / "again.json"], rules)) == record.plain(found)
    with pytest.raises(ConfigError, match="no record of a leaderboard"):
        record.read([folder / "small.yaml"], rules)


def test_newcomers_are_a_setting(folder: Path, rules: LeaderboardProtocol) -> None:
    told: list[str] = []
    found = play(rules, ["digits-dir-late"], ["fedavg", "fedsgd"], folder / "late", tell=told.append)
    assert [(entry.method, entry.model, [len(tests) for tests in entry.tests]) for entry in found] == [
        ("fedavg", "newcomer", [1, 1])
    ]
    assert told[-1] == "digits-dir-late: fedsgd has no personal models, which newcomers would get"
