"""The command that compares methods."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from coterie.cli.console import err, out
from coterie.cli.options import COMPUTING, RESULTS, TRAINING, Texts
from coterie.cli.report import suggest
from coterie.config import SHORTHANDS, ExperimentConfig
from coterie.errors import ConfigError, Interrupted
from coterie.studies import comparison
from coterie.yaml_file import read_yaml

Methods = Annotated[
    list[str],
    typer.Argument(
        metavar="METHOD...",
        help="Methods by name, .py files that define one, or a single .yaml file with a whole comparison.",
    ),
]
Seeds = Annotated[
    Texts,
    typer.Option(
        metavar="SEED...", help="Seeds, each run once by every method: --seeds 1 10 100.", rich_help_panel=TRAINING
    ),
]
Tune = Annotated[
    Texts,
    typer.Option(
        metavar="KEY=A,B,...",
        help="Choose a parameter from these values for each method, on validation data; may be repeated.",
        rich_help_panel=TRAINING,
    ),
]
At = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="Compare after the last round (final), or at each run's best on validation data (best) or on test data "
        "(best_oracle).",
        rich_help_panel=RESULTS,
    ),
]
Jobs = Annotated[
    int,
    typer.Option(min=1, help="Runs at a time, each in a process of its own.", rich_help_panel=COMPUTING),
]
Out = Annotated[
    Path, typer.Option(help="The comparison's folder; the same command goes on in it.", rich_help_panel=RESULTS)
]

_HELP = "\n\n".join(
    (
        "Compare several methods over several seeds in one table; options stand over the file.",
        "Runs that are finished are not repeated: after Ctrl-C or a kill, the same command goes on. Numbers are means "
        "over clients, then mean ± std over seeds; the best is bold, and stars mark methods that differ from it. The "
        "tables are written to --out too, as table.md, table.tex and table.csv.",
        "Example: coterie compare fedacs fedamp fedavg local --seeds 1 10 100 --rounds 50 --out digits",
    )
)


def command(run: Callable[..., None], parse_settings: Callable[[list[str]], dict[str, Any]]) -> Callable[..., None]:
    """Make the command, with all options of ``coterie run`` that say what an experiment is.

    Parameters
    ----------
    run
        The function behind ``coterie run``.
    parse_settings
        Reads what ``--set`` is given.

    Returns
    -------
    callable
        The function behind ``coterie compare``.
    """
    hints = typing.get_type_hints(run, include_extras=True)
    theirs = [each for each in inspect.signature(run).parameters.values() if each.name not in ("what", "seed", "out")]
    parameters = [
        _parameter("methods", Methods),
        *(_parameter(each.name, hints[each.name], each.default) for each in theirs),
        _parameter("seeds", Seeds, None),
        _parameter("tune", Tune, None),
        _parameter("jobs", Jobs, 1),
        _parameter("at", At, "final"),
        _parameter("out", Out),
    ]

    def compare(**given: Any) -> None:
        fields = {*ExperimentConfig.model_fields, *SHORTHANDS}
        values = {name: value for name, value in given.items() if name in fields and value not in (None, [])}
        values["settings"] = parse_settings(given["set_"] or [])
        words, seeds = told_apart(given["methods"], given["seeds"] or [])
        values |= {"seeds": seeds} if seeds else {}
        values |= {"tune": parse_lists(given["tune"])} if given["tune"] else {}
        try:
            plan = comparison.make_plan(_with_file(words, values))
            quiet = given["quiet"]
            found = comparison.compare(
                plan,
                given["out"],
                data_dir=given["data_dir"],
                at=given["at"],
                jobs=given["jobs"],
                progress=not quiet,
                track=given["track"] or (),
            )
        except KeyboardInterrupt:
            raise Interrupted(None) from None
        if not quiet:
            out.print(comparison.table(found))
            suggest(given["out"])
        err.print(f"comparison: {given['out']}", markup=False, highlight=False)

    compare.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    compare.__annotations__ = {each.name: each.annotation for each in parameters}
    compare.__doc__ = _HELP
    return compare


def _parameter(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def told_apart(words: Sequence[str], seeds: Sequence[str]) -> tuple[list[str], list[int]]:
    """Give the words and the seeds: of ``--seeds 1 10 100``, the parser takes all but the first for words.

    Parameters
    ----------
    words
        What the parser took for words.
    seeds
        What it took for seeds.

    Returns
    -------
    words
        Those that are no numbers.
    seeds
        All seeds.

    Raises
    ------
    ConfigError
        If there is a number without ``--seeds``, or a seed that is none.
    """
    numbers = [word for word in words if word.isdecimal()]
    if numbers and not seeds:
        raise ConfigError(f"{numbers[0]!r} is no method: give seeds as --seeds {' '.join(numbers)}")
    given = [part.strip() for text in seeds for part in text.split(",")] + numbers
    for each in given:
        if not each.isdecimal():
            raise ConfigError(f"--seeds has {each!r}, but each must be a whole number of at least 0")
    return [word for word in words if not word.isdecimal()], [int(each) for each in given]


def parse_lists(pairs: Sequence[str]) -> dict[str, list[Any]]:
    """Read ``key=a,b,c`` pairs, values as YAML.

    Parameters
    ----------
    pairs
        What ``--tune`` was given.

    Returns
    -------
    dict of str to list
        The values by name.

    Raises
    ------
    ConfigError
        If a pair has no ``=``, a key is given twice, or a value is not YAML.
    """
    found: dict[str, list[Any]] = {}
    for pair in pairs:
        key, equals, text = (part.strip() for part in pair.partition("="))
        if not equals or not key or not text:
            raise ConfigError(f"--tune is {pair!r}, but must be key=value,value, for instance --tune lr=0.01,0.1")
        if key in found:
            raise ConfigError(f"--tune gives {key!r} twice")
        try:
            found[key] = [yaml.safe_load(value) for value in text.split(",")]
        except yaml.YAMLError as error:
            raise ConfigError(f"--tune {key}: {text!r} is not a list of valid values") from error
    return found


def _with_file(words: Sequence[str], values: dict[str, Any]) -> dict[str, Any]:
    files = [word for word in words if word.endswith((".yaml", ".yml"))]
    if not files:
        return {**values, "methods": list(words)}
    if len(words) > 1:
        raise ConfigError(f"{files[0]!r} is a whole comparison: give it alone, without {len(words) - 1} other methods")
    ours = read_yaml(Path(files[0]))
    settings = ours.get("settings") or {}
    if not isinstance(settings, dict):
        raise ConfigError(f"settings is {settings!r}, but must map the methods' parameters to values")
    return {**ours, **values, "settings": {**settings, **values["settings"]}}
