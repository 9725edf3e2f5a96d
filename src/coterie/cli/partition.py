"""Commands about partitions: who gets what, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from coterie.cli.console import err, out
from coterie.cli.shared_options import DataDir, Folder, with_fields
from coterie.config import from_mapping
from coterie.errors import ConfigError

app = typer.Typer(help="Show which samples each client gets.", no_args_is_help=True)

_PICTURES = (".png", ".svg", ".pdf")


@app.callback()
def _only() -> None:
    pass


@app.command()
@with_fields("data", "partition", "clients", "seed", "validation", "test_fraction", "max_test", "scarcity")
def show(
    fields: dict[str, Any],
    data_dir: DataDir = None,
    plot: Annotated[Folder, typer.Option(metavar="FILE", help="Write a chart too: .png, .svg or .pdf.")] = None,
    limit: Annotated[int, typer.Option(min=1, help="Clients to show in the table at most.")] = 40,
) -> None:
    """Show which samples each client would get in a run with the same options, and draw it with --plot.

    Example: coterie partition show --data digits --partition dirichlet:0.5 --clients 20 --plot who.png
    """
    if plot is not None:
        _check_picture(plot)
    config = from_mapping({"algorithm": "local", **fields})
    from coterie.data import partitions
    from coterie.runs.builder import make_population

    population = make_population(config, data_dir)
    out.print(population.shares.table(population.dataset.y, population.dataset.classes, limit))
    if plot is not None:
        figure = partitions.plot(population.shares, population.dataset.y, population.dataset.classes)
        try:
            figure.savefig(plot, dpi=150)
        except OSError as error:
            raise ConfigError(f"plot is {str(plot)!r}, which cannot be written ({error.strerror})") from error
        err.print(f"chart: {plot}", markup=False, highlight=False)


def _check_picture(plot: Path) -> None:
    if plot.suffix.lower() not in _PICTURES:
        raise ConfigError(f"plot is {str(plot)!r}, but must end in {', '.join(_PICTURES)}")
    if not plot.absolute().parent.is_dir():
        raise ConfigError(f"plot is {str(plot)!r}, but there is no folder {str(plot.parent)!r}")
