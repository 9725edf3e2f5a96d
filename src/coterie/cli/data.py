"""Commands about data sets: list them, check which are on the disk, download one, describe your own, draw a sample."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie import data
from coterie.cli import listing
from coterie.cli.console import err, out
from coterie.cli.shared_options import DataDir, Folder
from coterie.errors import ConfigError, DataError

app = typer.Typer(
    help="List data sets, check which are on the disk, download one, describe your own.", no_args_is_help=True
)
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


@app.command()
def sample(
    out: Annotated[Path, typer.Argument(metavar="FILE", help="The CSV file to write.")],
    rows: Annotated[int, typer.Option(min=1, help="About how many rows.")] = 12000,
    seed: Annotated[int, typer.Option(min=0, help="The seed of everything that is drawn.")] = 1,
) -> None:
    """Draw a table to try things with: stays in twelve hospitals of unequal sizes, with gaps, some hospitals alike.

    Example: coterie data sample hospitals.csv
    """
    if out.exists():
        raise ConfigError(f"{out} is there already: choose another file")
    from coterie.data.hospitals import HOSPITALS, draw_hospitals

    table = draw_hospitals(rows, seed)
    try:
        table.to_csv(out, index=False)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written ({error.strerror or error})") from error
    err.print(f"table: {out} ({len(table):,} rows, {len(HOSPITALS)} hospitals)", markup=False, highlight=False)


@app.command()
def decoded(
    folder: Annotated[Path, typer.Argument(help="The folder of images, as after --data folder:.")],
    remove: Annotated[
        bool, typer.Option("--remove", help="Remove the files; they are made again when wanted.")
    ] = False,
    data_dir: DataDir = None,
) -> None:
    """List the files of decoded images that belong to a folder of images, or remove them.

    Images that are more than 64 MB decoded are decoded once, into a file beside them, or in the data folder where
    nobody may write beside them.
    """
    from coterie.data.image_cache import cached_files
    from coterie.units import format_bytes

    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    found = cached_files(folder, data.data_folder(data_dir))
    for file in found:
        out.print(f"{format_bytes(file.stat().st_size):>9}  {file}", markup=False, highlight=False, soft_wrap=True)
        if remove:
            file.unlink(missing_ok=True)
    said = f"{len(found)} file{'' if len(found) == 1 else 's'}{' removed' if remove else ''}"
    err.print(said if found else f"there are no decoded images of {folder}", markup=False, highlight=False)


@app.command()
def describe(
    source: Annotated[
        str, typer.Argument(metavar="TABLE", help="Your table, as after --data: table:a.csv,label=outcome.")
    ],
    write: Annotated[
        Folder, typer.Option(metavar="FILE", help="Write what the columns are to a file, for columns=FILE.")
    ] = None,
) -> None:
    """Show what the columns of a table are taken for, its gaps, the rows of each client, and all that is wrong with it.

    Example: coterie data describe table:a.csv,label=outcome,client=hospital --write schema.yaml
    """
    from coterie.data.registry import SOURCES
    from coterie.options import resolve

    found = resolve("data set", source, SOURCES)
    from coterie.data.table import TableSource

    if not isinstance(found, TableSource):
        raise ConfigError(f"data is {source!r}, but only a table has columns: give table:FILE,label=COLUMN")
    from coterie.data import table_overview

    if write is not None and write.exists():
        raise ConfigError(f"write is {str(write)!r}, which is there already: choose another file")
    content = found.content()
    out.print(table_overview.columns_table(found, content))
    clients = table_overview.clients_table(found, content)
    if clients is not None:
        out.print(clients)
    if write is not None:
        try:
            content.schema.write(write)
        except OSError as error:
            raise ConfigError(f"write is {str(write)!r}, which cannot be written ({error.strerror})") from error
        err.print(f"schema: {write}", markup=False, highlight=False)
    for sentence in content.problems:
        err.print(f"problem: {sentence}", markup=False, highlight=False, soft_wrap=True)
    if content.problems:
        count = len(content.problems)
        raise DataError(f"the table {found.path} cannot be used as it is: {count} problem{'s' if count > 1 else ''}")
