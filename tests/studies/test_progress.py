"""A study's progress: how long it still takes, and what is shown of it on a terminal and elsewhere."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from coterie.studies import progress
from coterie.studies.comparison import PlannedRun, make_plan
from coterie.studies.progress import PartProgress, StudyProgress, study_progress
from tests.small_runs import SMALL


class Clock:
    """A clock that is set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def planned(*methods: str, seeds: int = 1, rounds: int = 10) -> tuple[PlannedRun, ...]:
    return make_plan({**SMALL, "methods": list(methods), "seeds": list(range(1, seeds + 1)), "rounds": rounds}).runs


def play(part: PartProgress, run: PlannedRun, clock: Clock, rounds: int, seconds: float, first: int = 1) -> None:
    """Let a run begin, and play so many rounds of so many seconds."""
    part.round_ended(run, 0, None)
    for number in range(first, first + rounds):
        clock.now += seconds
        part.round_ended(run, number, 0.1 * number)


def test_time_left_of_runs_in_turn() -> None:
    clock = Clock()
    study = StudyProgress("study", clock)
    runs = planned("fedavg", "local", seeds=3)
    part = study.part("", runs)
    averaging, alone = runs[:3], runs[3:]
    assert study.seconds_left() is None
    play(part, averaging[0], clock, 4, 1.0)
    assert study.seconds_left() == pytest.approx(6 + 5 * 10)  # of the other method nothing is known yet
    play(part, averaging[0], clock, 6, 1.0, first=5)
    part.run_ended(averaging[0])
    play(part, alone[0], clock, 2, 3.0)
    assert study.seconds_left() == pytest.approx(2 * 10 * 1 + (8 + 2 * 10) * 3)
    part.found_finished(alone[2])
    assert study.seconds_left() == pytest.approx(2 * 10 * 1 + (8 + 10) * 3)


def test_time_left_of_runs_at_the_same_time() -> None:
    clock = Clock()
    study = StudyProgress("study", clock)
    runs = planned("fedavg", seeds=6)
    part = study.part("", runs)
    for run in runs[:3]:
        part.round_ended(run, 0, None)
    for number in range(1, 5):
        clock.now += 2.0
        for run in runs[:3]:
            part.round_ended(run, number, None)
    assert study.seconds_left() == pytest.approx((3 * 6 + 3 * 10) * 2 / 3)
    for run in (*runs[:2], *runs[3:]):
        part.run_ended(run)
    assert study.seconds_left() == pytest.approx(6 * 2)


def test_the_longest_run_is_waited_for() -> None:
    clock = Clock()
    study = StudyProgress("study", clock)
    short, long = planned("fedavg", "local", rounds=4)
    part = study.part("", (short, long))
    part.round_ended(long, 0, None)
    play(part, short, clock, 3, 1.0)
    clock.now = 10.0
    part.round_ended(long, 1, None)
    assert study.seconds_left() == pytest.approx(30)  # and not (30 + 1) / 2


def test_a_run_that_goes_on_counts_what_it_plays_now() -> None:
    clock = Clock()
    study = StudyProgress("study", clock)
    (run,) = planned("fedavg", rounds=60)
    play(study.part("", [run]), run, clock, 2, 3.0, first=51)
    assert study.seconds_left() == pytest.approx(8 * 3)


def test_lines_elsewhere() -> None:
    clock, said = Clock(), list[str]()
    study = StudyProgress("book", clock, said.append)
    runs = planned("fedavg", seeds=3)
    part = study.part("one", runs)
    other = study.part("two", planned("local", rounds=5))
    play(part, runs[0], clock, 10, 1.0)
    part.run_ended(runs[0])
    play(part, runs[1], clock, 3, 25.0)
    part.run_ended(runs[1], "diverged")
    part.given_up()
    (last,) = planned("local", rounds=5)
    play(other, last, clock, 5, 4.0)
    other.run_ended(last)
    # 85 seconds for 13 rounds of fedavg; then 20 for 5 of local
    assert said == [
        "book: one/fedavg-seed1 ended with 1.0000; 1 of 4 runs, about 0:00:25 left",
        "book: one/fedavg-seed2 at round 3 of 10; 1 of 4 runs, about 0:02:24 left",
        "book: one/fedavg-seed2 diverged; 2 of 4 runs, 1 failed, about 0:01:38 left",
        "book: two/local-seed1 ended with 0.5000; 4 of 4 runs, 2 failed",
    ]


def drawn(study: StudyProgress, width: int = 100) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    with console.capture() as text:
        console.print(study)
    return [line.rstrip() for line in text.get().splitlines()]


def test_what_is_drawn() -> None:
    clock = Clock()
    study = StudyProgress("comparison", clock)
    runs = planned("fedavg", seeds=12)
    part = study.part("", runs)
    assert len(drawn(study)) == 1 and drawn(study)[0].endswith("0:00:00, 0 of 12 runs")
    for run in runs:
        part.round_ended(run, 0, None)
    clock.now = 4.0
    for run in runs:
        part.round_ended(run, 2 if run is runs[-1] else 1, 0.75)
    lines = drawn(study)
    assert len(lines) == 1 + progress.LINES + 1
    assert lines[0].startswith("comparison") and "0:00:04, 0 of 12 runs, about 0:00:3" in lines[0]
    assert lines[1].split()[0] == "fedavg-seed1" and lines[1].endswith("1/10 0.7500")
    assert lines[-1] == "  and 4 more at rounds 1 to 2"
    for run in runs:
        part.run_ended(run)
    assert [line.split(",")[1] for line in drawn(study)] == [" 12 of 12 runs"]
    assert all(len(line) <= 60 for line in drawn(study, 60))


@pytest.mark.parametrize("terminal", [True, False])
def test_where_it_is_shown(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(progress, "Console", lambda stderr: Console(file=shown, force_terminal=terminal, width=100))
    (run,) = planned("fedavg", rounds=1)
    for show in (False, True):
        with study_progress("comparison", show) as study:
            part = study.part("", [run])
            part.round_ended(run, 0, None)
            part.round_ended(run, 1, 0.5)
            part.run_ended(run)
        assert bool(shown.getvalue()) == show
    assert ("\x1b[" in shown.getvalue()) == terminal
    assert (shown.getvalue() == "comparison: fedavg-seed1 ended with 0.5000; 1 of 1 runs\n") == (not terminal)
    assert "1 of 1 runs" in shown.getvalue()


@pytest.mark.parametrize(("width", "head"), [(50, 2), (80, 1), (200, 1)])
def test_what_is_drawn_keeps_its_lines_in_one_piece_however_wide_the_terminal_is(width: int, head: int) -> None:
    clock = Clock()
    study = StudyProgress("comparison", clock)
    tune = {"lr": [0.001, 0.002], "mu": [0.0001, 0.0002]}
    runs = make_plan({**SMALL, "methods": ["fedprox"], "seeds": [1, 10000], "rounds": 2000, "tune": tune}).runs
    assert min(len(run.name) for run in runs) > 30
    part = study.part("a-recipe-with-a-name", runs)
    for run in runs:
        part.round_ended(run, 0, None)
        clock.now += 5000.0
        part.round_ended(run, 1234, 0.875)
    lines = drawn(study, width)
    assert len(lines) == head + progress.LINES == head + len(runs)
    assert all(len(line) <= width for line in lines)
    assert re.search(r" 11:06:40, 0 of 8 runs, about \d+:\d\d:\d\d left$", lines[head - 1])
    for run, line in zip(runs, lines[head:], strict=True):
        assert line.split()[0].endswith(run.name[-15:]) and line.endswith(" 1234/2000 0.8750")
