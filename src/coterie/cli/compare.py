"""The command that compares methods."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.console import err
from coterie.cli.console import out as standard_output
from coterie.cli.report import suggest
from coterie.cli.shared_options import (
    EXPERIMENT_FIELDS,
    METHOD,
    RESULTS,
    Apart,
    AutoJobs,
    DataDir,
    Quiet,
    Seeds,
    Texts,
    Track,
    with_fields,
)
from coterie.cli.written_values import parse_lists, separate_seeds
from coterie.config import check_names
from coterie.errors import ConfigError, CoterieError
from coterie.memory import without_collecting
from coterie.yaml_file import read_yaml


@with_fields(*(name for name in EXPERIMENT_FIELDS if name != "seed"))
def compare(
    methods: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD...",
            help="Methods by name, .py files that define one, or a single .yaml file with a whole comparison.",
        ),
    ],
    fields: dict[str, Any],
    out: Annotated[
        Path, typer.Option(help="The comparison's folder; the same command goes on in it.", rich_help_panel=RESULTS)
    ],
    data_dir: DataDir = None,
    seeds: Seeds = None,
    tune: Annotated[
        Texts,
        typer.Option(
            metavar="KEY=A,B,...",
            help="Choose a parameter from these values for each method, on validation data; may be repeated.",
            rich_help_panel=METHOD,
        ),
    ] = None,
    at: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Compare after the last round (final), or at each run's best on validation data (best) or on test "
            "data (best_oracle).",
            rich_help_panel=RESULTS,
        ),
    ] = "final",
    jobs: AutoJobs = None,
    apart: Apart = False,
    track: Track = None,
    quiet: Quiet = False,
) -> None:
    """Compare several methods over several seeds in one table; options override the file.

    Runs that are finished are not repeated: after Ctrl-C or a kill, the same command goes on, and so does one with more
    methods, seeds or values, or with other settings of runs that diverged or failed. Numbers are means over
    clients, then mean ± std over seeds; the best is bold, and stars mark methods that differ from it. The tables are
    written to --out too, as table.md, table.tex and table.csv.

    Example: coterie compare fedacs fedamp fedavg local --seeds 1 10 100 --rounds 50 --out digits
    """
    names, numbers = separate_seeds(methods, seeds or [])
    fields |= {"seeds": numbers} if numbers else {}
    fields |= {"tune": parse_lists(tune)} if tune else {}
    values = _with_file(names, fields)
    _check_names(values)
    with without_collecting():
        from coterie.studies import comparison

    found = comparison.compare(
        comparison.make_plan(values),
        out,
        data_dir=data_dir,
        at=at,  # type: ignore[arg-type]  # checked there
        jobs=jobs,
        together=not apart,
        progress=not quiet,
        track=track or (),
    )
    if not quiet:
        standard_output.print(comparison.table(found))
        if any(row.scores for row in found.rows):
            suggest(out)
    err.print(f"comparison: {out}", markup=False, highlight=False)
    if not any(row.scores for row in found.rows):
        raise CoterieError("all runs diverged, so that nothing can be compared: try a smaller --lr")


def _with_file(words: Sequence[str], values: dict[str, Any]) -> dict[str, Any]:
    files = [word for word in words if word.endswith((".yaml", ".yml"))]
    if not files:
        return {**values, "methods": list(words)}
    if len(words) > 1:
        raise ConfigError(f"{files[0]!r} is a whole comparison: give it alone, without {len(words) - 1} other methods")
    ours = read_yaml(Path(files[0]))
    settings = ours.get("settings") or {}
    if not isinstance(settings, dict):
        raise ConfigError(f"settings is {settings!r}, but must map the methods' parameters to values")
    return {**ours, **values, "settings": {**settings, **values["settings"]}}


def _check_names(values: dict[str, Any]) -> None:
    """Refuse unknown names before anything is imported; all else is checked with the plan."""
    check_names(values)
    methods = values.get("methods")
    for method in methods if isinstance(methods, list) else ():
        check_names({"algorithm": method} if isinstance(method, str) else {})
