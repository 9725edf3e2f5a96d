"""The command that takes one client's model out of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from coterie.cli.console import err
from coterie.cli.shared_options import DataDir, Text


def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a finished run.")],
    client: Annotated[str, typer.Option(metavar="CLIENT", help="The client: its name, or its number from 0.")],
    best: Annotated[
        Text,
        typer.Option(
            metavar="NAME",
            help="Which model: personal, global, or hybrid (the better of the two on the client's validation samples).",
            show_default="personal",
        ),
    ] = None,
    onnx: Annotated[bool, typer.Option("--onnx", help="Write the module as an ONNX file too.")] = False,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The file for the parameters.")] = Path("model.safetensors"),
    data_dir: DataDir = None,
) -> None:
    """Write one client's model: its parameters, what is known of it, and a Python file that loads it.

    Example: coterie export runs/fedacs-digits-seed1 --client 7 --out client7.safetensors
    """
    from coterie.results import export as exporting

    written = exporting.export(run, client, out, best=exporting.kind(best), onnx=onnx, data_dir=data_dir)
    measured = ", ".join(f"{name} {value:.4f}" for name, value in written.about["test"].items())
    err.print(f"{written.about['kind']} model of client {client}, on its test samples: {measured}", highlight=False)
    err.print(f"model: {written.model}, loaded by {written.loader}", markup=False, highlight=False)
    if written.onnx:
        err.print(f"onnx: {written.onnx}", markup=False, highlight=False)
    if written.peft:
        err.print(f"adapters for PEFT: {written.peft}", markup=False, highlight=False)
