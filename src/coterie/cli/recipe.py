"""Commands about recipes: every table and figure of the papers."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from rich import box
from rich.padding import Padding
from rich.table import Table
from rich.text import Text as RichText

from coterie.cli.compare import Jobs, Seeds, told_apart
from coterie.cli.console import err, out
from coterie.cli.options import COMPUTING, RESULTS, TRAINING, DataDir, Folder, Text, Texts, Whole, field
from coterie.errors import ConfigError, Interrupted
from coterie.runs.storage.atomic_files import write_json, write_text
from coterie.studies import recipes
from coterie.studies.recipes.cells import CellName
from coterie.studies.recipes.outcomes import paper_numbers
from coterie.studies.recipes.plans import planned, settings_of, work
from coterie.studies.recipes.runner import chosen_parts
from coterie.studies.recipes.schema import KINDS, Criterion, Recipe, RecipePart
from coterie.studies.recipes.tables import decimals, not_target, written
from coterie.tables import ABSENT

app = typer.Typer(
    help="Tables and figures of the papers: run them, and see our numbers beside theirs.", no_args_is_help=True
)

_ORDER = ("methods", "grid", "tune", "data", "partition", "clients", "rounds", "seeds")


@app.command(name="list")
def list_recipes() -> None:
    """Show all recipes, a line each."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for title in ("name", "of", "what it shows"):
        table.add_column(title, no_wrap=title != "what it shows")
    for entry in recipes.entries():
        table.add_row(RichText(entry.name, style="cyan"), entry.source, RichText(entry.title))
    out.print(table)


@app.command()
def show(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A recipe's name, or a .yaml file with one.")],
    quick: Annotated[bool, typer.Option("--quick", help="Show the plans of the quick version.")] = False,
) -> None:
    """Show a recipe: the setting, the plans, the paper's numbers, the criteria, and how much work it is."""
    recipe = recipes.load(name)
    out.print(RichText(f"{recipes.heading(recipe)}: {recipe.title}", style="bold"), "", sep="\n")
    for paragraph in recipe.about.strip().splitlines():
        out.print(RichText(paragraph), "", sep="\n")
    total = recipes.Work()
    parts = chosen_parts(recipe, quick=quick)
    for part in parts:
        total += work(planned(part, quick=quick))
        out.print(RichText(part.heading, style="bold"), RichText(f"({part.name})", style="dim"))
        _show_plan(part, parts[0], quick)
        if part.note:
            _indented(part.note)
        _show_numbers(part, recipe.unit)
        out.print()
    if recipe.criteria:
        out.print(RichText("Criteria", style="bold"))
    for criterion in recipe.criteria:
        _show_criterion(recipe, criterion)
    out.print(f"\n{'The quick version' if quick else 'All of it'}: {total.sentence()}", highlight=False)


def _indented(text: str, style: str = "") -> None:
    out.print(Padding(RichText(text, style=style), (0, 0, 0, 2)))


def _show_plan(part: RecipePart, first: RecipePart, quick: bool) -> None:
    """Show a plan; of one that comes after another, what differs."""
    values, before = _plan(part, quick), _plan(first, quick)
    if part is not first:
        changed = {name: value for name, value in values.items() if before.get(name) != value}
        gone = [name for name in before if name not in values]
        _indented(f"as {first.heading}, without {', '.join(gone)}" if gone else f"as {first.heading}", "dim")
        values = changed
    for name, value in values.items():
        flow = None if isinstance(value, list | dict) else False  # lists on one line where they hold plain values
        _indented(yaml.safe_dump({name: value}, sort_keys=False, allow_unicode=True, default_flow_style=flow).rstrip())


def _plan(part: RecipePart, quick: bool) -> dict[str, Any]:
    values = {**part.plan, **(part.quick or {} if quick else {}), "at": part.at}
    rest = [name for name in values if name not in _ORDER]
    return {name: _brief(values[name]) for name in (*_ORDER, *rest) if values.get(name) is not None}


def _brief(value: Any) -> Any:
    """Name methods that have nothing but a name by it."""
    if not isinstance(value, list):
        return value
    return [each["algorithm"] if isinstance(each, dict) and set(each) == {"algorithm"} else each for each in value]


def _show_numbers(part: RecipePart, unit: str) -> None:
    numbers = paper_numbers(part)
    if not numbers:
        _indented("the paper prints no numbers", "dim")
        return
    readings = [name for name in part.readings if any(cell.reading == name for cell in numbers)]
    settings = [label for label in settings_of(part, planned(part)) if any(c.setting == label for c in numbers)]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for title in (*(["setting"] if settings != [""] else []), "paper"):
        table.add_column(title)
    for title in readings:
        table.add_column(title, justify="right")
    for label in settings:
        for method in dict.fromkeys(cell.method for cell in numbers if cell.setting == label):
            found = {cell.reading: cell for cell in numbers if (cell.setting, cell.method) == (label, method)}
            cells = [_their_number(part, found.get(name), unit) for name in readings]
            table.add_row(*([label] if settings != [""] else []), method, *cells)
    out.print(Padding(table, (0, 0, 0, 2)))
    for entry in part.not_targets:
        _indented(f"† not a target: {entry.why}", "dim")


def _their_number(part: RecipePart, cell: CellName | None, unit: str) -> str:
    if cell is None:
        return ABSENT
    text = written(paper_numbers(part)[cell], decimals(part.readings[cell.reading], unit))
    return text + ("†" if not_target(part, cell) else "")


def _show_criterion(recipe: Recipe, criterion: Criterion) -> None:
    where = ", ".join([*(recipe.part(name).heading for name in criterion.parts), *criterion.settings]) or "everywhere"
    kind = next(kind for kind in KINDS if getattr(criterion, kind) is not None)
    words = criterion.test.model_dump(mode="json", exclude_none=True)
    said = "; ".join(
        f"{key}: {', '.join(value) if isinstance(value, list) else value}" for key, value in words.items() if value
    )
    also = ", also when quick" if criterion.quick else ""
    out.print(RichText(f"- {criterion.says}"))
    _indented(f"{where}{also}: {kind.replace('_', ' ')} ({said})", "dim")
    if criterion.note:
        _indented(criterion.note, "dim")


@app.command()
def run(
    name: Annotated[list[str], typer.Argument(metavar="NAME", help="A recipe's name, or a .yaml file with one.")],
    quick: Annotated[bool, typer.Option("--quick", help="A small version on embedded data: minutes on a CPU.")] = False,
    part: Annotated[
        Texts,
        typer.Option("--part", metavar="PART", help="Run only this part; may be repeated.", rich_help_panel=RESULTS),
    ] = None,
    seeds: Seeds = None,
    rounds: Annotated[
        Whole,
        typer.Option(help="How many rounds are played; the recipe's own number by default.", rich_help_panel=TRAINING),
    ] = None,
    device: Annotated[Text, field("device", COMPUTING, metavar="NAME")] = None,
    precision: Annotated[Text, field("precision", COMPUTING, metavar="NAME")] = None,
    jobs: Jobs = 1,
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
            help="Where the runs lie, if not in --out: a figure can be read off the runs of a table.",
            rich_help_panel=RESULTS,
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress bar and no table.", rich_help_panel=RESULTS)
    ] = False,
) -> None:
    """Run a recipe, and print our numbers beside the paper's and which criteria hold.

    Runs that are finished are not repeated: after Ctrl-C or a kill, the same command goes on. A part whose data set is
    not there is passed over. What is printed is written to --out too, as recipe.md and recipe.json. Criteria that fail
    do not change the exit code.

    Example: coterie recipe run fedamp-table3 --quick
    """
    words, numbers = told_apart(name, seeds or [])
    if len(words) != 1:
        raise ConfigError(f"a recipe is run alone, not {' '.join(words) or 'none'}: give one name")
    recipe = recipes.load(words[0])
    over: dict[str, Any] = {"seeds": numbers or None, "rounds": rounds, "device": device, "precision": precision}
    folder = out_dir or Path("runs") / (f"{recipe.name}-quick" if quick else recipe.name)
    try:
        outcome = recipes.run_recipe(
            recipe,
            runs or folder,
            quick=quick,
            parts=part or (),
            over={key: value for key, value in over.items() if value is not None},
            data_dir=data_dir,
            jobs=jobs,
            progress=not quiet,
            tell=lambda sentence: err.print(sentence, markup=False, highlight=False),
        )
    except KeyboardInterrupt:
        raise Interrupted(None) from None
    write_json(folder / "recipe.json", recipes.plain(outcome))
    write_text(folder / "recipe.md", recipes.markdown(outcome))
    if not quiet:
        out.print(recipes.terminal(outcome))
    err.print(f"recipe: {folder}", markup=False, highlight=False)
    if outcome.failures:
        raise ConfigError(textwrap.shorten("; ".join(outcome.failures), 2000))
