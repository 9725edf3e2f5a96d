"""The samples of a client that was in no run, read as the run's models are fed: by what its folder says of them."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from coterie import options
from coterie.data.dataset import Dataset, Preparation
from coterie.data.frames import checked_frame, content_of, read_csv
from coterie.data.registry import SOURCES
from coterie.data.sequences import padded
from coterie.data.table import TableSource
from coterie.data.table_schema import ColumnSchema, TableSchema, preparation_of, unknown_categories
from coterie.errors import ConfigError, CoterieError, CoterieWarning, DataError

_TABLES, _ARRAYS = (".csv", ".parquet"), (".npz",)


def read_newcomer(path: Path, inputs: Mapping[str, Any], source: str, label: str | None) -> tuple[Dataset, str | None]:
    """Read a file of the newcomer's, and the name that it gives itself, if any.

    ``inputs`` is what the run says of its samples, ``source`` the text that named its data, whose files need not be
    there any more. ``label`` is the column to predict, by default the run's.
    """
    if path.suffix.lower() in _TABLES:
        return _table(path, inputs, source, label)
    if path.suffix.lower() in _ARRAYS:
        return _arrays(path, inputs), None
    raise ConfigError(f"data is {str(path)!r}, but must end in {', '.join((*_TABLES, *_ARRAYS))}")


def _table(path: Path, inputs: Mapping[str, Any], text: str, label: str | None) -> tuple[Dataset, str | None]:
    known = _described(text)
    if not inputs["columns"] and not (known and known.sequence):
        raise ConfigError(f"data is {str(path)!r}, but the run was not made on a table: give x and y in an .npz file")
    if label is None and known is None:
        raise ConfigError("label is not given, and the run does not name the column to predict: give --label COLUMN")
    owner, gaps = (known.client, known.missing) if known else ("", ())
    frame, where = checked_frame(_read(path, owner), str(path), gaps), str(path)
    wanted = TableSource(path=path, label=label or (known.label if known else ""), task=inputs["task"])
    name = _only_owner(frame, owner, where)
    if known and known.sequence:
        content = content_of(wanted.model_copy(update={"sequence": known.sequence}), frame, where)
        x = padded(frame[known.sequence].tolist(), int(inputs["shape"][0]), known.padding, where)
        _refuse(content.problems, where)
        return _made(path, x, _labels(frame[wanted.label], inputs, where), inputs), name
    schema = TableSchema(columns={name: ColumnSchema(**column) for name, column in inputs["columns"].items()})
    missing = [column for column in schema.columns if column not in frame.columns]
    _refuse([f"there is no column {column!r}" for column in missing], where)
    if wanted.label not in frame.columns:
        raise DataError(f"{where} has no column {wanted.label!r}: it has {', '.join(frame.columns)}")
    content = content_of(wanted, frame[[*schema.columns, wanted.label]], where, schema)
    _refuse(content.problems, where)
    for sentence in unknown_categories(frame, schema):
        warnings.warn(f"{where}: {sentence}", CoterieWarning, stacklevel=4)
    x = torch.from_numpy(np.stack([each.values for each in content.features], 1).astype(np.float32))
    preparation = preparation_of(content.features, known is None or known.norm != "none")
    return _made(path, x, _labels(frame[wanted.label], inputs, where), inputs, preparation), name


def _arrays(path: Path, inputs: Mapping[str, Any]) -> Dataset:
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
            found = {name: archive[name] for name in ("x", "y") if name in archive}
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    except (OSError, ValueError, EOFError) as error:
        raise DataError(f"{path} cannot be read ({error})") from None
    for name in ("x", "y"):
        if name not in found:
            raise DataError(f"{path} has no array {name!r}: it must have x, the samples, and y, what they are")
    x, y = found["x"], found["y"]
    if y.ndim != 1 or len(x) != len(y):
        raise DataError(f"the arrays of {path} must have one entry for each sample, but have {x.shape} and {y.shape}")
    bytes_wanted = inputs["type"] == "uint8"
    if (x.dtype == np.uint8) != bytes_wanted:
        raise DataError(f"x in {path} holds {x.dtype}, but the run's samples are {inputs['type']}")
    rows = torch.from_numpy(x if bytes_wanted else x.astype(inputs["type"]))
    if rows.dim() == 3 and len(inputs["shape"]) == 3:
        rows = rows.unsqueeze(1)
    return _made(path, rows, _labels(pd.Series(y), inputs, str(path)), inputs)


def _described(text: str) -> TableSource | None:
    """Give how the run's table was named; nothing if it was none, or handed over as an object."""
    try:
        found = options.resolve("data set", text, SOURCES)
    except CoterieError:
        return None
    return found if isinstance(found, TableSource) else None


def _read(path: Path, client: str) -> pd.DataFrame:
    if not path.is_file():
        raise DataError(f"there is no file {path}")
    try:
        return read_csv(path, client) if path.suffix.lower() == ".csv" else pd.read_parquet(path)
    except (OSError, ValueError, pd.errors.ParserError) as error:
        raise DataError(f"the table {path} cannot be read: {error}") from None


def _only_owner(frame: pd.DataFrame, owner: str, where: str) -> str | None:
    if owner not in frame.columns:
        return None
    names = frame[owner].dropna().astype(str).unique().tolist()
    if len(names) > 1:
        raise DataError(
            f"{where} has rows of {len(names)} clients, such as {names[0]!r} and {names[1]!r} (column {owner!r}): give "
            "those of one"
        )
    return names[0] if names else None


def _labels(column: pd.Series[Any], inputs: Mapping[str, Any], where: str) -> Tensor:
    values: npt.NDArray[Any] = column.to_numpy()
    if inputs["task"] == "regression":
        if not np.issubdtype(values.dtype, np.number):
            raise DataError(f"the labels in {where} are not numbers, but the run predicts numbers")
        return torch.from_numpy(values.astype(np.float32))
    whole = np.issubdtype(values.dtype, np.floating) and bool((values == np.rint(values)).all())
    names = [str(int(value)) if whole else str(value) for value in values.tolist()]
    classes = list(inputs["classes"])
    # Arrays count the classes of a data set that calls them by names.
    if np.issubdtype(values.dtype, np.integer) and not set(names) <= set(classes):
        classes = [str(number) for number in range(len(classes))]
    unknown = next((name for name in names if name not in classes), None)
    if unknown is not None:
        raise DataError(f"{where} has the class {unknown!r}, but the run knows {', '.join(inputs['classes'])}")
    return torch.tensor([classes.index(name) for name in names])


def _made(
    path: Path, x: Tensor, y: Tensor, inputs: Mapping[str, Any], preparation: Preparation | None = None
) -> Dataset:
    if list(x.shape[1:]) != list(inputs["shape"]):
        raise DataError(f"a sample of {path} has shape {list(x.shape[1:])}, but the run's have {inputs['shape']}")
    scaling = {name: tuple(values) for name, values in inputs["scaling"].items()}
    known: dict[str, Any] = {"features": tuple(inputs["features"]), "preparation": preparation, **scaling}
    return Dataset(path.name, x, y, len(x), inputs["task"], tuple(inputs["classes"]), **known)


def _refuse(problems: list[str], where: str) -> None:
    if problems:
        count = f"{len(problems)} problems: " if len(problems) > 1 else ""
        raise DataError(f"{where} cannot be used: {count}{'; '.join(problems)}")
