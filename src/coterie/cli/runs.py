"""Commands about single runs: run one, resume it, show its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from coterie.cli.console import err
from coterie.cli.console import out as standard_output
from coterie.cli.report import suggest
from coterie.cli.shared_options import RESULTS, DataDir, Folder, Quiet, Track, with_fields
from coterie.config import check_names, from_mapping, from_yaml
from coterie.memory import without_collecting

if TYPE_CHECKING:
    from coterie.results import Result


@with_fields()
def run(
    what: Annotated[
        str,
        typer.Argument(
            metavar="ALGORITHM",
            help="A method's name (see `coterie list algorithms`), a .py file that defines one, or a .yaml file with a "
            "whole experiment.",
        ),
    ],
    fields: dict[str, Any],
    data_dir: DataDir = None,
    out: Annotated[
        Folder, typer.Option(help="Folder for the run; a new one under runs/ by default.", rich_help_panel=RESULTS)
    ] = None,
    track: Track = None,
    quiet: Quiet = False,
) -> None:
    """Run one experiment, from a method's name or a YAML file; options override the file.

    The table of results goes to standard output, progress to standard error. Ctrl-C leaves a run that can be resumed.

    Example: coterie run fedacs --data digits --partition dirichlet:0.5 --clients 20 --rounds 50 --set p=0.5
    """
    if what.endswith((".yaml", ".yml")):
        check_names(fields)
        config = from_yaml(Path(what), fields)
    else:
        config = from_mapping({"algorithm": what, **fields})
    with without_collecting():
        from coterie import api

    _show(api.run_config(config, out=out, data_dir=data_dir, progress=not quiet, track=track or ()), quiet)


def resume(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that was stopped.")],
    data_dir: DataDir = None,
    track: Track = None,
    quiet: Quiet = False,
) -> None:
    """Go on with a run that was stopped or killed; it ends exactly as if it had never been stopped."""
    with without_collecting():
        from coterie import api

    if api.load(path).finished:
        err.print(f"{path} is finished: there is nothing to resume", markup=False, highlight=False)
    _show(api.resume(path, data_dir=data_dir, progress=not quiet, track=track or ()), quiet)


def show(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs or of comparisons.")],
) -> None:
    """Show runs beside each other in one table; of one that is not finished, what it has so far.

    Of a comparison that has come to its end, its own table.
    """
    from coterie import api
    from coterie.results.client_table import client_table
    from coterie.results.labels import run_title
    from coterie.results.partial_summary import partial_summary
    from coterie.results.report.sources import folders

    there, comparisons = folders(runs)
    named = {path.resolve() for path in runs}
    for comparison in comparisons:
        for sentence in comparison.left_out:
            err.print(sentence, markup=False, highlight=False)
        if comparison.table is not None:
            standard_output.print(comparison.table)
            there = {
                path: called for path, called in there.items() if path not in comparison.runs or path.resolve() in named
            }
    summaries, titles = [], []
    for path, called in there.items():
        result = api.load(path)
        titles.append(called or run_title(result))
        summaries.append(result.summary if result.finished else partial_summary(result))
        if not result.finished:
            done = summaries[-1]["rounds"]
            err.print(f"{path} is not finished: round {done} of {result.config['rounds']}", highlight=False)
    if summaries:
        _print(summaries, titles)
    if len(summaries) == len(runs) == 1 and result.client_names:
        standard_output.print(client_table(result))


def _show(result: Result, quiet: bool) -> None:
    from coterie.results.labels import run_title
    from coterie.rows import distributed

    if not distributed.first():  # another process of the same run shows it
        return
    if not quiet:
        _print([result.summary], [run_title(result)])
        suggest(result.path)
    err.print(f"run: {result.path}", markup=False, highlight=False)


def _print(summaries: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> None:
    from coterie.results import matrix_table, table

    standard_output.print(table(summaries, methods=methods))
    crossed = matrix_table(summaries, methods)
    if crossed is not None:
        standard_output.print(crossed)
