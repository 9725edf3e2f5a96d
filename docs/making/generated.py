"""Pages that are made from the code: the command line, the configuration, and all that has a name."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import click
import measured
import sample
import typer

from coterie import data, models
from coterie.algorithms import LocalTraining, registry
from coterie.algorithms.base import Algorithm
from coterie.cli.app import app
from coterie.config import ExperimentConfig
from coterie.data import partitions
from coterie.evaluation import METRICS
from coterie.federation.schema_table import lines
from coterie.options import allowed, plain
from coterie.simulation import attacks
from coterie.studies.recipes import ledger

RESULTS = Path(__file__).resolve().parents[2] / "results" / "recipes"


def table(headers: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Write a Markdown table, or nothing if it has no rows."""
    lines = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    if not lines:
        return ""
    head = list(headers)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)) + "\n"


def code(text: str) -> str:
    """Write a text as code, or nothing if it is empty."""
    return f"`{text}`" if text else ""


# ---------------------------------------------------------------------------------------------------------- methods


def _models(algorithm: type[Algorithm]) -> str:
    names = ["personal"] if algorithm.has_personal else []
    if algorithm.has_global:
        names.append("global (derived)" if algorithm.derived_global else "global")
    return ", ".join([*names, "hybrid"] if algorithm.has_hybrid else names)


def _parameters(algorithm: type[Algorithm]) -> Iterator[tuple[str, str, str, str]]:
    for name, info in algorithm.model_fields.items():
        common = LocalTraining.model_fields.get(name)
        if common is None or (common.default, common.description) != (info.default, info.description):
            yield f"`{name}`", code(plain(info.default)), allowed(info), info.description or ""


def methods() -> str:
    """Make the table of methods, the parameters that many share, and a section for each method."""
    chosen = [registry.get(name) for name in registry.names()]
    headers = ("parameter", "default", "allowed", "what it is")
    parts = [
        table(
            ("name", "method", "models", "what it does", "source"),
            (
                (f"[`{each.name}`](#{each.name})", each.title, _models(each), each.summary(), each.citation)
                for each in chosen
            ),
        ),
        "## Parameters of local training\n\nMost methods have these; a method's own table names them only where its "
        "default or its meaning is another. `lr`, `local_epochs` and `batch_size` have options of their own on the "
        "command line.\n",
        table(
            headers,
            (
                (f"`{name}`", code(plain(info.default)), allowed(info), info.description or "")
                for name, info in LocalTraining.model_fields.items()
            ),
        ),
    ]
    for each in chosen:
        shared = "" if issubclass(each, LocalTraining) else "It has no parameters but its own.\n\n"
        parts += [
            f"## {each.title} {{ #{each.name} }}\n\n`{each.name}` · {each.citation} · gives {_models(each)}\n",
            f"{each.summary()}\n\n{shared}{table(headers, _parameters(each))}",
            f'??? note "The equations, and departures from the paper"\n\n    ::: {each.__module__}\n        options:\n'
            "            members: false\n"
            "            show_root_heading: false\n"
            "            show_root_toc_entry: false\n",
        ]
    return "\n".join(parts)


# -------------------------------------------------------------------------------------------- everything else by name

_OPTIONS = ("option", "default", "allowed", "what it is")


def catalogue() -> str:
    """Make the lists of data sets, partitions, models, attacks and metrics."""
    parts = ["## Data sets\n"]
    for info in data.describe():
        facts = f"{info.samples} samples of {info.shape}, {info.classes} classes; {info.obtained}; {info.citation}"
        rows = ((f"`{o.name}`", code(o.default), o.allowed, o.doc) for o in info.options)
        parts.append(f"### `{info.name}`\n\n{info.doc}\n\n{facts}.\n\n{table(_OPTIONS, rows)}")
    parts.append("## Partitions\n")
    for scheme in partitions.describe():
        rows = ((f"`{o.name}`", code(o.default), o.allowed, o.doc) for o in scheme.parameters)
        parts.append(f"### `{scheme.name}`\n\n{scheme.doc}\n\n{scheme.citation}.\n\n{table(_OPTIONS, rows)}")
    parts.append("## Models\n")
    parts.append(
        table(
            ("name", "layers", "parameters", "of inputs", "from", "options"),
            (
                (
                    f"`{info.name}`",
                    info.layers,
                    f"{info.parameters:,}",
                    "×".join(map(str, info.input_shape)),
                    info.source,
                    ", ".join(f"`{name}={plain(default)}`" for name, default in info.options.items()),
                )
                for info in models.describe()
            ),
        )
    )
    parts.append("## Attacks\n\nWritten as `kind:fraction,option=value`; the fraction is that of the clients.\n")
    parts.append(
        table(
            ("name", "what a client does", "options"),
            (
                (f"`{info.name}`", info.summary, ", ".join(f"`{k}={plain(v)}`" for k, v in info.options.items()))
                for info in attacks.describe()
            ),
        )
    )
    parts.append("## Metrics\n")
    parts.append(
        table(
            ("name", "what it is", "tasks", "better"),
            (
                (f"`{name}`", each.summary, ", ".join(sorted(each.tasks)), "more" if each.higher_is_better else "less")
                for name, each in METRICS.items()
            ),
        )
    )
    return "\n".join(parts)


# --------------------------------------------------------------------------------------------------- configuration


def configuration() -> str:
    """Make the table of the configuration's fields."""
    options = {
        parameter.name: max(parameter.opts, key=len)
        for parameter in _root().commands["run"].params
        if isinstance(parameter, click.Option)
    }
    rows = (
        (
            f"`{name}`",
            "required" if info.is_required() else code("" if info.default in (None, ()) else plain(info.default)),
            allowed(info),
            code(options.get(name, "--set" if name == "settings" else "")),
            info.description or "",
        )
        for name, info in ExperimentConfig.model_fields.items()
    )
    return table(("field", "default", "allowed", "option", "what it is"), rows)


# --------------------------------------------------------------------------------------------- what crosses the wire


def wire() -> str:
    """Make the table of every tensor that a method sends, by playing the methods."""
    rows = (
        (code(name), line.when, line.way, code(line.name), line.shape, line.to)
        for name in registry.names()
        for line in lines(name)
    )
    return table(("method", "when", "way", "tensor", "numbers", "who gets it"), rows)


# ----------------------------------------------------------------------------------------------------- command line


def _root() -> click.Group:
    command = typer.main.get_command(app)
    assert isinstance(command, click.Group)
    return command


def command_line() -> str:
    """Make a section for each command: how it is called, what it says of itself, arguments and options."""
    return "\n".join(_commands(_root(), "coterie"))


def _commands(group: click.Group, path: str) -> Iterator[str]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}")
        else:
            yield _command(command, f"{path} {name}")


def _command(command: click.Command, path: str) -> str:
    context = click.Context(command, info_name=path)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    told = re.sub(r"^Example: (.+)$", r"Example: `\1`", command.help or "", flags=re.M)
    parts = [f"## {path}\n\n```text\n{usage}\n```\n", told + "\n"]
    arguments = [each for each in command.params if isinstance(each, click.Argument)]
    parts.append(
        table(
            ("argument", "what it is"),
            ((code(each.make_metavar(context)), getattr(each, "help", None) or "") for each in arguments),
        )
    )
    panels: dict[str, list[click.Option]] = {}
    for each in command.params:
        if isinstance(each, click.Option) and not each.hidden:
            panels.setdefault(getattr(each, "rich_help_panel", None) or "Options", []).append(each)
    for panel, options in panels.items():
        parts.append(table((panel, "default", "what it is"), (_option(each, context) for each in options)))
    return "\n".join(part for part in parts if part)


def _option(option: click.Option, context: click.Context) -> tuple[str, str, str]:
    names = "/".join([max(option.opts, key=len), *option.secondary_opts])
    value = "" if option.is_flag else " " + option.make_metavar(context)
    shown = option.show_default if isinstance(option.show_default, str) else option.default
    default = "required" if option.required else code("" if shown in (None, False, "", ()) else str(shown))
    return code(names + value), default, option.help or ""


# --------------------------------------------------------------------------------------------------------- verdicts


def verdicts() -> str:
    """Make the ledger of the papers' claims from the results that are there."""
    return ledger.markdown(ledger.open_ledger(RESULTS))


def reproduction() -> str:
    """Make a section for each table and figure of which there are results."""
    return measured.measured(RESULTS)


PAGES: dict[str, Callable[[], str]] = {
    "methods": methods,
    "catalogue": catalogue,
    "configuration": configuration,
    "command_line": command_line,
    "wire": wire,
    "verdicts": verdicts,
    "reproduction": reproduction,
    "who_gains": sample.who_gains,
    "gallery": sample.gallery,
}
