"""From a table in memory to samples: what its columns are, whose a row is, and everything that is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from coterie.data._user_data import encode_labels, encode_owner, with_statistics
from coterie.data.dataset import Dataset
from coterie.data.sequences import padded
from coterie.data.table_schema import Feature, TableSchema, encode, infer, preparation_of, with_gaps
from coterie.errors import DataError
from coterie.tasks import TaskName


class ColumnOptions(Protocol):
    """What is said of the columns of any data that have some."""

    @property
    def label(self) -> str:
        """The column to predict."""

    @property
    def client(self) -> str:
        """The column that says whose a row is; empty if there is none."""

    @property
    def drop(self) -> tuple[str, ...]:
        """Columns to leave out."""


class TableOptions(ColumnOptions, Protocol):
    """What is said of a table: the fields of a source that has one."""

    @property
    def missing(self) -> tuple[str, ...]:
        """Texts that stand for a gap, besides those that always do."""

    @property
    def columns(self) -> Path | None:
        """The file with a schema that was written down."""

    @property
    def task(self) -> TaskName:
        """What is to be predicted."""

    @property
    def norm(self) -> str:
        """Whether numbers are scaled: ``none`` for not."""

    @property
    def sequence(self) -> str:
        """The column that holds a sequence of whole numbers for each row, where that is all to predict from."""

    @property
    def length(self) -> int | None:
        """How long sequences are made."""

    @property
    def padding(self) -> int:
        """What short sequences are filled up with."""


@dataclass(frozen=True)
class TableContent:
    """A table as it was read: its columns to predict from, what they are, and everything that is wrong with it."""

    frame: pd.DataFrame
    inputs: pd.DataFrame
    schema: TableSchema
    features: list[Feature]
    problems: list[str]


def checked_frame(frame: pd.DataFrame, where: str, missing: tuple[str, ...] = ()) -> pd.DataFrame:
    """Give a table columns with names of their own, rows that count from 0, and gaps where texts stand for them."""
    frame = frame.copy(deep=False)
    frame.columns = [str(column) for column in frame.columns]
    if frame.columns.duplicated().any():
        raise DataError(f"{where} has two columns of the same name")
    return frame.reset_index(drop=True).apply(with_gaps, missing=missing)


def read_csv(path: Path, client: str, only: list[str] | None = None) -> pd.DataFrame:
    """Read a CSV file, all columns or some; clients whose names are numbers keep the zeros before them."""
    frame = pd.read_csv(path, usecols=only, low_memory=False)
    if client in frame.columns and pd.api.types.is_integer_dtype(frame[client]):
        written = pd.read_csv(path, usecols=[client], dtype=str)[client].str.strip()
        if (written != frame[client].astype(str)).any():
            frame[client] = written
    return frame


def content_of(
    options: TableOptions, frame: pd.DataFrame, where: str, schema: TableSchema | None = None
) -> TableContent:
    """Find out what the columns are, and everything that is wrong with a table; what is no such table is refused."""
    kept = [options.label, *([options.client] if options.client else []), *options.drop]
    for column in (*kept, *([options.sequence] if options.sequence else [])):
        if column not in frame.columns:
            raise DataError(f"{where} has no column {column!r}: it has {', '.join(frame.columns)}")
    if not len(frame):
        raise DataError(f"{where} has no rows")
    problems = []
    for column, what in ((options.label, "label"), *([(options.client, "client")] if options.client else [])):
        missing = frame[column].isna().to_numpy()
        if missing.any():
            count, row = int(missing.sum()), int(missing.argmax())
            problems.append(f"{count} rows have no {what} (column {column!r}), the first is row {row}")
    inputs = frame.drop(columns=kept)
    if options.sequence:
        return TableContent(frame, inputs[[options.sequence]], TableSchema(columns={}), [], problems)
    unfit: list[str] = []
    known = inputs
    if schema is None and options.columns:
        schema = TableSchema.read(options.columns.expanduser()).with_missing(options.missing)
    elif schema is None:
        schema, unfit = infer(inputs, options.missing)
        known = inputs[list(schema.columns)]
    features, wrong = encode(known, schema)
    if not features and not unfit:
        unfit = ["there are no columns to predict from"]
    return TableContent(frame, inputs, schema, features, [*problems, *unfit, *wrong])


def dataset_of(
    options: TableOptions,
    name: str,
    frame: pd.DataFrame,
    where: str,
    test: pd.DataFrame | None = None,
    schema: TableSchema | None = None,
) -> Dataset:
    """Make samples of a table; each category becomes a column, and gaps are filled when it is known who has which row.

    What the columns are is found in ``frame`` alone, unless a schema is given; the rows of ``test`` are the official
    test set, and stand apart where rows have owners.
    """
    content = _sound(content_of(options, frame, where, schema), where)
    tested = None if test is None else _sound(content_of(options, test, "test", content.schema), "test")
    whole = frame if test is None else pd.concat([frame, test], ignore_index=True)
    y, classes = encode_labels(_plain(whole[options.label]), options.task, f"{where}, column {options.label!r},")
    owner, names = owners_of(whole, options.client, where) if options.client else (None, ())
    known: dict[str, Any] = {
        "owner": owner,
        "owner_names": names,
        "test_apart": test is not None and bool(options.client),
    }
    if options.sequence:
        x = padded(whole[options.sequence].tolist(), options.length, options.padding, f"{where}, {options.sequence!r},")
        return Dataset(name, x, y, len(frame), options.task, classes, (0.0,), (1.0,), **known)
    features = content.features
    x = torch.cat([_numbers(each.features) for each in (content, tested) if each is not None])
    known |= {
        "features": tuple(each.name for each in features),
        "columns": {name: column.model_dump(mode="json") for name, column in content.schema.columns.items()},
        "preparation": preparation_of(features, options.norm != "none"),
    }
    norm = ((0.0,) * x.shape[1], (1.0,) * x.shape[1])
    return with_statistics(Dataset(name, x, y, len(frame), options.task, classes, *norm, **known))


def owners_of(frame: pd.DataFrame, client: str, where: str) -> tuple[Tensor, tuple[str, ...]]:
    """Give whose each row is, and the owners' names."""
    missing = frame[client].isna().to_numpy()
    if missing.any():
        raise DataError(
            f"{where} has no value in column {client!r}, row {int(missing.argmax())}, so nobody knows whose the row is "
            f"({int(missing.sum())} rows are so): fill it in"
        )
    return encode_owner(_plain(frame[client]), f"{where}, column {client!r},")


def _sound(content: TableContent, where: str) -> TableContent:
    found = content.problems
    if found:
        count = f"{len(found)} problems: " if len(found) > 1 else ""
        raise DataError(f"{where} cannot be used: {count}{'; '.join(found)}")
    return content


def _numbers(features: list[Feature]) -> Tensor:
    return torch.from_numpy(np.stack([each.values for each in features], axis=1).astype(np.float32))


def _plain(column: pd.Series[Any]) -> npt.NDArray[Any]:
    values = column.to_numpy()
    if values.dtype == np.bool_ or np.issubdtype(values.dtype, np.number) or np.issubdtype(values.dtype, np.datetime64):
        return values
    return column.astype(str).to_numpy(dtype=str)
