"""The commands together.

Modules of commands import what they need when a command runs, so that ``--help`` and mistakes are answered at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from coterie.cli import choose, compare, data, export, federate, leaderboard, listing, partition, recipe, report, runs
from coterie.errors import Interrupted
from coterie.version import __version__

if TYPE_CHECKING:
    import click


class _Commands(TyperGroup):
    """Answers Ctrl-C before the first round: what typer does with it depends on its version."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise Interrupted(None) from None


app = typer.Typer(
    name="coterie",
    cls=_Commands,
    help="Personalised federated learning: right, fast, real.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(runs.run)
app.command()(compare.compare)
app.command()(choose.choose)
app.command()(export.export)
app.command()(export.personalize)
app.command()(export.predict)
app.command()(report.report)
app.command()(runs.resume)
app.command()(runs.show)
app.add_typer(listing.app, name="list")
app.add_typer(data.app, name="data")
app.add_typer(federate.app, name="federate")
app.add_typer(leaderboard.app, name="leaderboard")
app.add_typer(partition.app, name="partition")
app.add_typer(recipe.app, name="recipe")


def _version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    pass
