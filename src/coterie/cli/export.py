"""The commands that take models out of a run, and predict with them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.console import err
from coterie.cli.shared_options import DataDir, Folder, Text, Texts

if TYPE_CHECKING:
    from coterie.results.export import Exported


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    client: Annotated[
        Texts,
        typer.Option(
            metavar="CLIENT", help="A client, by name or number from 0; may be repeated.", show_default="all clients"
        ),
    ] = None,
    best: Annotated[
        Text,
        typer.Option(
            metavar="NAME",
            help="Which model: personal, global, or hybrid (the better of the two on the client's validation samples).",
            show_default="personal",
        ),
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write each model as an ONNX file too.")] = False,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder to write.")] = Path("model"),
    data_dir: DataDir = None,
) -> None:
    """Write models as a folder that predicts for raw rows, without Coterie: columns, scaling, parameters, code.

    Example: coterie export runs/fedacs-hospitals-seed1 --client north --out north
    """
    from coterie.results import export as exporting

    written = exporting.export(
        run, out, clients=client or None, best=exporting.kind(best), onnx=onnx, data_dir=data_dir
    )
    _say_what_was_written(written)


def personalize(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    data: Annotated[
        Path,
        typer.Option(metavar="FILE", help="The client's samples: a CSV or Parquet table, or x and y in an .npz file."),
    ],
    name: Annotated[
        Text, typer.Option(metavar="NAME", help="What the client is called.", show_default="as its table says")
    ] = None,
    label: Annotated[
        Text, typer.Option(metavar="COLUMN", help="The column to predict.", show_default="the run's")
    ] = None,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="How many rounds the client joins for.", show_default="the run's adapt_rounds"),
    ] = None,
    test_fraction: Annotated[
        float | None,
        typer.Option(
            min=0, help="Which part of the samples is kept to measure the model.", show_default="the run's, or 0.2"
        ),
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write the model as an ONNX file too.")] = False,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="The folder to write.")] = Path("model"),
) -> None:
    """Make a model for a client that was in no run, from a finished run and its own samples; then `coterie predict`.

    Example: coterie personalize runs/fedacs-hospitals-seed1 --data new.csv --out new
    """
    from coterie.results import export as exporting

    written = exporting.personalize(
        run, data, out, name=name, label=label, rounds=rounds, test_fraction=test_fraction, onnx=onnx
    )
    _say_what_was_written(written)


def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A folder that `coterie export` wrote.")],
    rows: Annotated[
        Path, typer.Argument(metavar="ROWS", help="A CSV or Parquet file with a header, or samples in .npy or .npz.")
    ],
    client: Annotated[
        Text, typer.Option(metavar="CLIENT", help="Whose model, by name or number, where there are several.")
    ] = None,
    out: Annotated[
        Folder, typer.Option(metavar="FILE", help="The CSV file for the scores.", show_default="the terminal")
    ] = None,
) -> None:
    """Predict for raw rows with an exported model: the class and all probabilities, or the value, of each row.

    Example: coterie predict model new.csv --client north --out scores.csv
    """
    from coterie.errors import ConfigError
    from coterie.results.export import predict as predicted

    scores = predicted(model, rows, client)
    if out is None:
        scores.to_csv(sys.stdout, index=False)
        return
    try:
        scores.to_csv(out, index=False)
    except OSError as error:
        raise ConfigError(f"out is {str(out)!r}, which cannot be written ({error.strerror or error})") from error
    err.print(f"scores: {out} ({len(scores):,} rows)", markup=False, highlight=False)


def _say_what_was_written(written: Exported) -> None:
    entries = written.about["clients"]
    for entry in entries[:_SHOWN]:
        whose = "all clients" if entry["client"] is None else entry.get("name", f"client {entry['client']}")
        measured = ", ".join(f"{name} {value:.4f}" for name, value in entry["test"].items())
        said = f"on test samples: {measured}" if measured else "not measured"
        err.print(f"{whose}: {entry['kind']} model, {said}", markup=False, highlight=False, soft_wrap=True)
    if len(entries) > _SHOWN:
        err.print(f"and {len(entries) - _SHOWN} more", highlight=False)
    err.print(f"model: {written.folder}", markup=False, highlight=False, soft_wrap=True)


_SHOWN = 20  # clients that are named
