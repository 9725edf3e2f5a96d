"""Writing a report, and its figures for papers."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from coterie.errors import ConfigError, RunFolderError
from coterie.results import figures
from coterie.results.report.elements import Plot, Section
from coterie.results.report.page import page
from coterie.results.report.sections import sections
from coterie.results.report.sources import ProgressCallback, ReportData, folders, read_runs
from coterie.runs.storage.atomic_files import write_text
from coterie.version import __version__


@dataclass(frozen=True)
class ReportFiles:
    """The files that were written for a report.

    Parameters
    ----------
    page
        The HTML file.
    figures
        The static figures.
    sections
        The keys of the page's sections.
    """

    page: Path
    figures: list[Path]
    sections: list[str]


def write(
    paths: Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str] = "report.html",
    *,
    static: str | os.PathLike[str] | None = None,
    title: str | None = None,
    progress: bool = True,
) -> ReportFiles:
    """Write a report about runs: one HTML file that opens anywhere, without a network.

    Parameters
    ----------
    paths
        Folders of runs or of comparisons, finished or not.
    out
        The HTML file; one that is there is replaced.
    static
        Folder for each figure as SVG and PNG; none are written by default.
    title
        The page's title, by default what the runs are.
    progress
        Show progress.

    Returns
    -------
    ReportFiles
        What was written.

    Examples
    --------
    >>> write(["runs/fedacs-digits-seed1", "runs/local-digits-seed1"], "report.html")  # doctest: +SKIP
    """
    given, file = [Path(path) for path in paths], Path(out)
    _refuse(file)
    count = len(folders(given)[0])
    with _progress(count, progress) as advance:
        found = read_runs(given, advance)
    made = sections(found)
    drawn = [] if static is None else _static(made, Path(static))
    _put(file, page(title or _title(given, found), _about(found), made))
    return ReportFiles(file, drawn, [section.key for section in made])


def _refuse(file: Path) -> None:
    if file.suffix.lower() not in (".html", ".htm"):
        raise ConfigError(f"out is {str(file)!r}, but must be a file that ends in .html")
    if file.is_dir():
        raise ConfigError(f"out is {str(file)!r}, which is a folder: it must be a file")


def _put(file: Path, text: str) -> None:
    try:
        write_text(file, text)
    except OSError as error:
        raise RunFolderError(f"{file} cannot be written ({error.strerror or error})") from error


def _static(made: Sequence[Section], folder: Path) -> list[Path]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be written ({error.strerror or error})") from error
    paths: list[Path] = []
    taken: set[str] = set()
    for section in made:
        for plot in (part for part in section.parts if isinstance(part, Plot)):
            for variant in plot.variants:
                words = [plot.key] + ([variant.label] if len(plot.variants) > 1 else [])
                paths += figures.save(variant.chart, folder / _stem(words, taken))
    return paths


def _stem(words: Sequence[str], taken: set[str]) -> str:
    """Make a file's name that no other figure has, whatever labels are made of."""
    stem = re.sub(r"[^\w.-]+", "-", "-".join(words)).strip("-.")[:120]
    names = (stem if number == 1 else f"{stem}-{number}" for number in itertools.count(1))
    name = next(name for name in names if name.lower() not in taken)
    taken.add(name.lower())
    return name


def _title(paths: Sequence[Path], found: ReportData) -> str:
    if len(paths) == 1:
        return paths[0].resolve().name
    methods = list(dict.fromkeys(line.method for line in found.runs.lines))
    shown = ", ".join(methods[:4]) + (f" and {len(methods) - 4} more" if len(methods) > 4 else "")
    return shown


def _about(found: ReportData) -> str:
    runs, methods = len(found.runs.results), len({line.method for line in found.runs.lines})
    data = list(dict.fromkeys(str(result.config.get("data", "?")) for result in found.runs.results))
    parts = [
        f"{runs} run{'s' if runs > 1 else ''} of {methods} method{'s' if methods > 1 else ''}",
        f"data {', '.join(data)}",
        f"written {datetime.now(UTC):%Y-%m-%d %H:%M} UTC by coterie {__version__}",
    ]
    return " · ".join(parts)


@contextlib.contextmanager
def _progress(count: int, show: bool) -> Iterator[ProgressCallback]:
    columns = (TextColumn("[bold]reading"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), disable=not show or count < 2, transient=True) as bar:
        task = bar.add_task("", total=count)

        def advance(path: Path) -> None:
            bar.update(task, description=path.name)
            bar.advance(task)

        yield advance
