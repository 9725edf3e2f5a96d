"""Commands about the fair leaderboard: play it, with methods of your own, and see who wins where and harms whom."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Optional

import typer

from coterie.cli.console import err, out
from coterie.cli.shared_options import (
    EXPERIMENT,
    METHOD,
    RESULTS,
    AutoJobs,
    DataDir,
    Quiet,
    Seeds,
    Texts,
    with_fields,
)
from coterie.cli.written_values import parse_lists, separate_seeds
from coterie.config import check_names
from coterie.errors import ConfigError

app = typer.Typer(help="The fair leaderboard: all methods by one protocol, yours among them.", no_args_is_help=True)

ProtocolFile = Annotated[
    Optional[Path],  # noqa: UP045 (typer reads it at run time)
    typer.Option("--protocol", metavar="FILE", help="Another protocol, as a .yaml file.", rich_help_panel=EXPERIMENT),
]


@app.command()
@with_fields("device", "precision", "settings")
def run(
    fields: dict[str, Any],
    methods: Annotated[
        Optional[list[str]],  # noqa: UP045 (typer reads it at run time)
        typer.Argument(
            metavar="METHOD...", help="Methods by name, or .py files that define one; all if none is named."
        ),
    ] = None,
    setting: Annotated[
        Texts,
        typer.Option(
            "--setting",
            metavar="NAME",
            help="Play only this setting, for instance fmnist-dir0.1-all; may be repeated.",
            rich_help_panel=EXPERIMENT,
        ),
    ] = None,
    tune: Annotated[
        Texts,
        typer.Option(
            metavar="KEY=A,B,...",
            help="For a method that the protocol does not name: what is tried; may be repeated. By default nine rates.",
            rich_help_panel=METHOD,
        ),
    ] = None,
    seeds: Seeds = None,
    rounds: Annotated[
        Optional[int],  # noqa: UP045 (typer reads it at run time)
        typer.Option(
            min=1, help="For a trial: how many rounds; the protocol's by default.", rich_help_panel=EXPERIMENT
        ),
    ] = None,
    protocol: ProtocolFile = None,
    jobs: AutoJobs = None,
    data_dir: DataDir = None,
    folder: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder of the entries.", rich_help_panel=RESULTS)
    ] = Path("runs/leaderboard"),
    keep_runs: Annotated[
        bool,
        typer.Option(
            "--keep-runs", help="Keep the folders of all runs; by default entries alone.", rich_help_panel=RESULTS
        ),
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Play methods by the leaderboard's protocol; each is tuned by as many candidates, over the same seeds.

    What is finished is not repeated: after Ctrl-C or a kill, the same command goes on. Several may run side by side in
    one folder, each with methods or settings of its own. `coterie leaderboard show` compares what there is.

    Example: coterie leaderboard run mine.py --setting fmnist-dir0.1-all --data-dir data
    """
    words, numbers = separate_seeds(methods or [], seeds or [])
    for word in words:
        check_names({"algorithm": word})
    from coterie.studies.leaderboard.protocol import OURS, load

    rules = load(protocol or OURS)
    for name in setting or ():
        rules.setting(name)
    lists, own = parse_lists(tune or []), fields.pop("settings")
    for word in words:
        if word not in rules.methods:
            rules = rules.with_method(word, lists, own)
        elif lists or own:
            raise ConfigError(f"the protocol says what is tried of {word!r}: --tune and --set are for other methods")
    from coterie.studies.leaderboard.playing import play

    over = fields | ({"seeds": numbers} if numbers else {})
    over |= {} if rounds is None else {"rounds": rounds, "eval_every": rounds}
    play(
        rules,
        setting or list(rules.settings),
        words or list(rules.methods),
        folder,
        over=over,
        data_dir=data_dir,
        jobs=jobs,
        keep_runs=keep_runs,
        progress=not quiet,
        tell=lambda sentence: err.print(sentence, markup=False, highlight=False),
    )
    err.print(f"entries: {folder}", markup=False, highlight=False)


@app.command()
def settings(protocol: ProtocolFile = None) -> None:
    """Show the settings of the protocol, and how much work a method is in each."""
    from coterie.studies.leaderboard.protocol import OURS, load
    from coterie.tables import Row, Table, numbers, words

    rules = load(protocol or OURS)
    rows = (
        Row((each.name, each.data, each.presence, each.partition, str(rules.runs(each))))
        for each in rules.settings.values()
    )
    out.print(Table((*words("name", "data", "clients", "partition"), *numbers("runs")), tuple(rows)))
    out.print(f"Runs are those of one method, of {rules.same['rounds']} rounds each.", highlight=False)


@app.command()
def show(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="PATH...", help="Records (.json) and folders of entries; the later stand over the earlier."
        ),
    ],
    protocol: ProtocolFile = None,
    method: Annotated[
        Optional[str],  # noqa: UP045 (typer reads it at run time)
        typer.Option(metavar="NAME", help="Show one method only: setting by setting, beside the best of the others."),
    ] = None,
    record: Annotated[
        Optional[Path],  # noqa: UP045 (typer reads it at run time)
        typer.Option(metavar="FILE", help="Write all of it as one record (.json).", rich_help_panel=RESULTS),
    ] = None,
    markdown: Annotated[
        Optional[Path],  # noqa: UP045 (typer reads it at run time)
        typer.Option(metavar="FILE", help="Write it as a page, with every table.", rich_help_panel=RESULTS),
    ] = None,
) -> None:
    """Show who is first where, who is beaten beyond chance, and whom each method harms against training alone.

    Example: coterie leaderboard show leaderboard.json runs/leaderboard --markdown mine.md
    """
    for path in paths:
        if not path.exists():
            raise ConfigError(f"there is nothing at {str(path)!r}: give records and folders of entries")
    from coterie.studies.leaderboard import one_method, page
    from coterie.studies.leaderboard import record as records
    from coterie.studies.leaderboard.protocol import OURS, load

    found = records.read(paths, load(protocol or OURS))
    if record is not None:
        records.write(found, record)
    if markdown is not None:
        from coterie.runs.storage.atomic_files import write_text

        write_text(markdown, f"# Leaderboard\n\n{page.markdown(found)}")
    if not found.boards:
        out.print("Nothing has been played yet: `coterie leaderboard run` does it.", markup=False, highlight=False)
        return
    if method is not None:
        out.print(one_method.table(found, method))
        out.print(one_method.sentence(found, method), markup=False, highlight=False)
        return
    for place, settings in page.places(found).items():
        out.print(f"\n{place}", style="bold", markup=False, highlight=False)
        for setting in settings:
            out.print(page.judgement(found, found.boards[setting.name]).replace("**", ""), highlight=False)
        out.print(page.place_table(found, settings, page.mean_cell))
    out.print("\nAll settings", style="bold")
    out.print(page.overview(found))
    for sentence in page.sentences(found):
        out.print(sentence, markup=False, highlight=False)
