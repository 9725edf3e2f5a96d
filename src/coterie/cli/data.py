"""Commands about data sets: list them, check which are on the disk, download one."""

from __future__ import annotations

from typing import Annotated

import typer

from coterie import data
from coterie.cli import listing
from coterie.cli.console import err, out
from coterie.cli.shared_options import DataDir

app = typer.Typer(help="List data sets, check which are on the disk, download one.", no_args_is_help=True)
app.command(name="list")(listing.data_sets)

_STYLES = {"whole": "green", "damaged": "red", "incomplete": "yellow", "missing": "dim"}


@app.command()
def status(name: listing.Name = None, data_dir: DataDir = None) -> None:
    """Show which data sets are on the disk; their files are read and checked."""
    from rich.text import Text

    sets = data.status(data_dir, name)
    out.print(Text(f"data folder: {data.data_folder(data_dir)}"), soft_wrap=True)
    for found in sets:
        style = _STYLES.get(found.state, "")
        out.print(Text.assemble(f"{found.name:15}", (f"{found.state:11}", style), found.hint), soft_wrap=True)
        for sentence in found.damaged:
            out.print(Text(f"{'':15}{sentence}"), soft_wrap=True)
        for file in found.missing[:4] if found.state == "incomplete" else ():
            out.print(Text(f"{'':15}{file} is missing"), soft_wrap=True)


@app.command()
def fetch(
    name: Annotated[str, typer.Argument(help="The data set, see `coterie data list`.")],
    data_dir: DataDir = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Download a data set from its official address and check it; files that are there and intact are left alone.

    A download that was interrupted continues where it stopped. Without a network, the error says which file to put
    where.
    """
    err.print(f"data: {data.fetch(name, data_dir, progress=not quiet)}", markup=False, highlight=False)
