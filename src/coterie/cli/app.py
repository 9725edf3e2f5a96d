"""Commands that run, resume and show."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from coterie import __version__, api
from coterie.cli import compare, export, federate, listing, report
from coterie.cli import data as data_commands
from coterie.cli import partition as partition_commands
from coterie.cli import recipe as recipe_commands
from coterie.cli.console import err
from coterie.cli.console import out as standard_output
from coterie.cli.options import (
    COMPUTING,
    FEDERATION,
    RESULTS,
    TRAINING,
    Clients,
    Data,
    DataDir,
    Folder,
    MaxTest,
    Number,
    Numbers,
    Partition,
    Scarcity,
    Seed,
    Switch,
    TestFraction,
    Text,
    Texts,
    Track,
    Validation,
    Whole,
    field,
)
from coterie.config import SHORTHANDS, ExperimentConfig, from_mapping, from_yaml
from coterie.errors import ConfigError, Interrupted
from coterie.results import Result, matrix_table, table
from coterie.results.labels import run_title
from coterie.results.partial_summary import partial_summary
from coterie.rows import distributed

app = typer.Typer(
    name="coterie",
    help="Personalised federated learning: right, fast, real.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(listing.app, name="list")
app.add_typer(data_commands.app, name="data")
app.add_typer(federate.app, name="federate")
app.add_typer(partition_commands.app, name="partition")
app.add_typer(recipe_commands.app, name="recipe")


def _version(value: bool) -> None:
    if value:
        standard_output.print(__version__)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and stop.")
    ] = False,
) -> None:
    pass


def parse_settings(pairs: list[str]) -> dict[str, Any]:
    """Read ``key=value`` pairs, values as YAML.

    Parameters
    ----------
    pairs
        What ``--set`` was given.

    Returns
    -------
    dict of str to object
        The settings.

    Raises
    ------
    ConfigError
        If a pair has no ``=``, a key is given twice, or a value is not YAML.
    """
    settings: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or not key:
            raise ConfigError(f"--set is {pair!r}, but must be key=value, for instance --set p=0.5")
        if key in settings:
            raise ConfigError(f"--set gives {key!r} twice")
        try:
            settings[key] = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise ConfigError(f"--set {key}: {text!r} is not a valid value") from error
    return settings


def _shorthand(help: str) -> Any:
    return typer.Option(help=f"{help}; the method's own by default.", rich_help_panel=TRAINING)


Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar and no table.", rich_help_panel=RESULTS)]


@app.command()
def run(
    what: Annotated[
        str,
        typer.Argument(
            metavar="ALGORITHM",
            help="A method's name (see `coterie list algorithms`), a .py file that defines one, or a .yaml file with a "
            "whole experiment.",
        ),
    ],
    data: Data = None,
    partition: Partition = None,
    clients: Clients = None,
    participation: Annotated[Number, field("participation", FEDERATION)] = None,
    validation: Validation = None,
    test_fraction: TestFraction = None,
    max_test: MaxTest = None,
    scarcity: Scarcity = None,
    hold_out: Annotated[Number, field("hold_out", FEDERATION)] = None,
    adapt_rounds: Annotated[Whole, field("adapt_rounds", FEDERATION)] = None,
    attack: Annotated[Text, field("attack", FEDERATION)] = None,
    privacy: Annotated[Text, field("privacy", FEDERATION)] = None,
    data_dir: DataDir = None,
    rounds: Annotated[Whole, field("rounds", TRAINING)] = None,
    local_epochs: Annotated[Whole, _shorthand("Local epochs in a round")] = None,
    batch_size: Annotated[Whole, _shorthand("Samples in a minibatch, 0 for all of them")] = None,
    lr: Annotated[Number, _shorthand("Learning rate")] = None,
    set_: Annotated[
        Texts,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="A parameter of the method; may be repeated.",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    model: Annotated[Text, field("model", TRAINING)] = None,
    loss: Annotated[Text, field("loss", TRAINING)] = None,
    seed: Seed = None,
    engine: Annotated[Text, field("engine", COMPUTING, metavar="NAME")] = None,
    device: Annotated[Text, field("device", COMPUTING, metavar="NAME")] = None,
    dtype: Annotated[Text, field("dtype", COMPUTING, metavar="NAME")] = None,
    kernel: Annotated[Text, field("kernel", COMPUTING, metavar="NAME")] = None,
    convolution: Annotated[Text, field("convolution", COMPUTING, metavar="NAME")] = None,
    chunk: Annotated[Whole, field("chunk", COMPUTING)] = None,
    keep: Annotated[Text, field("keep", COMPUTING, metavar="NAME")] = None,
    scratch: Annotated[Text, field("scratch", COMPUTING, metavar="FOLDER")] = None,
    threads: Annotated[Whole, field("threads", COMPUTING)] = None,
    compile: Annotated[Switch, field("compile", COMPUTING, "--compile/--no-compile")] = None,
    precision: Annotated[Text, field("precision", COMPUTING, metavar="NAME")] = None,
    metrics: Annotated[Texts, field("metrics", RESULTS, "--metric", metavar="NAME")] = None,
    eval_every: Annotated[Whole, field("eval_every", RESULTS)] = None,
    eval_train: Annotated[Switch, field("eval_train", RESULTS, "--eval-train/--no-eval-train")] = None,
    matrix: Annotated[Switch, field("matrix", RESULTS, "--matrix/--no-matrix")] = None,
    matrix_every: Annotated[Whole, field("matrix_every", RESULTS)] = None,
    s_acc: Annotated[Numbers, field("s_acc", RESULTS, "--s-acc", metavar="FRACTION")] = None,
    checkpoint_every: Annotated[Whole, field("checkpoint_every", RESULTS)] = None,
    out: Annotated[
        Folder, typer.Option(help="Folder for the run; a new one under runs/ by default.", rich_help_panel=RESULTS)
    ] = None,
    track: Track = None,
    quiet: Quiet = False,
) -> None:
    """Run one experiment, from a method's name or a YAML file; options stand over the file.

    The table of results goes to standard output, progress to standard error. Ctrl-C leaves a run that can be resumed.

    Example: coterie run fedacs --data digits --partition dirichlet:0.5 --clients 20 --rounds 50 --set p=0.5
    """
    own = {*ExperimentConfig.model_fields, *SHORTHANDS}
    values = {name: value for name, value in locals().items() if name in own and value not in (None, [])}
    values["settings"] = parse_settings(set_ or [])
    with _stoppable():
        if what.endswith((".yaml", ".yml")):
            config = from_yaml(Path(what), values)
        else:
            config = from_mapping({"algorithm": what, **values})
        _show(api.run_config(config, out=out, data_dir=data_dir, progress=not quiet, track=track or ()), quiet)


app.command(name="compare")(compare.command(run, parse_settings))
app.command()(export.export)
app.command()(report.report)


@app.command()
def resume(
    path: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run that was stopped.")],
    data_dir: DataDir = None,
    track: Track = None,
    quiet: Quiet = False,
) -> None:
    """Go on with a run that was stopped or killed; it ends exactly as if it had never been."""
    with _stoppable():
        _show(api.resume(path, data_dir=data_dir, progress=not quiet, track=track or ()), quiet)


@app.command()
def show(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs.")],
) -> None:
    """Show runs beside each other in one table; of one that is not finished, what it has so far."""
    summaries, titles = [], []
    for path in runs:
        result = api.load(path)
        titles.append(run_title(result))
        summaries.append(result.summary if result.finished else partial_summary(result))
        if not result.finished:
            done = summaries[-1]["rounds"]
            err.print(f"{path} is not finished: round {done} of {result.config['rounds']}", highlight=False)
    _print(summaries, titles)


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    """Answer Ctrl-C before the first round ourselves: what typer does with it depends on its version."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(None) from None


def _show(result: Result, quiet: bool) -> None:
    if not distributed.first():  # another process of the same run shows it
        return
    if not quiet:
        _print([result.summary], [run_title(result)])
        report.suggest(result.path)
    err.print(f"run: {result.path}", markup=False, highlight=False)


def _print(summaries: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> None:
    standard_output.print(table(summaries, methods=methods))
    crossed = matrix_table(summaries, methods)
    if crossed is not None:
        standard_output.print(crossed)
