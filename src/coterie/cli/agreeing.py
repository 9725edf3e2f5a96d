"""Commands with which silos agree on what a sample is."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.cli.console import err, out
from coterie.cli.shared_options import Folder
from coterie.errors import ConfigError, DataError

if TYPE_CHECKING:
    from coterie.federation.agreement import Schema
    from coterie.federation.statement import Statement

_NODE = "node.yaml"


def describe(
    data: Annotated[
        str, typer.Argument(metavar="DATA|NODE", help="A node's own data, as in node.yaml, or with --out its folder.")
    ],
    out_: Annotated[
        Folder, typer.Option("--out", metavar="FILE", help="Write what the node tells, for `coterie federate agree`.")
    ] = None,
) -> None:
    """Say what some data are, in the words of federation.yaml; with --out, for members to agree on.

    A folder with node.yaml and federation.yaml is a node's: what it tells is of the samples that it will train on. With
    `privacy` in federation.yaml, numbers are told with noise, which costs as much as a reply.

    Example: coterie federate describe nodes/north --out north.yaml
    """
    if out_ is None:
        _print(data)
        return
    folder = Path(data)
    if not (folder / _NODE).is_file():
        raise ConfigError(f"data is {data!r}, but with --out it must be a node's folder, with a {_NODE} in it")
    if out_.exists():
        raise ConfigError(f"out is {str(out_)!r}, which is there already: choose another file")
    from coterie.federation import project
    from coterie.federation.statement import make_statement

    config = project.read_node(folder)
    told = make_statement(folder, config.member, config.data)
    told.write(out_)
    err.print(f"statement: {out_}; read it before you send it", markup=False, highlight=False)
    if told.privacy is not None:
        loss = "unbounded" if told.privacy.epsilon is None else f"{told.privacy.epsilon:.4g}"
        err.print(f"privacy loss ε of all that the node has told: {loss}", highlight=False)


def agree(
    statements: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="What silos wrote with `describe`, one file of each.")
    ],
    out_: Annotated[Path, typer.Option("--out", metavar="FILE", help="Where to write the schema.")],
) -> None:
    """Make one schema of what silos told, or show where they disagree.

    Categories are united, and means and deviations put together from counts and sums. Of files that `coterie data
    describe --write` wrote, which hold no sums, the columns alone are united.

    Example: coterie federate agree north.yaml south.yaml east.yaml --out schema.yaml
    """
    if out_.exists():
        raise ConfigError(f"out is {str(out_)!r}, which is there already: choose another file")
    from coterie.data.table_schema import TableSchema
    from coterie.federation import agreeing
    from coterie.federation.statement import Statement
    from coterie.yaml_file import read_yaml

    try:
        if all(set(read_yaml(path, "statement")) == {"columns"} for path in statements):
            columns = {str(path): TableSchema.read(path).columns for path in statements}
            agreeing.unite(columns).write(out_)
        else:
            told = [Statement.read(path) for path in statements]
            schema = agreeing.agree(told)
            agreeing.write_schema(schema, out_)
            _show(schema, told)
    except agreeing.Disagreement as error:
        for sentence in error.sentences:
            err.print(f"disagreement: {sentence}", markup=False, highlight=False, soft_wrap=True)
        count = len(error.sentences)
        raise DataError(f"there is no schema for all: {count} disagreement{'s' if count > 1 else ''}") from None
    err.print(f"schema: {out_}", markup=False, highlight=False)


def _show(schema: Schema, told: list[Statement]) -> None:
    from coterie.tables import Row, Table, numbers, words

    names = schema.columns or tuple(str(place) for place in range(len(schema.mean)))
    rows = []
    for place, name in enumerate(names):
        at = place if len(schema.mean) > 1 else 0
        fill = f"{schema.fill[place]:.6g}" if schema.fill else ""
        rows.append(Row((name, f"{schema.mean[at]:.6g}", f"{schema.std[at]:.6g}", fill)))
    counted = [each.rows for each in told if each.rows is not None]
    of = f"{sum(counted):,} training samples of " if len(counted) == len(told) else ""
    title = f"{schema.task}, {len(schema.classes)} classes, {len(names)} inputs; {of}{len(told)} members"
    out.print(Table((*words("input"), *numbers("mean", "deviation", "gaps")), tuple(rows), title, labels=1))


def _print(data: str) -> None:
    import yaml

    from coterie.federation.party_data import read_own

    found = read_own(data, Path())
    wanted = {"input_shape": found.input_shape, "classes": found.classes, "columns": found.features}
    norm = {"mean": found.mean, "std": found.std}
    lists = {name: list(value) for name, value in wanted.items() if value}
    out.print(f"data:\n  task: {found.task}", markup=False, highlight=False)
    if found.x.dtype.is_floating_point or found.x.element_size() == 1:
        lists |= {name: [float(f"{number:.6g}") for number in value] for name, value in norm.items()}
    else:
        out.print("  words: true", markup=False, highlight=False)
    for name, value in lists.items():
        text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
        out.print(f"  {name}: {text.splitlines()[0]}", markup=False, highlight=False, soft_wrap=True)
    err.print(f"{len(found)} samples; mean and std are of these alone", highlight=False)
