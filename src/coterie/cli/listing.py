"""Commands that list what there is; each imports no more than what it lists."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from coterie.algorithms import registry
from coterie.cli.console import out
from coterie.data.partitions.registry import SCHEMES
from coterie.data.registry import SOURCES
from coterie.errors import UnknownName
from coterie.models import registry as model_registry
from coterie.options import allowed, plain
from coterie.simulation.attack_registry import ATTACKS

if TYPE_CHECKING:
    from coterie.algorithms.base import Algorithm

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
    from rich.padding import Padding
    from rich.text import Text

    out.print(Text.assemble((name, "bold"), "  ", " · ".join(fact for fact in facts if fact)))
    out.print(Padding(Text(about), (0, 0, 0, 3)))


def _parameters(rows: Iterable[tuple[str, str, str, str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    grid = Table.grid(padding=(0, 2))
    for name, default, values, text in rows:
        setting = name if default == "" else f"{name}={default}"
        grid.add_row("   ", Text(setting, style="cyan"), Text(values, style="dim"), Text(text))
    if grid.rows:
        out.print(grid)
    out.print()


def _chosen(kind: str, name: str | None, known: Collection[str]) -> list[str]:
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
    for each in _chosen("data set", name, SOURCES):
        info = SOURCES[each].describe()
        facts = (f"{info.samples} samples", info.shape, f"{info.classes} classes", info.obtained, info.citation)
        _heading(each, info.doc, *facts)
        _parameters((option.name, option.default, option.allowed, option.doc) for option in info.options)


@app.command(name="partitions")
def partition_schemes(name: Name = None) -> None:
    """Show the ways to divide samples among clients."""
    for each in _chosen("partition", name, SCHEMES):
        scheme = SCHEMES[each]
        _heading(each, scheme.summary(), scheme.citation)
        _parameters((option.name, option.default, option.allowed, option.doc) for option in scheme.parameters())


@app.command(name="models")
def model_shapes(name: Name = None) -> None:
    """Show models, with their layers and parameter counts."""
    chosen = _chosen("model", name, model_registry.names())
    for info in model_registry.describe():
        if info.name in chosen:
            shape = "x".join(map(str, info.input_shape))
            _heading(info.name, info.layers, f"{info.parameters:,} parameters on {shape}", info.source)
            _parameters((option, plain(default), "", "") for option, default in info.options.items())


@app.command(name="attacks")
def attack_kinds(name: Name = None) -> None:
    """Show attacks, with their options."""
    chosen = _chosen("attack", name, ATTACKS)
    from coterie.simulation import attacks

    for info in attacks.describe():
        if info.name in chosen:
            _heading(info.name, info.summary)
            _parameters((option, plain(default), "", "") for option, default in info.options.items())


@app.command(name="metrics")
def metric_names(name: Name = None) -> None:
    """Show metrics, with the tasks they fit."""
    from coterie.evaluation import METRICS

    for each in _chosen("metric", name, METRICS):
        metric = METRICS[each]
        better = "more is better" if metric.higher_is_better else "less is better"
        _heading(each, metric.summary, ", ".join(sorted(metric.tasks)), better)
        out.print()
