"""Commands that list what there is."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Optional

import typer

from coterie.cli.catalogue import CatalogueEntry, chosen
from coterie.cli.console import out

app = typer.Typer(
    help="List algorithms, data, partitions, models, attacks or metrics, with their parameters.", no_args_is_help=True
)

Name = Annotated[Optional[str], typer.Argument(help="Show only this one.")]  # noqa: UP045


def _show(entries: Iterable[CatalogueEntry]) -> None:
    from rich.padding import Padding
    from rich.table import Column, Table
    from rich.text import Text

    for entry in entries:
        out.print(Text.assemble((entry.name, "bold"), "  ", " · ".join(fact for fact in entry.facts if fact)))
        out.print(Padding(Text(entry.about), (0, 0, 0, 3)))
        grid = Table.grid("", Column(no_wrap=True), "", "", padding=(0, 2))
        for name, default, values, text in entry.options:
            setting = name if default == "" else f"{name}={default}"
            grid.add_row("   ", Text(setting, style="cyan"), Text(values, style="dim"), Text(text))
        if grid.rows:
            out.print(grid)
        out.print()


@app.command()
def algorithms(name: Name = None) -> None:
    """Show methods, with their models, parameters, defaults, ranges and citation."""
    _show(chosen("algorithm", name))


@app.command(name="data")
def data_sets(name: Name = None) -> None:
    """Show data sets, with their sizes and options."""
    _show(chosen("data set", name))


@app.command(name="partitions")
def partition_schemes(name: Name = None) -> None:
    """Show the ways to divide samples among clients."""
    _show(chosen("partition", name))


@app.command(name="models")
def model_shapes(name: Name = None) -> None:
    """Show models, with their layers and parameter counts."""
    _show(chosen("model", name))


@app.command(name="attacks")
def attack_kinds(name: Name = None) -> None:
    """Show attacks, with their options."""
    _show(chosen("attack", name))


@app.command(name="metrics")
def metric_names(name: Name = None) -> None:
    """Show metrics, with the tasks they fit."""
    _show(chosen("metric", name))
