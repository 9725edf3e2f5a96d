"""A table as `coterie data describe` shows it: what its columns are, who has how many rows, what is wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from coterie.data.frames import TableContent
from coterie.data.table import TableSource
from coterie.data.table_schema import ColumnSchema, with_gaps
from coterie.tables import Row, Table, numbers, words

_SHOWN = 4  # categories that are listed


def columns_table(source: TableSource, content: TableContent) -> Table:
    """List the columns: kind, gaps, and the values in short."""
    rows = []
    for name in content.frame.columns:
        known = content.schema.columns.get(name)
        column = with_gaps(content.frame[name], known.missing if known else ())
        uses = {source.label: "label", source.client: "client", source.sequence: "sequence"}
        used = uses.get(name) or (known.kind if known else "")
        used = (
            used or ("not used" if source.sequence else "") or ("dropped" if name in source.drop else "cannot be used")
        )
        gaps = int(column.isna().sum())
        filled = known.gaps if known and known.gaps != "none" else ""
        values = _lengths(column) if name == source.sequence else _values(column, known)
        rows.append(Row((name, used, f"{gaps:,}" if gaps else "", filled, values)))
    inputs = "a sequence to predict from" if source.sequence else f"{len(content.features)} model inputs"
    title = f"{len(content.frame):,} rows, {len(content.frame.columns)} columns, {inputs}"
    head = (*words("column", "kind"), *numbers("gaps"), *words("filled with", "values"))
    return Table(head, tuple(rows), title, labels=1)


def clients_table(source: TableSource, content: TableContent) -> Table | None:
    """Count the rows of each client, and of each class where there are few."""
    if not source.client:
        return None
    whose = content.frame[source.client].dropna()
    counts = whose.value_counts().sort_index()
    label = content.frame[source.label]
    classes = sorted(label.dropna().unique(), key=str) if source.task != "regression" else []
    classes = classes if len(classes) <= _SHOWN else []
    crossed = pd.crosstab(whose, label) if classes else None
    rows = [
        Row(
            (
                str(name),
                f"{int(counts[name]):,}",
                *([] if crossed is None else [f"{int(crossed[one].get(name, 0)):,}" for one in classes]),
            )
        )
        for name in counts.index
    ]
    columns = (*words("client"), *numbers("rows", *(f"{source.label} {one}" for one in classes)))
    return Table(columns, tuple(rows), f"{len(counts)} clients, by column {source.client!r}", labels=1)


def _lengths(column: pd.Series[Any]) -> str:
    found = [len(each.split()) if isinstance(each, str) else len(each) for each in column.dropna()]
    return f"{min(found)} to {max(found)} numbers" if found else ""


def _values(column: pd.Series[Any], known: ColumnSchema | None) -> str:
    there = column.dropna()
    if there.empty:
        return ""
    if known is not None and known.kind in ("number", "date"):
        return f"{_short(there.min())} to {_short(there.max())}"
    counts = there.astype(str).value_counts()
    listed = ", ".join(f"{name} {int(count):,}" for name, count in counts.head(_SHOWN).items())
    return listed + (f", and {len(counts) - _SHOWN} more" if len(counts) > _SHOWN else "")


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, int | float | np.number) else str(value)
