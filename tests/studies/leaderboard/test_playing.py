"""A small protocol, played: entries are what the runs say, and a method from a file stands beside the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coterie.cli.app import app
from coterie.errors import ConfigError, RunFolderError, UnknownName
from coterie.results import Result, gains
from coterie.studies.comparison import ComparisonPlan
from coterie.studies.leaderboard import advice, one_method, page, record, wording
from coterie.studies.leaderboard.board import harm_of
from coterie.studies.leaderboard.picture import behind_the_best
from coterie.studies.leaderboard.playing import _tuned_first, play, read_entries
from coterie.studies.leaderboard.protocol import LeaderboardProtocol, load
from coterie.studies.leaderboard.wording import percent

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


def tuned_with_one_seed(rules: LeaderboardProtocol) -> LeaderboardProtocol:
    digits = rules.data["digits"].model_copy(update={"tuning_seeds": 1})
    return rules.model_copy(update={"data": {"digits": digits}})


@pytest.mark.parametrize("method", ["fedavg", "fedsgd"])
def test_a_candidate_that_was_chosen_with_one_seed_is_played_with_all(
    method: str, folder: Path, rules: LeaderboardProtocol, tmp_path: Path
) -> None:
    (found,) = play(tuned_with_one_seed(rules), ["digits-dir-all"], [method], tmp_path, keep_runs=True)
    whole = next(entry for entry in read_entries(folder / "kept") if entry.method == method)
    assert found.runs == 3 and found.diverged == whole.diverged // 2
    for name in ("seeds", "rounds", "chosen", "edges", "tests", "right", "answers", "global_model", "sent"):
        assert getattr(found, name) == getattr(whole, name), name
    tuning = Result(tmp_path / "digits-dir-all" / method / "tuning" / "runs" / f"{method}-lr-0.1-seed1")
    rows, model = tuning.metrics, "personal" if method == "fedavg" else "global"
    rows = rows[(rows["model"] == model) & (rows["split"] == "validation") & (rows["metric"] == "accuracy")]
    scores = {values["lr"]: score for values, score in found.tried}
    assert scores[0.1] == pytest.approx(rows["value"].mean(), abs=1e-6)


@pytest.mark.parametrize("lost", [1, 2])
def test_a_candidate_that_diverges_with_another_seed_gives_way_to_the_next(
    lost: int, folder: Path, rules: LeaderboardProtocol
) -> None:
    rules = tuned_with_one_seed(rules)
    setting = rules.setting("digits-dir-all")
    runs = folder / "kept" / "digits-dir-all" / "fedavg" / "runs"
    asked: list[tuple[int, list[float]]] = []

    def fake(plan: ComparisonPlan, out: Path) -> dict[str, Result | None]:
        asked.append((plan.seeds[0], [run.candidate["lr"] for run in plan.runs]))
        gone = plan.seeds == (2,) and len(asked) - 1 <= lost
        return {
            run.name: None if gone else Result(runs / f"fedavg-lr-{run.candidate['lr']}-seed{run.config.seed}")
            for run in plan.runs
        }

    found = _tuned_first(rules, setting, rules.plan(setting, "fedavg"), None, fake, folder)
    assert asked == [(1, [0.0001, 0.1]), (2, [0.1]), (2, [0.0001])]
    assert (found.diverged, found.runs) == (lost, 4)
    assert found.chosen == ({"lr": 0.0001} if lost == 1 else None)
    assert [score is None for _, score in found.tried] == [lost == 2, True]


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
    assert percent(mine.mean.mean) in text
    first = board.placings[0]
    row = f"`{first.entry.method}` has {percent(first.mean.mean)} %"
    assert advice.markdown(found).startswith(
        "| where you are | try | why |\n|---|---|---|\n| Dirichlet; 4 clients (Digits) |"
    )
    assert row in advice.markdown(found)


def test_one_method_is_shown_beside_the_best_of_the_others(folder: Path, rules: LeaderboardProtocol) -> None:
    found = record.read([folder / "kept"], rules)
    board = found.boards["digits-dir-all"]
    for placing in board.placings:
        (row,) = one_method.table(found, placing.entry.method).rows
        best = next(each for each in board.placings if each is not placing)
        beaten = [found.methods[name] for name in placing.beaten_by]
        harm = "–" if placing.harm is None else f"{sum(placing.harm.harmed)}/8"  # four clients, two seeds
        assert row.cells[1].startswith(percent(placing.mean.mean)) and row.cells[0] == "digits-dir-all"
        assert row.cells[2].startswith(f"{best.entry.title} {percent(best.mean.mean)}")
        assert row.cells[3:] == (f"{placing.rank:g} of 3", wording.listed(beaten) if beaten else "nobody", harm)
        said = one_method.sentence(found, placing.entry.method)
        assert said.startswith(f"{placing.entry.title} is unbeaten in {int(not beaten)} of 1 settings")
    words = ["leaderboard", "show", str(folder / "kept"), "--protocol", str(folder / "small.yaml"), "--method"]
    shown = CliRunner().invoke(app, [*words, "fedavg"])
    assert shown.exit_code == 0 and "FedAvg is unbeaten in" in shown.output, shown.output
    wrong = CliRunner().invoke(app, [*words, "fedavgg"])
    assert isinstance(wrong.exception, UnknownName) and "'fedavgg'" in str(wrong.exception)


def test_the_picture_has_every_method_and_setting(folder: Path, rules: LeaderboardProtocol) -> None:
    chart = behind_the_best(record.read([folder / "kept"], rules))
    (_, values), board = chart.frames[0], record.read([folder / "kept"], rules).boards["digits-dir-all"]
    assert values.shape == (len(chart.rows.labels), len(chart.columns.labels)) == (3, 1)
    first = board.placings[0]
    behind = {placing.entry.title: 100 * (first.mean.mean - placing.mean.mean) for placing in board.placings}
    assert values[:, 0].tolist() == pytest.approx([behind[title] for title in chart.rows.labels], abs=1e-4)


def test_a_page_of_nothing_says_so(rules: LeaderboardProtocol) -> None:
    text = page.markdown(record.make_leaderboard(rules, []))
    assert "Nothing has been played yet. There are 24 runs of 2 rounds to play." in text
    assert "- Digits, 4 clients: Dirichlet" in text


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
