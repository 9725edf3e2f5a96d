"""The runs of a report, read from folders, and what it has to leave out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.errors import CoterieError, RunFolderError
from coterie.results import Result, RunSet
from coterie.results.partial_summary import partial_summary
from coterie.runs.storage import events
from coterie.runs.storage.atomic_files import read_json
from coterie.runs.storage.events import Event
from coterie.tables import Cell, Column, Row, Table
from coterie.yaml_file import read_yaml

STANDINGS = "standings.json"
"""The file of a comparison that has come to its end: its table, and the runs that tuning chose."""

ProgressCallback = Callable[[Path], None]
"""Called with the folder of each run before it is read."""


@dataclass(frozen=True)
class ComparisonFolder:
    """A comparison in its folder.

    Parameters
    ----------
    path
        The folder.
    runs
        The runs to show, each with what the plan calls its method; of a tuned comparison those that tuning chose.
    chosen
        The values that tuning chose, for each run that has some.
    tuned
        The parameters that were tuned.
    open
        Whether something is tuned and nothing is chosen yet.
    table
        The comparison's table, ``None`` before it has come to its end.
    left_out
        Sentences about planned runs that are missing or diverged.
    """

    path: Path
    runs: dict[Path, str | None]
    chosen: dict[Path, str]
    tuned: frozenset[str]
    open: bool
    table: Table | None
    left_out: list[str]


@dataclass(frozen=True)
class ReportData:
    """The runs of a report.

    Parameters
    ----------
    runs
        Runs that have recorded something.
    summaries
        The result of each in short; of one that is not finished, what it has so far.
    events
        What happened in each, where it was a federation between machines.
    choices
        What the engine of each chose.
    left_out
        Sentences about what could not be shown.
    comparisons
        The comparisons that runs are from.
    tuned
        The values that tuning chose for each run, empty where nothing was tuned.
    """

    runs: RunSet
    summaries: list[dict[str, Any]]
    events: list[list[Event]]
    choices: list[dict[str, Any]]
    left_out: list[str] = field(default_factory=list)
    comparisons: list[ComparisonFolder] = field(default_factory=list)
    tuned: list[str] = field(default_factory=list)

    @property
    def undecided(self) -> bool:
        """Whether candidates are shown among which tuning has not chosen: then none is the best."""
        return any(comparison.open for comparison in self.comparisons)


def folders(paths: Iterable[str | os.PathLike[str]]) -> tuple[dict[Path, str | None], list[ComparisonFolder]]:
    """Find the runs in folders of runs, comparisons and recipes.

    Gives each run's folder once, with what a comparison's plan calls its method, and the comparisons.
    """
    found: dict[Path, tuple[Path, str | None]] = {}
    comparisons: list[ComparisonFolder] = []
    for path in _with_parts(map(Path, paths)):
        if (path / "config.yaml").exists():
            found.setdefault(path.resolve(), (path, None))
        elif (path / "plan.yaml").exists():
            comparison = _of_comparison(path)
            comparisons.append(comparison)
            for run, called in comparison.runs.items():
                found.setdefault(run.resolve(), (run, called))
        elif not path.is_dir():
            raise RunFolderError(f"there is no run in {path}: it must be a folder that `coterie run` or compare wrote")
        else:
            raise RunFolderError(
                f"{path} is neither a run's folder nor a comparison's: it holds no config.yaml and no plan.yaml"
            )
    return dict(found.values()), comparisons


def _with_parts(paths: Iterable[Path]) -> Iterator[Path]:
    """Give the comparisons within a recipe's folder in place of it."""
    for path in paths:
        parts = sorted(plan.parent for plan in path.glob("*/plan.yaml"))
        own = (path / "config.yaml").exists() or (path / "plan.yaml").exists()
        yield from [path] if own or not parts else parts


def read_runs(paths: Iterable[str | os.PathLike[str]], progress: ProgressCallback | None = None) -> ReportData:
    """Read the runs that a report is about."""
    there, comparisons = folders(paths)
    left_out = [sentence for comparison in comparisons for sentence in comparison.left_out]
    results, summaries, named = [], [], []
    for path, called in there.items():
        if progress is not None:
            progress(path)
        result = Result(path)
        try:
            summaries.append(result.summary if result.finished else partial_summary(result))
        except CoterieError as error:
            left_out.append(f"{path.name}: {error}")
            continue
        results.append(result)
        named.append(called)
        if not result.finished:
            done, rounds = summaries[-1]["rounds"], result.config.get("rounds", "?")
            left_out.append(f"{path.name} is not finished: round {done} of {rounds}")
    if not results:
        raise RunFolderError(f"there is nothing to report: {'; '.join(left_out) or 'no run has been begun'}")
    chosen = {path: values for comparison in comparisons for path, values in comparison.chosen.items()}
    names = frozenset(name for comparison in comparisons if not comparison.open for name in comparison.tuned)
    runs = RunSet(results, named, names)
    _ = runs.metrics, runs.timings  # read here, where progress is shown
    return ReportData(
        runs,
        summaries,
        [events.read(result.path) for result in results],
        [_choices(result.path) for result in results],
        left_out,
        comparisons,
        [chosen.get(result.path, "") for result in results],
    )


def _of_comparison(path: Path) -> ComparisonFolder:
    plan = read_yaml(path / "plan.yaml")
    planned: Mapping[str, Any] = plan.get("runs") or {}
    called: Mapping[str, str] = plan.get("called") or {}
    diverged = read_json(path / "diverged.json") if (path / "diverged.json").exists() else {}
    there = {
        path / "runs" / name: called.get(name) for name in planned if (path / "runs" / name / "config.yaml").exists()
    }
    left_out = [f"{name} diverged: {sentence}" for name, sentence in diverged.items()]
    if len(there) < len(planned):
        left_out.append(f"{path.name}: {len(planned) - len(there)} of {len(planned)} planned runs have not been begun")
    ended = read_json(path / STANDINGS) if (path / STANDINGS).exists() else None
    tuned = frozenset(plan.get("tune") or ())
    if ended is None:
        if tuned:
            left_out.append(
                f"{path.name} has not come to its end, so nothing has been chosen on validation samples: every "
                "candidate is shown, and none is called the best"
            )
        return ComparisonFolder(path, there, {}, tuned, bool(tuned), None, left_out)
    chosen = {path / "runs" / name: str(values) for name, values in ended["chosen"].items()}
    there = {run: name for run, name in there.items() if run in chosen}
    return ComparisonFolder(path, there, chosen, tuned, False, _table(ended["table"]), left_out)


def _table(plain: Mapping[str, Any]) -> Table:
    """Make a table of what was written of it as JSON."""
    columns = tuple(Column(**column) for column in plain["columns"])
    rows = tuple(
        Row(
            tuple(Cell(**cell) if isinstance(cell, dict) else str(cell) for cell in row["cells"]),
            row["ends_section"],
            row["muted"],
        )
        for row in plain["rows"]
    )
    return Table(columns, rows, str(plain["title"]), tuple(map(str, plain["notes"])), int(plain["labels"]))


def _choices(path: Path) -> dict[str, Any]:
    return read_json(path / "choices.json") if (path / "choices.json").exists() else {}
