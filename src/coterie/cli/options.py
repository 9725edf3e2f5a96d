"""Options that several commands have, in the configuration's own words."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Optional, get_origin

import typer

from coterie.config import ExperimentConfig
from coterie.options import allowed, plain

Text = Optional[str]  # noqa: UP045 (typer reads these at run time)
Texts = Optional[list[str]]  # noqa: UP045
Whole = Optional[int]  # noqa: UP045
Number = Optional[float]  # noqa: UP045
Numbers = Optional[list[float]]  # noqa: UP045
Switch = Optional[bool]  # noqa: UP045
Folder = Optional[Path]  # noqa: UP045

FEDERATION, TRAINING, COMPUTING, RESULTS = "The federation", "Training", "Computing", "Results"
"""The panels of ``--help``."""


def field(name: str, panel: str, *names: str, metavar: str | None = None) -> Any:
    """Make an option for a field of the configuration, in the field's own words.

    Parameters
    ----------
    name
        The field.
    panel
        The panel of ``--help`` in which it stands.
    *names
        What it is called on the command line; by default as the field.
    metavar
        What its value is called; by default its type.

    Returns
    -------
    Any
        What typer wants as an annotation.
    """
    info = ExperimentConfig.model_fields[name]
    words = info.description or ""
    if get_origin(info.annotation) is Literal:
        words = f"{words}: {allowed(info)}"
    default = plain(info.default) if info.default not in (None, ()) else ""
    return typer.Option(
        *names,
        help=f"{words[:1].upper()}{words[1:]}.",
        show_default=default or False,
        metavar=metavar,
        rich_help_panel=panel,
    )


Data = Annotated[Text, field("data", FEDERATION)]
Partition = Annotated[Text, field("partition", FEDERATION)]
Clients = Annotated[Whole, field("clients", FEDERATION)]
Validation = Annotated[Number, field("validation", FEDERATION)]
TestFraction = Annotated[Number, field("test_fraction", FEDERATION)]
MaxTest = Annotated[Whole, field("max_test", FEDERATION)]
Scarcity = Annotated[Whole, field("scarcity", FEDERATION)]
Seed = Annotated[Whole, field("seed", TRAINING)]
Track = Annotated[
    Texts,
    typer.Option(
        metavar="NAME",
        help="Tell a tracker how it goes: tensorboard[:FOLDER], mlflow[:URI] or wandb[:PROJECT]; may be repeated.",
        rich_help_panel=RESULTS,
    ),
]
DataDir = Annotated[
    Folder,
    typer.Option(
        help="Where data sets lie; a cache folder of yours by default.",
        envvar="COTERIE_DATA",
        rich_help_panel=FEDERATION,
    ),
]
