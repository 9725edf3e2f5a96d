"""Commands about partitions: who gets what, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

from coterie.cli.console import err, out
from coterie.cli.options import (
    Clients,
    Data,
    DataDir,
    MaxTest,
    Partition,
    Scarcity,
    Seed,
    TestFraction,
    Validation,
)
from coterie.config import ExperimentConfig, from_mapping
from coterie.data import partitions
from coterie.errors import ConfigError
from coterie.runs.builder import make_population

app = typer.Typer(help="Show who gets what.", no_args_is_help=True)

_PICTURES = (".png", ".svg", ".pdf")


@app.callback()
def _only() -> None:
    pass


@app.command()
def show(
    data: Data = None,
    partition: Partition = None,
    clients: Clients = None,
    seed: Seed = None,
    validation: Validation = None,
    test_fraction: TestFraction = None,
    max_test: MaxTest = None,
    scarcity: Scarcity = None,
    data_dir: DataDir = None,
    plot: Annotated[
        Optional[Path],  # noqa: UP045 (typer reads it at run time)
        typer.Option(metavar="FILE", help="Write a chart too: .png, .svg or .pdf."),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Clients to show in the table at most.")] = 40,
) -> None:
    """Show which samples each client would get in a run with the same options, and draw it with --plot.

    Example: coterie partition show --data digits --partition dirichlet:0.5 --clients 20 --plot who.png
    """
    own = ExperimentConfig.model_fields
    values = {name: value for name, value in locals().items() if name in own and value is not None}
    if plot is not None:
        _refuse_unfit(plot)
    population = make_population(from_mapping({"algorithm": "local", **values}), data_dir)
    out.print(population.shares.table(population.dataset.y, population.dataset.classes, limit))
    if plot is not None:
        figure = partitions.plot(population.shares, population.dataset.y, population.dataset.classes)
        try:
            figure.savefig(plot, dpi=150)
        except OSError as error:
            raise ConfigError(f"plot is {str(plot)!r}, which cannot be written ({error.strerror})") from error
        err.print(f"chart: {plot}", markup=False, highlight=False)


def _refuse_unfit(plot: Path) -> None:
    if plot.suffix.lower() not in _PICTURES:
        raise ConfigError(f"plot is {str(plot)!r}, but must end in {', '.join(_PICTURES)}")
    if not plot.absolute().parent.is_dir():
        raise ConfigError(f"plot is {str(plot)!r}, but there is no folder {str(plot.parent)!r}")
