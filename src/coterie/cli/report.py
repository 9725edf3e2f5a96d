"""The command that writes a report."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import err
from coterie.cli.shared_options import Folder, Text


def suggest(folder: Path) -> None:
    """Say how to make a report of a run or of a comparison."""
    err.print(f"plots: coterie report {shlex.quote(str(folder))}", markup=False, highlight=False)


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or of comparisons, finished or not.")
    ],
    out: Annotated[Path, typer.Option(metavar="FILE", help="The HTML file.")] = Path("report.html"),
    figures: Annotated[
        Folder,
        typer.Option(metavar="DIR", help="Write each figure for papers too, as SVG and PNG (needs coterie[plots])."),
    ] = None,
    title: Annotated[
        Text, typer.Option(metavar="TEXT", help="The page's title.", show_default="what the runs are")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Write a report: one HTML file with tables and interactive plots, which opens in any browser, without a network.

    Example: coterie report runs/fedacs-digits-seed1 runs/local-digits-seed1 --out digits.html --figures figures
    """
    from coterie.results import report as reporting

    written = reporting.write(runs, out, static=figures, title=title, progress=not quiet)
    if written.figures:
        err.print(f"figures: {figures} ({len(written.figures)} files)", markup=False, highlight=False)
    err.print(f"report: {written.page}", markup=False, highlight=False)
