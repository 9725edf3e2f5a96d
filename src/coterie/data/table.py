"""The user's own table: a CSV or Parquet file with a label column."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

import pandas as pd
from pydantic import Field

from coterie import options
from coterie.data._user_data import UserSource, count_owners
from coterie.data.dataset import Dataset
from coterie.data.frames import TableContent, checked_frame, content_of, dataset_of, owners_of, read_csv
from coterie.data.table_schema import TableSchema
from coterie.errors import DataError
from coterie.tasks import TaskName


class TableSource(UserSource):
    """Your own table: a CSV or Parquet file with a label column and, where there are natural clients, their column."""

    name: ClassVar[str] = "table"
    shape: ClassVar[str] = "features"
    positional: ClassVar[str | None] = "path"

    path: Path = Field(description="the file")
    label: str = Field(description="the column to predict")
    client: str = Field("", description="the column that says whose a row is")
    drop: options.Names = Field((), description="columns to leave out, as name+date")
    missing: options.Names = Field(
        (), description="texts that stand for a gap, as ?+-, besides blanks, NA and the like"
    )
    columns: Path | None = Field(
        None, description="a file that says what the columns are, as `coterie data describe --write` writes it"
    )
    task: TaskName = Field("multiclass", description="what is to be predicted")
    norm: Literal["own", "none"] = Field("own", description="own: numbers and dates get mean 0 and deviation 1")
    sequence: str = Field(
        "", description="the one column to predict from, which holds a list of whole numbers (words) for each row"
    )
    length: int | None = Field(None, ge=1, description="cut or fill up sequences to this; auto: the longest one's")
    padding: int = Field(0, ge=0, description="the number that sequences are filled up with")

    def load(self, folder: Path, seed: int) -> Dataset:
        """Read the table; each category becomes a column, and gaps are filled when it is known who has which row."""
        return self.load_as(None)

    def load_as(self, schema: TableSchema | None) -> Dataset:
        """Read the table by a schema that is given, or by its own."""
        return dataset_of(self, self.text(), self._read(), self._where, schema=schema)

    def content(self, schema: TableSchema | None = None) -> TableContent:
        """Read the table and say everything that is wrong with it; a file that is no such table is refused."""
        return content_of(self, self._read(), self._where, schema)

    def owners(self) -> dict[str, int] | None:
        """Read the client column alone."""
        if not self.client or not self.path.expanduser().exists():
            return None
        frame = self._read(self.client)
        if self.client not in frame.columns:
            raise DataError(f"{self._where} has no column {self.client!r}: it has {', '.join(frame.columns)}")
        return count_owners(*owners_of(frame, self.client, self._where))

    @property
    def _where(self) -> str:
        return f"the table {self.path.expanduser()}"

    def _read(self, only: str = "") -> pd.DataFrame:
        path = self.path.expanduser()
        ending = path.suffix.lower()
        if ending not in (".csv", ".parquet"):
            raise DataError(f"the table {path} is neither .csv nor .parquet")
        if not path.is_file():
            raise DataError(f"there is no file {path}")
        try:
            columns = [only] if only and only in self._columns(path) else None
            frame = read_csv(path, self.client, columns) if ending == ".csv" else pd.read_parquet(path, columns=columns)
        except (OSError, ValueError, pd.errors.ParserError) as error:
            raise DataError(f"the table {path} cannot be read: {error}") from None
        return checked_frame(frame, self._where, self.missing)

    def _columns(self, path: Path) -> list[str]:
        if path.suffix.lower() == ".csv":
            return [str(column) for column in pd.read_csv(path, nrows=0).columns]
        from pyarrow import parquet

        return list(parquet.read_schema(path).names)
