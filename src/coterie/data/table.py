"""The user's own table: a CSV or Parquet file with a label column."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from pydantic import BeforeValidator, Field
from torch import Tensor

from coterie.data._user_data import TaskKind, UserSource, count_owners, encode_labels, encode_owner, with_statistics
from coterie.data.dataset import Dataset, Preparation
from coterie.errors import DataError

_MOST_TEXTS = 100  # a column with more different texts is an identifier or free text, which one-hot columns do not help


def _split(value: Any) -> Any:
    return [part for part in value.split("+") if part] if isinstance(value, str) else value


ColumnNames = Annotated[tuple[str, ...], BeforeValidator(_split)]


class TableSource(UserSource):
    """Your own table: a CSV or Parquet file with a label column and, where there are natural clients, their column."""

    name: ClassVar[str] = "table"
    shape: ClassVar[str] = "features"
    positional: ClassVar[str | None] = "path"

    path: Path = Field(description="the file")
    label: str = Field(description="the column to predict")
    client: str = Field("", description="the column that says whose a row is")
    drop: ColumnNames = Field((), description="columns to leave out, as name+date")
    task: TaskKind = Field("multiclass", description="what is to be predicted")
    norm: Literal["own", "none"] = Field("own", description="own: numeric columns get mean 0 and deviation 1")

    def load(self, folder: Path, seed: int) -> Dataset:
        """Read the table; columns of text become one column for each text."""
        path = self.path.expanduser()
        frame = self._read(path)
        for column in (self.label, *([self.client] if self.client else []), *self.drop):
            if column not in frame.columns:
                raise DataError(f"the table {path} has no column {column!r}: it has {', '.join(frame.columns)}")
        if not len(frame):
            raise DataError(f"the table {path} has no rows")
        gaps = [column for column in frame.columns if column not in self.drop and frame[column].isna().any()]
        if gaps:
            row = int(np.flatnonzero(frame[gaps[0]].isna())[0])
            raise DataError(f"the table {path} has no value in column {gaps[0]!r}, row {row}: fill it in or drop it")
        y, classes = encode_labels(_plain(frame[self.label]), self.task, f"{path}, column {self.label!r},")
        owner, names = self._owners(frame, path) if self.client else (None, ())
        inputs = frame.drop(columns=[self.label, *([self.client] if self.client else []), *self.drop])
        x, numeric, features = self._features(inputs, path)
        preparation = Preparation(tuple(numeric)) if self.norm == "own" else None
        norm = ((0.0,) * x.shape[1], (1.0,) * x.shape[1])
        known: dict[str, Any] = {"owner": owner, "features": tuple(features), "owner_names": names}
        made = Dataset(self.text(), x, y, len(x), self.task, classes, *norm, **known, preparation=preparation)
        return with_statistics(made)

    def owners(self) -> dict[str, int] | None:
        """Read the client column alone."""
        if not self.client:
            return None
        path = self.path.expanduser()
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
            frame = pd.read_csv(path, usecols=columns) if ending == ".csv" else pd.read_parquet(path, columns=columns)
        except (OSError, ValueError, pd.errors.ParserError) as error:
            raise DataError(f"the table {path} cannot be read: {error}") from None
        frame.columns = [str(column) for column in frame.columns]
        if frame.columns.duplicated().any():
            raise DataError(f"the table {path} has two columns of the same name")
        return frame

    def _columns(self, path: Path) -> list[str]:
        if path.suffix.lower() == ".csv":
            return [str(column) for column in pd.read_csv(path, nrows=0).columns]
        from pyarrow import parquet

        return list(parquet.read_schema(path).names)

    def _features(self, frame: pd.DataFrame, path: Path) -> tuple[Tensor, list[bool], list[str]]:
        columns: list[npt.NDArray[np.float32]] = []
        numeric: list[bool] = []
        names: list[str] = []
        for name in frame.columns:
            values = _plain(frame[name])
            if values.dtype == np.bool_ or np.issubdtype(values.dtype, np.number):
                if not np.isfinite(values).all():
                    raise DataError(f"the table {path} has an infinite value in column {name!r}")
                columns.append(values.astype(np.float32)[:, None])
                numeric.append(values.dtype != np.bool_)
                names.append(name)
                continue
            if np.issubdtype(values.dtype, np.datetime64):
                raise DataError(f"the table {path} has dates in column {name!r}: make numbers of them, or drop={name}")
            texts, codes = np.unique(values, return_inverse=True)
            if len(texts) > _MOST_TEXTS:
                raise DataError(
                    f"the table {path} has {len(texts)} different texts in column {name!r}, more than {_MOST_TEXTS}: "
                    f"give drop={name}, or make numbers of them"
                )
            columns.append(np.eye(len(texts), dtype=np.float32)[codes])
            numeric.extend([False] * len(texts))
            names.extend(f"{name}={text}" for text in texts)
        if not columns:
            raise DataError(f"the table {path} has no columns to predict from")
        return torch.from_numpy(np.concatenate(columns, axis=1)), numeric, names


def _plain(column: pd.Series[Any]) -> npt.NDArray[Any]:
    values = column.to_numpy()
    if values.dtype == np.bool_ or np.issubdtype(values.dtype, np.number) or np.issubdtype(values.dtype, np.datetime64):
        return values
    return column.astype(str).to_numpy(dtype=str)
