"""What a study shows while it runs: what is done, what is going on, and how long the whole still takes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from coterie.studies.comparison.plan import PlannedRun

LINES = 8
"""Runs that have a line of their own; more are counted."""

QUIET_SECONDS = 60.0
"""How long nothing is said where lines are written in place of a display."""

_REFRESHES = 2  # a second: drawing takes milliseconds, which the runs lose
_BAR, _SHORTEST_BAR = 30, 8


@dataclass
class _Shown:
    """A run as the display sees it."""

    name: str
    method: str
    rounds: int
    at: int = 0
    mean: float | None = None
    begun: float | None = None
    first: int | None = None  # the round that it began with, later than 1 if it goes on
    last: float = 0.0  # when its last round ended
    done: bool = False

    @property
    def going(self) -> bool:
        return self.begun is not None and not self.done

    @property
    def played(self) -> int:
        """Rounds that it has played here."""
        return 0 if self.first is None else self.at - self.first + 1


class StudyProgress:
    """How far a study has come: comparisons whose runs play in turn, side by side or together.

    Parameters
    ----------
    title
        What the study is called.
    clock
        Gives seconds.
    say
        Told lines, where no display is drawn.
    each_run
        Whether something is said of each run that ends, with its score.
    say_failed
        Told how a run failed, where a display is drawn.

    Attributes
    ----------
    rounds_to_come
        Rounds, of all runs together, that will be played by runs of which nobody knows yet which they are.
    """

    def __init__(
        self,
        title: str,
        clock: Callable[[], float] = time.monotonic,
        say: Callable[[str], None] = lambda line: None,
        each_run: bool = True,
        say_failed: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.title, self._clock, self._say, self._each_run = title, clock, say, each_run
        self._say_failed = say_failed
        self._runs: list[_Shown] = []
        self._failed = 0
        self.rounds_to_come = 0
        self._began = self._said = clock()

    def part(self, name: str, runs: Sequence[PlannedRun], played: int = 0) -> PartProgress:
        """Expect the runs of one comparison, which have played some rounds before."""
        shown = {
            run.name: _Shown(f"{name}/{run.name}" if name else run.name, run.method, run.config.rounds, played)
            for run in runs
        }
        self._runs += shown.values()
        return PartProgress(self, shown)

    # ----------------------------------------------------------------------------------------------- told by the parts

    def found_finished(self, run: _Shown) -> None:
        """Take note of a run that was finished before."""
        run.done, run.at = True, run.rounds

    def round_ended(self, run: _Shown, round_number: int, mean: float | None) -> None:
        """Take note of a round, 0 for the beginning of a run."""
        now = self._clock()
        if run.begun is None:
            run.begun = now
        if round_number > 0 and run.first is None:
            run.first = round_number
        run.at, run.last = round_number or run.at, now
        run.mean = mean if mean is not None and self._each_run else run.mean
        if now - self._said >= QUIET_SECONDS:
            self._say_that(now, "")

    def run_ended(self, run: _Shown, failed: str) -> None:
        """Take note of a run's end, and how it failed if it did."""
        now = self._clock()
        run.done = True
        self._failed += bool(failed)
        score = "" if run.mean is None else f" with {run.mean:.4f}"
        if failed:
            self._say_failed(f"{run.name} {failed}")
        if self._each_run or failed:
            self._say_that(now, f"{run.name} {failed or f'ended{score}'}")

    def tell(self, what: str) -> None:
        """Say something of the study."""
        self._say_that(self._clock(), what)

    def given_up(self, runs: Iterable[_Shown]) -> None:
        """Take note that runs are not played to their ends."""
        for run in runs:
            self._failed += not run.done
            run.done = True

    # ------------------------------------------------------------------------------------------------------ what is so

    def seconds_left(self) -> float | None:
        """Estimate how long the whole still takes; ``None`` before a round has ended.

        A round to come is taken to last as long as those of its method have, and as many runs to be under way at a time
        as there are now.
        """
        played: dict[str, tuple[float, int]] = {}
        for run in self._runs:
            if run.begun is not None and run.played:
                seconds, rounds = played.get(run.method, (0.0, 0))
                played[run.method] = seconds + run.last - run.begun, rounds + run.played
        if not played:
            return None
        overall = sum(seconds for seconds, _ in played.values()) / sum(rounds for _, rounds in played.values())
        pace = {method: seconds / rounds for method, (seconds, rounds) in played.items()}
        to_come = {
            run.name: (run.rounds - run.at) * pace.get(run.method, overall) for run in self._runs if not run.done
        }
        # Where nothing is known of how many will be under way, a round takes what rounds have taken so far.
        on_average = (self._clock() - self._began) / sum(run.played for run in self._runs)
        going = sum(run.going for run in self._runs)
        if going:
            known = max(sum(to_come.values()) / going, max(to_come.values()))
        else:
            known = sum(run.rounds - run.at for run in self._runs if not run.done) * on_average
        return known + self.rounds_to_come * on_average

    def summary(self) -> str:
        """Say in a few words how far it has come."""
        done = sum(run.done for run in self._runs)
        words = [f"{done} of {len(self._runs)} runs"]
        if self._failed:
            words.append(f"{self._failed} failed")
        left = self.seconds_left()
        if left is not None and (done < len(self._runs) or self.rounds_to_come):
            words.append(f"about {_duration(left)} left")
        return ", ".join(words)

    def _say_that(self, now: float, what: str) -> None:
        going = [run for run in self._runs if run.going]
        if not what and going:
            others = f" and {len(going) - 1} more" if len(going) > 1 else ""
            what = f"{going[0].name}{others} at round {going[0].at} of {going[0].rounds}"
        self._said = now
        self._say(f"{self.title}: {what}; {self.summary()}")

    # ---------------------------------------------------------------------------------------------------------- drawing

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        rounds = sum(run.rounds for run in self._runs) + self.rounds_to_come
        at = sum(run.rounds if run.done else run.at for run in self._runs)
        how_far = f"{_duration(self._clock() - self._began)}, {self.summary()}"
        beside = options.max_width - len(self.title) - 1  # room beside the title
        in_one = beside - len(how_far) - 1 >= _SHORTEST_BAR
        room = beside - len(how_far) - 1 if in_one else beside
        bar = ProgressBar(max(rounds, 1), at, width=max(_SHORTEST_BAR, min(_BAR, room)))
        yield _line(Text(self.title, style="bold"), bar, *([Text(how_far)] if in_one else []))
        if not in_one:
            yield Text(f"  {how_far}")
        going = [run for run in self._runs if run.going]
        if going:
            yield self._of_runs(going[:LINES], options.max_width)
        if more := going[LINES:]:
            least, most = min(run.at for run in more), max(run.at for run in more)
            where = f"round {least}" if least == most else f"rounds {least} to {most}"
            yield Text(f"  and {len(more)} more at {where}", style="dim")

    def _of_runs(self, runs: Sequence[_Shown], width: int) -> Table:
        counts = [f"{run.at}/{run.rounds}" for run in runs]
        scores = ["" if run.mean is None else f"{run.mean:.4f}" for run in runs]
        room = width - 2 - max(map(len, counts)) - max(map(len, scores)) - 3  # for name and bar
        bar = max(_SHORTEST_BAR, min(20, room - max(len(run.name) for run in runs)))
        lines = Table.grid(padding=(0, 1))
        for run, count, score in zip(runs, counts, scores, strict=True):
            lines.add_row(
                Text(f"  {_shortened(run.name, max(room - bar, 1))}"),
                ProgressBar(max(run.rounds, 1), run.at, width=bar),
                Text(count, style="dim"),
                Text(score),
            )
        return lines


class PartProgress:
    """The runs of one comparison within a study's progress."""

    def __init__(self, study: StudyProgress, runs: dict[str, _Shown]) -> None:
        self._study, self._runs = study, runs

    def found_finished(self, run: PlannedRun) -> None:
        """Take note of a run that was finished before."""
        self._study.found_finished(self._runs[run.name])

    def round_ended(self, run: PlannedRun, round_number: int, mean: float | None) -> None:
        """Take note of a round, 0 for the beginning of a run."""
        self._study.round_ended(self._runs[run.name], round_number, mean)

    def run_ended(self, run: PlannedRun, failed: str = "") -> None:
        """Take note of a run's end, and how it failed if it did."""
        self._study.run_ended(self._runs[run.name], failed)

    def given_up(self) -> None:
        """Take note that what is left is not played."""
        self._study.given_up(self._runs.values())


@contextlib.contextmanager
def study_progress(title: str, show: bool = True, each_run: bool = True) -> Iterator[StudyProgress]:
    """Show a study's progress on the error stream: a display on a terminal, lines elsewhere."""
    console = Console(stderr=True)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    if not show:
        yield StudyProgress(title)
    elif console.is_terminal:
        progress = StudyProgress(title, each_run=each_run, say_failed=say)  # above the display
        with Live(progress, console=console, refresh_per_second=_REFRESHES):
            yield progress
    else:
        yield StudyProgress(title, say=say, each_run=each_run)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def _line(*cells: Text | ProgressBar) -> Table:
    line = Table.grid(padding=(0, 1))
    line.add_row(*cells)
    return line


def _shortened(name: str, width: int) -> str:
    return name if len(name) <= width else f"…{name[len(name) - width + 1 :]}"
