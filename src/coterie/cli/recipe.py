"""Commands about recipes: every table and figure of the papers."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

import typer

from coterie.cli.console import err, out
from coterie.cli.shared_options import (
    EXPERIMENT,
    RESULTS,
    Apart,
    AutoJobs,
    DataDir,
    Folder,
    Quiet,
    Seeds,
    Texts,
    with_fields,
)
from coterie.cli.written_values import separate_seeds
from coterie.errors import ConfigError, nearest

Paper = Literal["fedacs", "fedamp", "fedpg", "flame"]

_RESULTS = (Path("results/recipes"), Path("runs"))

app = typer.Typer(
    help="Tables and figures of the papers: run them, and see our numbers beside theirs.", no_args_is_help=True
)


@app.command(name="list")
def list_recipes() -> None:
    """Show all recipes, a line each."""
    from coterie.studies import recipes
    from coterie.tables import Row, Table, words

    rows = (Row((entry.name, entry.source, entry.title)) for entry in recipes.entries())
    out.print(Table(words("name", "of", "what it shows"), tuple(rows)))


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A recipe's name, or a .yaml file with one.")],
    quick: Annotated[bool, typer.Option("--quick", help="Show the plans of the quick version.")] = False,
) -> None:
    """Show a recipe: the setting, the plans, the paper's numbers, the criteria, and how much work it is."""
    from coterie.studies import recipes

    recipe = recipes.load(name)
    from coterie.cli.recipe_view import print_recipe

    print_recipe(recipe, quick)


@app.command()
def verdicts(
    claims: Annotated[
        Optional[list[str]],  # noqa: UP045 (typer reads it at run time)
        typer.Argument(metavar="[CLAIM]...", help="Claims to show with all their cases and numbers; by default all."),
    ] = None,
    paper: Annotated[
        Optional[Paper],  # noqa: UP045 (typer reads it at run time)
        typer.Option(help="Show the claims of one paper only."),
    ] = None,
    results: Annotated[
        Optional[list[Path]],  # noqa: UP045 (typer reads it at run time)
        typer.Option(
            metavar="DIR",
            help="Folder of recipes' results: .json files, or folders with a recipe.json; may be repeated. By default "
            "results/recipes and runs, whichever are there.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, each case with its numbers.")] = False,
) -> None:
    """Show every claim of the papers, and whether it holds by what was run.

    A claim is undecided where a run had fewer rounds or seeds than the paper's, lacked a data set or the tuning of a
    rival, or where the interval over seeds includes the threshold. Of a part that was played more than once, the
    longest with the most seeds counts.

    Example: coterie recipe verdicts --paper flame

    Example: coterie recipe verdicts flame-hybrid-best
    """
    folders = results or [folder for folder in _RESULTS if folder.is_dir()]
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"there are no results in {str(folder)!r}: give their folder with --results")
    if not folders:
        raise ConfigError(
            f"there are no results yet, neither in {_RESULTS[0]} nor in {_RESULTS[1]}: play a recipe (coterie recipe "
            "list shows them), or give their folder with --results"
        )
    from coterie.studies.recipes import ledger

    found = ledger.open_ledger(*folders, paper=paper)
    if claims:
        known = [judgement.claim.id for _, judgements in found for judgement in judgements]
        for claim in claims:
            if claim not in known:
                of = "" if paper is None else f" of {paper}"
                listed = "coterie recipe verdicts lists them"
                raise ConfigError(f"there is no claim {claim!r}{of}: {nearest(claim, known)}{listed}")
    if as_json:
        chosen = [each for each in ledger.plain(found) if not claims or each["id"] in claims]
        typer.echo(json.dumps(chosen, indent=2, ensure_ascii=False))
        return
    from coterie.cli.verdicts_view import print_claims, print_ledger

    if claims:
        print_claims(found, list(dict.fromkeys(claims)))
    else:
        print_ledger(found)


@app.command()
@with_fields("device", "precision")
def run(
    name: Annotated[list[str], typer.Argument(metavar="NAME", help="A recipe's name, or a .yaml file with one.")],
    fields: dict[str, Any],
    quick: Annotated[bool, typer.Option("--quick", help="A small version on embedded data: minutes on a CPU.")] = False,
    part: Annotated[
        Texts,
        typer.Option("--part", metavar="PART", help="Run only this part; may be repeated.", rich_help_panel=RESULTS),
    ] = None,
    seeds: Seeds = None,
    rounds: Annotated[
        Optional[int],  # noqa: UP045 (typer reads it at run time)
        typer.Option(
            help="How many rounds are played; the recipe's own number by default.", rich_help_panel=EXPERIMENT
        ),
    ] = None,
    jobs: AutoJobs = None,
    apart: Apart = False,
    data_dir: DataDir = None,
    out_dir: Annotated[
        Folder,
        typer.Option(
            "--out",
            help="The recipe's folder; runs/NAME by default. The same command goes on in it.",
            rich_help_panel=RESULTS,
        ),
    ] = None,
    runs: Annotated[
        Folder,
        typer.Option(
            help="Folder of the runs, if not --out: a figure can be read off the runs of a table.",
            rich_help_panel=RESULTS,
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Run a recipe, and print our numbers beside the paper's and which criteria hold.

    Runs that are finished are not repeated: after Ctrl-C or a kill, the same command goes on. A part whose data set is
    not there is skipped. What is printed is written to --out too, as recipe.md and recipe.json. Criteria that fail
    do not change the exit code.

    Example: coterie recipe run fedamp-table3 --quick
    """
    words, numbers = separate_seeds(name, seeds or [])
    if len(words) != 1:
        raise ConfigError(f"a recipe is run alone, not {' '.join(words) or 'none'}: give one name")
    from coterie.studies import recipes

    recipe = recipes.load(words[0])
    from coterie.runs.storage.atomic_files import write_json, write_text

    over = fields | ({"seeds": numbers} if numbers else {}) | ({} if rounds is None else {"rounds": rounds})
    folder = out_dir or Path("runs") / (f"{recipe.name}-quick" if quick else recipe.name)
    outcome = recipes.run_recipe(
        recipe,
        runs or folder,
        quick=quick,
        parts=part or (),
        over=over,
        data_dir=data_dir,
        jobs=jobs,
        together=not apart,
        progress=not quiet,
        tell=lambda sentence: err.print(sentence, markup=False, highlight=False),
    )
    # What an earlier command wrote stands where this one could play nothing.
    if not (all(found.failed for found in outcome.parts) and (folder / "recipe.json").exists()):
        write_json(folder / "recipe.json", recipes.plain(outcome))
        write_text(folder / "recipe.md", recipes.markdown(outcome))
    if not quiet:
        out.print(recipes.terminal(outcome))
    err.print(f"recipe: {folder}", markup=False, highlight=False)
    if outcome.failures:
        raise ConfigError(textwrap.shorten("; ".join(outcome.failures), 2000))
