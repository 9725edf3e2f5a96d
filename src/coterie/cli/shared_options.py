"""Options that several commands have: one for each field of the configuration, in its own words, and a few more.

Everything here is read before a command runs, so nothing here may import more than the configuration does.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Optional, Union, get_args, get_origin

import typer

from coterie.cli.written_values import parse_settings
from coterie.config import SHORTHANDS, ExperimentConfig, Kind, kind_of
from coterie.options import allowed, plain

# typer reads these at run time, and does not know the newer spelling.
Text = Optional[str]  # noqa: UP045
Texts = Optional[list[str]]  # noqa: UP045
Folder = Optional[Path]  # noqa: UP045

EXPERIMENT, METHOD, COMPUTING, RESULTS = "The experiment", "The method", "Computing", "Results"
"""The panels of ``--help``."""

_PANELS = {Kind.WHAT: EXPERIMENT, Kind.HOW: COMPUTING, Kind.RECORD: RESULTS}
_WITHOUT_OPTION = ("algorithm", "algorithm_sha256")  # the first is the command's argument
_FLAGS = {"metrics": "--metric", "settings": "--set"}  # one value each time, so in the singular
_METAVARS = {"device": "NAME", "metrics": "NAME", "s_acc": "FRACTION", "scratch": "FOLDER"}
_SHORTHANDS: dict[str, tuple[type, str]] = {
    "local_epochs": (int, "Local epochs in a round"),
    "batch_size": (int, "Samples in a minibatch, 0 for all of them"),
    "lr": (float, "Learning rate"),
}

EXPERIMENT_FIELDS = (*(name for name in ExperimentConfig.model_fields if name not in _WITHOUT_OPTION), *SHORTHANDS)
"""All fields that have an option, and the parameters of methods that have one of their own."""

Command = Callable[..., None]


def with_fields(*names: str, **defaults: object) -> Callable[[Command], Command]:
    """Give a command options for some fields of the configuration, all of them if none is named.

    The command has a parameter ``fields``, in whose place the options stand, and which it is called with: the values
    that were given, by the field's name. Keywords name fields too, which have another default here.
    """
    chosen = (*names, *defaults) or EXPERIMENT_FIELDS

    def decorate(command: Command) -> Command:
        parameters: list[inspect.Parameter] = []
        for own in inspect.signature(command, eval_str=True).parameters.values():
            if own.name == "fields":
                parameters += [_parameter(name, defaults.get(name)) for name in chosen]
            else:
                parameters.append(own.replace(kind=inspect.Parameter.KEYWORD_ONLY))

        @functools.wraps(command)
        def called(**given: Any) -> None:
            fields = {name: given.pop(name) for name in chosen}
            fields = {name: value for name, value in fields.items() if value not in (None, [])}
            if "settings" in chosen:
                fields["settings"] = parse_settings(fields.get("settings", []))
            command(**given, fields=fields)

        called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in parameters}
        return called

    return decorate


def _parameter(name: str, default: object) -> inspect.Parameter:
    if name in SHORTHANDS:
        kind, words = _SHORTHANDS[name]
        option = typer.Option(help=f"{words}; the method's own by default.", rich_help_panel=METHOD)
    elif name == "settings":
        kind, words = list[str], "A parameter of the method; may be repeated."
        option = typer.Option(_FLAGS[name], metavar="KEY=VALUE", help=words, rich_help_panel=METHOD)
    else:
        kind, option = _value_type(ExperimentConfig.model_fields[name].annotation), _field_option(name, default)
    annotation = Annotated[Optional[kind], option]  # type: ignore[valid-type]  # noqa: UP045
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _field_option(name: str, default: object) -> Any:
    info = ExperimentConfig.model_fields[name]
    words, flags = info.description or "", []
    is_choice = get_origin(info.annotation) is Literal
    if is_choice:
        words = f"{words}: {allowed(info)}"
    if name in _FLAGS:
        flags = [_FLAGS[name]]
    elif info.annotation is bool:
        flag = name.replace("_", "-")
        flags = [f"--{flag}/--no-{flag}"]
    shown = "" if info.default in (None, ()) else plain(info.default)
    return typer.Option(
        *flags,
        help=f"{words[:1].upper()}{words[1:]}.",
        show_default=True if default is not None else shown or False,
        metavar="NAME" if is_choice else _METAVARS.get(name),
        rich_help_panel=_PANELS[kind_of(info)],
    )


def _value_type(annotation: Any) -> Any:
    """Give the type of a field's value as typer knows it: ``tuple[str, ...]`` is a list, a choice is a text."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _value_type(parts[0])
    if origin is Literal:
        return str
    if origin in (Union, types.UnionType):
        return _value_type(next(part for part in parts if part is not type(None)))
    if origin is tuple:
        return list[_value_type(parts[0])]  # type: ignore[misc]
    return annotation


Method = Annotated[str, typer.Argument(metavar="METHOD", help="A method's name.")]
Track = Annotated[
    Texts,
    typer.Option(
        metavar="NAME",
        help="Report to a tracker: tensorboard[:FOLDER], mlflow[:URI] or wandb[:PROJECT]; may be repeated.",
        rich_help_panel=RESULTS,
    ),
]
DataDir = Annotated[
    Folder,
    typer.Option(
        help="The folder that holds data sets; a cache folder of yours by default.",
        envvar="COTERIE_DATA",
        rich_help_panel=EXPERIMENT,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no table.", rich_help_panel=RESULTS)]
Seeds = Annotated[
    Texts,
    typer.Option(
        metavar="SEED...", help="Seeds, each run once by every method: --seeds 1 10 100.", rich_help_panel=EXPERIMENT
    ),
]
Jobs = Annotated[
    int,
    typer.Option(
        min=1,
        help="Processes that play runs side by side: on the CPU up to one a core; on one GPU one is the fastest, "
        "unless NVIDIA's multi-process service (MPS) lets several compute at the same time: then a few are.",
        rich_help_panel=COMPUTING,
    ),
]
AutoJobs = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Processes that play runs side by side, up to one a core of the CPU; by default as many as pay for their "
        "start. On one GPU one is the default, and the fastest unless NVIDIA's multi-process service (MPS) lets "
        "several compute at the same time.",
        rich_help_panel=COMPUTING,
    ),
]
Apart = Annotated[
    bool,
    typer.Option(
        "--apart",
        help="Play every run by itself; by default runs with the same data, model and device play together.",
        rich_help_panel=COMPUTING,
    ),
]
