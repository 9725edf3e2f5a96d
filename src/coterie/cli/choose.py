"""The command that chooses a method for the user's data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from coterie.cli.console import err
from coterie.cli.console import out as standard_output
from coterie.cli.shared_options import (
    EXPERIMENT_FIELDS,
    METHOD,
    RESULTS,
    DataDir,
    Jobs,
    Quiet,
    Texts,
    with_fields,
)
from coterie.cli.written_values import parse_lists
from coterie.config import check_names
from coterie.memory import without_collecting

BUDGET = "The budget"
_CLIENTS = 30  # that are shown in the terminal; the page has all
# What a choice decides itself, or has its own option for.
_LEFT_OUT = ("rounds", "validation", "hold_out", "adapt_rounds", "attack", "eval_every", "eval_train", "matrix")
_LEFT_OUT_TOO = ("matrix_every", "s_acc", "checkpoint_every")
_FIELDS = tuple(name for name in EXPERIMENT_FIELDS if name not in (*_LEFT_OUT, *_LEFT_OUT_TOO))


@with_fields(*_FIELDS, validation=0.25)
def choose(
    fields: dict[str, Any],
    methods: Annotated[
        Texts,
        typer.Argument(
            metavar="[METHOD]...",
            help="Methods that compete, by name or as .py files; by default training alone, one model for all, that "
            "model fine-tuned, and five more. Training alone always takes part.",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(
            min=1,
            help="Rounds that the last candidates play (50 if nothing is said); with --minutes, the most that they "
            "may. With rounds alone the same command gives the same result.",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    minutes: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option(
            metavar="MINUTES",
            help="How long it may take; how many rounds fit is found out on the way. Two rounds of all candidates are "
            "played in any case.",
            rich_help_panel=BUDGET,
        ),
    ] = None,
    eta: Annotated[
        int, typer.Option(min=2, help="One in so many candidates stays after each stage.", rich_help_panel=BUDGET)
    ] = 4,
    tune: Annotated[
        Texts,
        typer.Option(
            metavar="KEY=A,B,...",
            help="Values of a parameter to try for all methods; may be repeated. By default lr=0.01,0.03,0.1,0.3; "
            "with a participation below 1 also both ways back (returning) of methods that have them.",
            rich_help_panel=METHOD,
        ),
    ] = None,
    data_dir: DataDir = None,
    out: Annotated[
        Path, typer.Option(help="The folder for everything; the same command goes on in it.", rich_help_panel=RESULTS)
    ] = Path("choice"),
    jobs: Jobs = 1,
    quiet: Quiet = False,
) -> None:
    """Say whether federating helps the clients of your data, whom it helps and harms, and which method to take.

    Training alone and several methods with several learning rates play as one computation: all for a few rounds, then
    ever fewer for ever more. Validation samples decide who stays. Test samples are looked at once, at the end, and say
    what each client gains. The answer may be to train alone.

    It leaves a page (choice.html) and a file (choice.yaml) for `coterie run` and `coterie federate run`. After Ctrl-C
    or a kill the same command goes on.

    Example: coterie choose --data table:stays.csv,label=readmitted,client=hospital --model mlp:hidden=32 --minutes 10
    """
    check_names(fields)
    for method in methods or ():
        check_names({"algorithm": method})
    values = {**fields, "methods": methods, "tune": parse_lists(tune) if tune else None}
    with without_collecting():
        from coterie.studies import choice

    found = choice.play(
        choice.make_candidates(values, eta),
        choice.make_budget(rounds, minutes),
        out,
        data_dir=data_dir,
        jobs=jobs,
        progress=not quiet,
    )
    headline, *sentences = found.sentences()
    if quiet:
        standard_output.print(headline, markup=False, highlight=False, soft_wrap=True)
    else:
        standard_output.print(f"\n[bold]{headline}[/bold]", highlight=False, soft_wrap=True)
        for line in sentences:
            standard_output.print(f"  {line}", markup=False, highlight=False, soft_wrap=True)
        for table in found.tables(_CLIENTS):
            standard_output.print(table)
    err.print(f"page: {found.page}", markup=False, highlight=False)
    err.print(f"run it: coterie run {found.file}", markup=False, highlight=False)
