"""Commands that say what there is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Optional

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from coterie import data, models
from coterie.algorithms import registry
from coterie.algorithms.base import Algorithm
from coterie.cli.console import out
from coterie.data import partitions
from coterie.errors import UnknownName
from coterie.evaluation import METRICS
from coterie.options import allowed, plain
from coterie.simulation import attacks

app = typer.Typer(
    help="List algorithms, data, partitions, models, attacks or metrics, with their parameters.", no_args_is_help=True
)

Name = Annotated[Optional[str], typer.Argument(help="Show only this one.")]  # noqa: UP045


def _outputs(algorithm: type[Algorithm]) -> str:
    names = ["personal"] if algorithm.has_personal else []
    if algorithm.has_global:
        names.append("global (derived)" if algorithm.derived_global else "global")
    if algorithm.has_hybrid:
        names.append("hybrid")
    return ", ".join(names)


def _heading(name: str, about: str, *facts: str) -> None:
    out.print(Text.assemble((name, "bold"), "  ", " · ".join(fact for fact in facts if fact)))
    out.print(Padding(Text(about), (0, 0, 0, 3)))


def _parameters(rows: Iterable[tuple[str, str, str, str]]) -> None:
    grid = Table.grid(padding=(0, 2))
    for name, default, values, text in rows:
        setting = name if default == "" else f"{name}={default}"
        grid.add_row("   ", Text(setting, style="cyan"), Text(values, style="dim"), Text(text))
    if grid.rows:
        out.print(grid)
    out.print()


def _chosen(kind: str, name: str | None, known: Sequence[str]) -> list[str]:
    if name is None:
        return list(known)
    if name not in known:
        raise UnknownName(kind, name, known)
    return [name]


@app.command()
def algorithms(name: Name = None) -> None:
    """Show methods, with their models, parameters, defaults, ranges and citation."""
    for each in registry.names() if name is None else [name]:
        algorithm = registry.get(each)
        gives = f"gives {_outputs(algorithm)}"
        _heading(algorithm.name, algorithm.summary(), algorithm.title, algorithm.citation, gives)
        _parameters(
            (field, plain(info.default), allowed(info), info.description or "")
            for field, info in algorithm.model_fields.items()
        )


@app.command(name="data")
def data_sets(name: Name = None) -> None:
    """Show data sets, with their sizes and options."""
    known = {info.name: info for info in data.describe()}
    for each in _chosen("data set", name, list(known)):
        info = known[each]
        facts = (f"{info.samples} samples", info.shape, f"{info.classes} classes", info.obtained, info.citation)
        _heading(each, info.doc, *facts)
        _parameters((option.name, option.default, option.allowed, option.doc) for option in info.options)


@app.command(name="partitions")
def partition_schemes(name: Name = None) -> None:
    """Show ways to deal samples out to clients."""
    known = {info.name: info for info in partitions.describe()}
    for each in _chosen("partition", name, list(known)):
        info = known[each]
        _heading(each, info.doc, info.citation)
        _parameters((option.name, option.default, option.allowed, option.doc) for option in info.parameters)


@app.command(name="models")
def model_shapes(name: Name = None) -> None:
    """Show models, with their layers and parameter counts."""
    known = {info.name: info for info in models.describe()}
    for each in _chosen("model", name, list(known)):
        info = known[each]
        shape = "x".join(map(str, info.input_shape))
        _heading(each, info.layers, f"{info.parameters:,} parameters on {shape}", info.source)
        _parameters((option, plain(default), "", "") for option, default in info.options.items())


@app.command(name="attacks")
def attack_kinds(name: Name = None) -> None:
    """Show attacks, with their options."""
    known = {info.name: info for info in attacks.describe()}
    for each in _chosen("attack", name, list(known)):
        _heading(each, known[each].summary)
        _parameters((option, plain(default), "", "") for option, default in known[each].options.items())


@app.command(name="metrics")
def metric_names(name: Name = None) -> None:
    """Show metrics, with the tasks they fit."""
    for each in _chosen("metric", name, list(METRICS)):
        metric = METRICS[each]
        better = "more is better" if metric.higher_is_better else "less is better"
        _heading(each, metric.summary, ", ".join(sorted(metric.tasks)), better)
        out.print()
