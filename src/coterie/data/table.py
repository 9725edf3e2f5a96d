"""The user's own table: a CSV or Parquet file with a label column."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from coterie.data._user_data import UserSource, count_owners, encode_labels, encode_owner, with_statistics
from coterie.data.dataset import Dataset
from coterie.data.table_schema import Feature, TableSchema, encode, infer, preparation_of
from coterie.errors import DataError
from coterie.tasks import TaskName


def _split(value: Any) -> Any:
    return [part for part in value.split("+") if part] if isinstance(value, str) else value


ColumnNames = Annotated[tuple[str, ...], BeforeValidator(_split)]


@dataclass(frozen=True)
class TableContent:
    """A table as it was read: its columns to predict from, what they are, and everything that is wrong with it."""

    frame: pd.DataFrame
    inputs: pd.DataFrame
    schema: TableSchema
    features: list[Feature]
    problems: list[str]


class TableSource(UserSource):
    """Your own table: a CSV or Parquet file with a label column and, where there are natural clients, their column."""

    name: ClassVar[str] = "table"
    shape: ClassVar[str] = "features"
    positional: ClassVar[str | None] = "path"

    path: Path = Field(description="the file")
    label: str = Field(description="the column to predict")
    client: str = Field("", description="the column that says whose a row is")
    drop: ColumnNames = Field((), description="columns to leave out, as name+date")
    columns: Path | None = Field(
        None, description="a file that says what the columns are, as `coterie data describe --write` writes it"
    )
    task: TaskName = Field("multiclass", description="what is to be predicted")
    norm: Literal["own", "none"] = Field("own", description="own: numbers and dates get mean 0 and deviation 1")

    def load(self, folder: Path, seed: int) -> Dataset:
        """Read the table; each category becomes a column, and gaps are filled when it is known who has which row."""
        return self.load_as(None)

    def load_as(self, schema: TableSchema | None) -> Dataset:
        """Read the table by a schema that is given, or by its own."""
        path, content = self.path.expanduser(), self.content(schema)
        if content.problems:
            found = content.problems
            count = f"{len(found)} problems: " if len(found) > 1 else ""
            raise DataError(f"the table {path} cannot be used: {count}{'; '.join(found)}")
        frame, features = content.frame, content.features
        y, classes = encode_labels(_plain(frame[self.label]), self.task, f"{path}, column {self.label!r},")
        owner, names = self._owners(frame, path) if self.client else (None, ())
        x = torch.from_numpy(np.stack([each.values for each in features], axis=1).astype(np.float32))
        known: dict[str, Any] = {
            "owner": owner,
            "owner_names": names,
            "features": tuple(each.name for each in features),
            "columns": {name: column.model_dump(mode="json") for name, column in content.schema.columns.items()},
            "preparation": preparation_of(features, self.norm == "own"),
        }
        norm = ((0.0,) * x.shape[1], (1.0,) * x.shape[1])
        return with_statistics(Dataset(self.text(), x, y, len(x), self.task, classes, *norm, **known))

    def content(self, schema: TableSchema | None = None) -> TableContent:
        """Read the table and say everything that is wrong with it; a file that is no such table is refused."""
        path = self.path.expanduser()
        frame = self._read(path)
        kept = [self.label, *([self.client] if self.client else []), *self.drop]
        for column in kept:
            if column not in frame.columns:
                raise DataError(f"the table {path} has no column {column!r}: it has {', '.join(frame.columns)}")
        if not len(frame):
            raise DataError(f"the table {path} has no rows")
        problems = []
        for column, what in ((self.label, "label"), *([(self.client, "client")] if self.client else [])):
            missing = frame[column].isna().to_numpy()
            if missing.any():
                count, row = int(missing.sum()), int(missing.argmax())
                problems.append(f"{count} rows have no {what} (column {column!r}), the first is row {row}")
        inputs = frame.drop(columns=kept)
        if schema is None and self.columns:
            schema = TableSchema.read(self.columns.expanduser())
        unfit: list[str] = []
        known = inputs
        if schema is None:
            schema, unfit = infer(inputs)
            known = inputs[list(schema.columns)]
        features, wrong = encode(known, schema)
        if not features and not unfit:
            unfit = ["there are no columns to predict from"]
        return TableContent(frame, inputs, schema, features, [*problems, *unfit, *wrong])

    def owners(self) -> dict[str, int] | None:
        """Read the client column alone."""
        path = self.path.expanduser()
        if not self.client or not path.exists():
            return None
        frame = self._read(path, self.client)
        if self.client not in frame.columns:
            raise DataError(f"the table {path} has no column {self.client!r}: it has {', '.join(frame.columns)}")
        return count_owners(*self._owners(frame, path))

    def _owners(self, frame: pd.DataFrame, path: Path) -> tuple[Tensor, tuple[str, ...]]:
        missing = frame[self.client].isna().to_numpy()
        if missing.any():
            raise DataError(
                f"the table {path} has no value in column {self.client!r}, row {int(missing.argmax())}, so nobody "
                f"knows whose the row is ({int(missing.sum())} rows are so): fill it in"
            )
        return encode_owner(_plain(frame[self.client]), f"{path}, column {self.client!r},")

    def _read(self, path: Path, only: str = "") -> pd.DataFrame:
        ending = path.suffix.lower()
        if ending not in (".csv", ".parquet"):
            raise DataError(f"the table {path} is neither .csv nor .parquet")
        if not path.is_file():
            raise DataError(f"there is no file {path}")
        try:
            columns = [only] if only and only in self._columns(path) else None
            if ending == ".csv":
                frame = pd.read_csv(path, usecols=columns, low_memory=False)
            else:
                frame = pd.read_parquet(path, columns=columns)
        except (OSError, ValueError, pd.errors.ParserError) as error:
            raise DataError(f"the table {path} cannot be read: {error}") from None
        frame.columns = [str(column) for column in frame.columns]
        if frame.columns.duplicated().any():
            raise DataError(f"the table {path} has two columns of the same name")
        return frame.reset_index(drop=True)

    def _columns(self, path: Path) -> list[str]:
        if path.suffix.lower() == ".csv":
            return [str(column) for column in pd.read_csv(path, nrows=0).columns]
        from pyarrow import parquet

        return list(parquet.read_schema(path).names)


def _plain(column: pd.Series[Any]) -> npt.NDArray[Any]:
    values = column.to_numpy()
    if values.dtype == np.bool_ or np.issubdtype(values.dtype, np.number) or np.issubdtype(values.dtype, np.datetime64):
        return values
    return column.astype(str).to_numpy(dtype=str)
