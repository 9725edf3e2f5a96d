"""Running a comparison: what is finished is not repeated, what was begun goes on, what is new begins.

::

    DIR/
      plan.yaml                      what is compared, complete
      runs/NAME/                     a folder for each run
      diverged.json                  runs that became NaN or infinite, with the sentence that says so
      failed.json                    runs that failed, likewise, until they have been played
      set_aside/NAME/                what such runs left when the plan was mended
      standings.json                 what a report needs of the result: the table, and the runs that tuning chose
      table.md, table.tex, table.csv the result, written last

One process runs a comparison at a time, under a lock as on a run's folder.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType, MappingProxyType
from typing import get_args

from coterie import api, signals
from coterie.errors import ConfigError, CoterieError, Interrupted, RunsFailed
from coterie.results import At, Result
from coterie.results.report.sources import STANDINGS
from coterie.rows.distributed import launched
from coterie.runs.experiment import Watcher
from coterie.runs.storage import read_summary
from coterie.runs.storage.atomic_files import write_json, write_text
from coterie.simulation.processes import OneProcess
from coterie.studies.comparison.plan import ComparisonPlan, PlannedRun
from coterie.studies.comparison.plan_folder import DIVERGED, FAILED, RUNS, locked, sentences
from coterie.studies.comparison.standings import Standings, standings
from coterie.studies.comparison.tables import csv_text, plain, table
from coterie.studies.comparison.together import joined, play_group
from coterie.studies.comparison.workers import (
    RunFunction,
    divided,
    play_groups,
    refuse_unguarded_program,
    workers_that_gain,
    workers_that_pay,
)
from coterie.studies.joint import Common
from coterie.studies.progress import PartProgress, study_progress
from coterie.tracking import make_all


def compare(
    plan: ComparisonPlan,
    out: str | os.PathLike[str],
    *,
    data_dir: str | os.PathLike[str] | None = None,
    at: At = "final",
    jobs: int | None = 1,
    together: bool = True,
    progress: bool | PartProgress = True,
    track: Sequence[str] = (),
) -> Standings:
    """Run all that is left of a comparison, and write its tables.

    A stop by the user is an :class:`~coterie.errors.Interrupted`; the same call goes on. So does one of a plan that has
    more: other seeds, methods or values besides, or other settings of runs that diverged or failed, which are played
    anew.

    Parameters
    ----------
    plan
        The plan.
    out
        The comparison's folder: new, empty, or of a plan that this one goes on with. One that another process is
        running is refused.
    data_dir
        Where data sets lie.
    at
        At which round methods are compared: ``"final"``, ``"best"`` on validation data, or ``"best_oracle"`` on test
        data, as many papers do.
    jobs
        How many processes play at a time; more than one are started for it, and share the CPU's cores. ``None`` for as
        many as pay for their start, which a program must only ask for below ``if __name__ == "__main__"``.
    together
        Let runs of one shape play together; otherwise each plays by itself.
    progress
        Show progress; or the part that this comparison is of a study, whose progress is shown.
    track
        Trackers that are told of every run, by name; see :func:`coterie.run`.

    Returns
    -------
    Standings
        The result of each method.

    Raises
    ------
    RunsFailed
        If some runs failed; the table of the others is written before.
    """
    folder = Path(out)
    refuse_several_processes()
    if jobs != 1:
        refuse_unguarded_program()
    _refuse_without_validation(plan, at)
    refuse_objects_side_by_side(plan, jobs)
    make_all(track)  # what is wrong with them is said before anything is begun
    with locked(plan.plain(), folder, may_grow=True):
        with _shown(plan, progress) as part:
            try:
                diverged = run_all(plan, folder, data_dir, jobs=jobs, together=together, progress=part, track=track)
            except RunsFailed as error:
                _write_tables(plan, folder, sentences(folder / DIVERGED), at, error.runs)
                error.add_note(f"table of the others: {folder / 'table.md'}")
                raise
        return _write_tables(plan, folder, diverged, at)


def _write_tables(
    plan: ComparisonPlan,
    folder: Path,
    diverged: Mapping[str, str],
    at: At,
    failed: Mapping[str, str] = MappingProxyType({}),
) -> Standings:
    """Write the result, of the runs that have one."""
    found = standings(plan, _results(plan, folder, {**diverged, **failed}), at)
    found = replace(found, diverged=_why(plan, diverged, found), failed=_why(plan, failed, found))
    shown = table(found)
    if not failed:  # it is at its end
        write_json(folder / STANDINGS, plain(found))
    write_text(folder / "table.md", shown.markdown())
    write_text(folder / "table.tex", shown.latex())
    write_text(folder / "table.csv", csv_text(found))
    return found


def load_results(plan: ComparisonPlan, out: str | os.PathLike[str]) -> dict[str, Result | None]:
    """Give the runs of a comparison that has come to its end.

    Parameters
    ----------
    plan
        Its plan.
    out
        Its folder.

    Returns
    -------
    dict
        The runs by name, ``None`` for one that diverged.
    """
    folder = Path(out)
    return _results(plan, folder, sentences(folder / DIVERGED))


def _why(plan: ComparisonPlan, said: Mapping[str, str], found: Standings) -> dict[str, str]:
    """Say of each method that has no result in a setting what is said of the first such run of its there."""
    why: dict[str, str] = {}
    for row in found.rows:
        runs = [run.name for run in plan.runs if (plan.titles[run.method], run.setting) == (row.title, row.setting)]
        sentences = [said[name] for name in runs if name in said]
        if sentences and not row.scores:
            many = f"in {len(sentences)} of {len(runs)} runs, first " if len(runs) > 1 else ""
            why[row.place] = f"{many}{sentences[0]}"
    return why


def _results(plan: ComparisonPlan, folder: Path, diverged: Mapping[str, str]) -> dict[str, Result | None]:
    return {run.name: None if run.name in diverged else Result(folder / RUNS / run.name) for run in plan.runs}


@contextlib.contextmanager
def _shown(plan: ComparisonPlan, progress: bool | PartProgress) -> Iterator[PartProgress]:
    if isinstance(progress, PartProgress):
        yield progress
    else:
        with study_progress("comparison", progress) as study:
            yield study.part("", plan.runs)


def run_all(
    plan: ComparisonPlan,
    folder: Path,
    data_dir: str | os.PathLike[str] | None = None,
    *,
    jobs: int | None = 1,
    together: bool = True,
    progress: PartProgress,
    track: Sequence[str] = (),
    common: Common | None = None,
) -> Mapping[str, str]:
    """Run what is left, and give the runs that diverged with the sentence that says so.

    A run that fails leaves the others alone; what it failed with is shown at once, and raised when they have ended. One
    that fails before anything was played ends all, for what is wrong with it may be wrong with the rest.

    A run that is there and is planned for more rounds than it has played goes on to these. What runs that play together
    in this process have in common is found in ``common`` and left there, for a caller who has more of them to play.
    """
    play: RunFunction = functools.partial(play_run, folder, data_dir, tuple(track))
    diverged, broken = sentences(folder / DIVERGED), sentences(folder / FAILED)
    left = [run for run in plan.runs if run.name not in diverged and not is_finished(folder, run)]
    waiting = {run.name for run in left}
    for run in plan.runs:
        if run.name not in waiting:
            progress.found_finished(run)
    if ended := broken.keys() - waiting:  # they came to their ends, but were not crossed out
        broken = {name: said for name, said in broken.items() if name not in ended}
        write_json(folder / FAILED, broken)
    done, failed, played = len(plan.runs) - len(left), dict[str, CoterieError](), False

    def round_ended(run: PlannedRun, number: int, mean: float | None) -> None:
        nonlocal played
        played = played or number > 0
        progress.round_ended(run, number, mean)

    try:
        with _stopped_by_sigterm(folder):
            if jobs is None:
                # By all runs, so that whoever goes on after a stop shares out cores as before it.
                count = 1 if plan.has_objects or not left else min(len(left), workers_that_pay(plan.runs))
            else:
                count = workers_that_gain(jobs, len(left), {run.config.device for run in left})
            groups = divided(joined(left) if together else [[run] for run in left], count)
            group = functools.partial(play_group, play, common if count == 1 else None, 1 / count)
            ends = play_groups(groups, group, count, round_ended)
            with contextlib.closing(ends):
                for run, found in ends:
                    if isinstance(found, CoterieError):
                        failed[run.name] = found
                        write_json(folder / FAILED, broken := {**broken, run.name: str(found)})
                        progress.run_ended(run, f"failed: {found}")
                        if not played and not done:
                            raise found
                        continue
                    if broken.pop(run.name, None) is not None:
                        write_json(folder / FAILED, broken)
                    if found is not None:
                        diverged[run.name] = found
                        write_json(folder / DIVERGED, diverged)
                    done += 1
                    progress.run_ended(run, "" if found is None else "diverged")
    except (Interrupted, KeyboardInterrupt) as stop:
        again = Interrupted(folder, 0, stop.signal_number if isinstance(stop, Interrupted) else signal.SIGINT)
        # What is to be resumed is the comparison, not the run that it was stopped in.
        again.args = (
            f"interrupted; {done} of {len(plan.runs)} runs are finished and all is kept in {folder}: go on with the "
            "same command",
        )
        raise again from None
    if failed:
        name, error = next(iter(failed.items()))
        raise RunsFailed(
            f"{len(failed)} of {len(plan.runs)} runs failed, the first of them {name}: {error}; the others are kept in "
            f"{folder}, and the same command plays what is left, also with other settings of those that failed",
            {name: str(error) for name, error in failed.items()},
        ) from error
    return diverged


@contextlib.contextmanager
def _stopped_by_sigterm(folder: Path) -> Iterator[None]:
    """Take SIGTERM as Ctrl-C is taken, also while no run of this process looks out for it."""

    def stop(number: int, frame: FrameType | None) -> None:
        signal.signal(number, signal.SIG_IGN)  # asked once: the processes of the runs are being waited for
        raise Interrupted(folder, 0, number)

    with signals.handled(stop, signal.SIGTERM):
        yield


def is_finished(folder: Path, run: PlannedRun) -> bool:
    """Say whether a comparison's folder has a run with all its rounds."""
    summary = read_summary(folder / RUNS / run.name)
    return summary is not None and int(summary["rounds"]) >= run.config.rounds


def play_run(
    folder: Path,
    data_dir: str | os.PathLike[str] | None,
    track: Sequence[str],
    run: PlannedRun,
    watch: Watcher,
    processes: OneProcess | None = None,
) -> None:
    """Play one run of a comparison in its folder, or go on with it."""
    path = folder / RUNS / run.name
    if (path / "config.yaml").exists():
        api.play_on(path, processes, data_dir=data_dir, progress=watch, track=track, rounds=run.config.rounds)
    else:
        api.play_config(run.config, processes, out=path, data_dir=data_dir, progress=watch, track=track)


def refuse_several_processes() -> None:
    if launched() > 1:
        raise ConfigError(
            f"torchrun started {launched()} processes, but a comparison runs in one: start it without torchrun, with "
            "--jobs for several runs at a time; single runs can be sharded (`torchrun -m coterie run`)"
        )


def refuse_objects_side_by_side(plan: ComparisonPlan, jobs: int | None) -> None:
    if (jobs or 1) > 1 and plan.has_objects:
        raise ConfigError(
            f"jobs is {jobs}, but the plan has objects, which other processes do not have: use jobs=1, or text"
        )


def _refuse_without_validation(plan: ComparisonPlan, at: At) -> None:
    if at not in get_args(At):
        raise ConfigError(f"at is {at!r}, but must be {', '.join(get_args(At)[:-1])} or {get_args(At)[-1]}")
    for run in plan.runs:
        if run.config.validation == 0 and (at == "best" or run.candidate):
            raise ConfigError("validation is 0, but best and tune choose on validation data: hold some out")
