"""Data that a Python program hands over: a DataFrame, Datasets of PyTorch or Hugging Face, arrays for each client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pandas as pd
import torch
from pydantic import Field
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

from coterie import options, user_code
from coterie.data import hub
from coterie.data._user_data import UserSource, count_owners
from coterie.data.collected import SamplePiece, as_inputs, as_labels, put_together, read_items
from coterie.data.dataset import Dataset
from coterie.data.frames import checked_frame, dataset_of
from coterie.errors import ConfigError, DataError
from coterie.tasks import TaskName
from coterie.user_code import HeldObject
from coterie.user_code.digests import digest_of

_ALLOWED = (
    "a DataFrame, a Dataset of PyTorch, of Hugging Face or of Coterie, a pair (x, y), or one of these for each client, "
    "in a dictionary or list"
)
_NOBODY = "x@" + "0" * 32
_OF_TABLES = ("label", "client", "drop", "columns", "sequence")


class ObjectSource(UserSource):
    """An object of a Python program: see coterie.run."""

    name: ClassVar[str] = "object"
    shape: ClassVar[str] = "as the object has them"
    positional: ClassVar[str | None] = "what"
    missing: ClassVar[tuple[str, ...]] = ()

    what: str = Field(pattern=r"^[^@:,]+@[0-9a-f]{32}$", description="what it is, and its digest")
    label: str = Field("", description="the column to predict")
    client: str = Field("", description="the column that says whose a row is")
    drop: options.Names = Field((), description="columns to leave out")
    columns: Path | None = Field(None, description="a file that says what the columns are")
    input: str = Field("", description="the column to predict from, of a Dataset of Hugging Face's")
    sequence: str = Field("", description="the column with a list of whole numbers for each row")
    length: int | None = Field(None, ge=1, description="cut or fill up sequences to this; auto: the longest one's")
    padding: int = Field(0, ge=0, description="the number that sequences are filled up with")
    task: TaskName = Field("multiclass", description="what is to be predicted")
    norm: Literal["auto", "own", "none"] = Field(
        "auto", description="own: mean 0, deviation 1 (auto: numbers of tables); none: as they are, bytes in [0, 1]"
    )

    def load(self, folder: Path, seed: int) -> Dataset:
        """Give the object that was handed over."""
        found: Dataset = user_code.find("data", f"{self.name}:{self.what}")
        return found

    def owners(self) -> dict[str, int] | None:
        """Count whose the samples are."""
        found: Dataset = user_code.find("data", f"{self.name}:{self.what}")
        if found.owner is None:
            return None
        return count_owners(found.owner, found.owner_names or tuple(map(str, range(int(found.owner.max()) + 1))))


OPTIONS = tuple(name for name in ObjectSource.model_fields if name != "what")
"""What may be said of an object, by name."""


def hand_over(data: Any, test: Any = None, owners: Any = None, **given: Any) -> tuple[HeldObject, str]:
    """Make a data set of an object, hold it under the digest of what is in it, and write the text that names it.

    ``test`` are samples to test on, of the same kind; ``owners`` says whose each sample of ``data`` is, where the
    object does not.
    """
    for name in given:
        if name not in OPTIONS:
            raise ConfigError(f"data has no option {name!r}: it has {', '.join(OPTIONS)}")
    source = options.make(ObjectSource, {"what": _NOBODY, **given}, "data")
    label = _label(data)
    dataset = _dataset(source, f"object:{label}", data, test, owners)
    held = user_code.hold(label, digest_of(_facts(dataset)), dataset)
    text = source.model_copy(update={"what": held.text.removeprefix(user_code.OBJECT)}).text()
    try:
        same = ObjectSource.parse(text.partition(":")[2]).text() == text
    except ConfigError:
        same = False
    if not same:
        raise ConfigError(f"data is said to have {dict(given)!r}, but a comma in a name cannot be written: rename it")
    return held, text


def _facts(dataset: Dataset) -> list[object]:
    # Statistics follow from the rest, but constants do not.
    left_out = ("name", *(("mean", "std", "fill") if dataset.preparation is not None else ()))
    return [(name, value) for name, value in vars(dataset).items() if name not in left_out]


def _label(data: Any) -> str:
    return type(data).__name__ if not isinstance(data, Mapping | list | tuple) else "arrays"


def _dataset(source: ObjectSource, name: str, data: Any, test: Any, owners: Any) -> Dataset:
    if isinstance(data, Dataset):
        _refuse(source, "a coterie.data.Dataset, which says all of itself", *OPTIONS)
        if test is not None or owners is not None:
            raise ConfigError(
                "data is a coterie.data.Dataset, which has its own owners and test samples: leave them out"
            )
        return data
    data, test = hub.unpacked(data), hub.unpacked(test)
    official = hub.is_split(data)  # with a test set as published ones are, which need not have owners
    if official and test is not None:
        raise ConfigError(
            "data has splits of its own, so test says it twice: hand over data['train'] and test, or data"
        )
    if official:
        data, test = hub.splits(data)
    if _is_tables(data, source):
        return _of_tables(source, name, data, test, owners, official)
    classes = hub.class_names(data, source)
    pieces = _pieces(data, source, "data", owners)
    tested = [] if test is None else _pieces(test, source, "test", None)
    if tested and not official and any(piece.owner is None for piece in tested):
        raise ConfigError(
            "test is given, but nobody says whose its samples are: give samples for each client in a dictionary; to "
            "have all samples dealt out, hand them over together as data"
        )
    return put_together(
        name,
        pieces,
        tested,
        task=source.task,
        scaled=source.norm == "own",
        length=source.length,
        padding=source.padding,
        classes=classes,
    )


def _refuse(source: ObjectSource, what: str, *names: str) -> None:
    for name in names:
        if getattr(source, name) != ObjectSource.model_fields[name].default:
            raise ConfigError(f"{name} is {getattr(source, name)!r}, but data is {what}: leave it out")


# ------------------------------------------------------------------------------------------------------------- tables


def _is_tables(data: Any, source: ObjectSource) -> bool:
    first = next(iter(_clients(data).values()), None) if _is_clients(data) else data
    return isinstance(first, pd.DataFrame) or (hub.is_dataset(first) and hub.input_column(first, source) is None)


def _of_tables(source: ObjectSource, name: str, data: Any, test: Any, owners: Any, official: bool) -> Dataset:
    label = source.label or hub.default_label(data)
    if not label:
        raise ConfigError("data is a table, but label does not name the column to predict: give label='...'")
    frame, client = _table(data, source.client, owners, "data")
    tested, whose = (None, client) if test is None else _table(test, source.client, None, "test")
    if tested is not None and not official and (not client or whose != client):
        raise ConfigError(
            "test is given, but nobody says whose its rows are: give client='...' or a table for each client; to have "
            "all rows dealt out, hand them over together as data"
        )
    named = source.model_copy(update={"label": label, "client": client})
    return dataset_of(named, name, frame, "the table", tested)


def _table(data: Any, client: str, owners: Any, what: str) -> tuple[pd.DataFrame, str]:
    """Give one table and the column of it that says whose a row is."""
    if _is_clients(data):
        if client or owners is not None:
            raise ConfigError(f"{what} has a table for each client, so client and owners say it twice: leave them out")
        frames = {str(name): _frame(each, what) for name, each in _clients(data).items()}
        column = _free("client", frames)
        joined = [frame.assign(**{column: name}) for name, frame in frames.items()]
        return pd.concat(joined, ignore_index=True), column
    frame = _frame(data, what)
    if owners is None:
        return frame, client
    if client:
        raise ConfigError(f"client is {client!r}, and owners are given too: say only once whose a row is")
    if len(owners) != len(frame):
        raise DataError(f"there are {len(frame)} rows, but {len(owners)} owners: give one for each row")
    column = _free("client", {"": frame})
    return frame.assign(**{column: np.asarray(owners)}), column


def _free(name: str, frames: Mapping[str, pd.DataFrame]) -> str:
    while any(name in frame.columns for frame in frames.values()):
        name += "_"
    return name


def _frame(data: Any, what: str) -> pd.DataFrame:
    data = hub.as_frame(data) if hub.is_dataset(data) else data
    if not isinstance(data, pd.DataFrame):
        raise ConfigError(f"{what} has a {type(data).__name__} among tables: give tables for all clients")
    return checked_frame(data, "the table")


# ------------------------------------------------------------------------------------------------------------- arrays


def _is_clients(data: Any) -> bool:
    return isinstance(data, Mapping | list) or (
        isinstance(data, tuple)
        and not (len(data) == 2 and all(hasattr(part, "__len__") and _is_array(part) for part in data))
    )


def _is_array(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray | list) or hasattr(value, "__array__")


def _clients(data: Any) -> dict[str, Any]:
    found = data.items() if isinstance(data, Mapping) else enumerate(data)
    named = {str(name): value for name, value in found}
    if len(named) < len(data):
        raise ConfigError("data has two clients of the same name")
    return named


def _pieces(data: Any, source: ObjectSource, what: str, owners: Any) -> list[SamplePiece]:
    if _is_clients(data):
        if owners is not None:
            raise ConfigError(f"{what} has samples for each client, so owners say it twice: leave them out")
        if not data:
            raise DataError(f"{what} has no clients")
        return [replace(_piece(each, source, f"client {name!r}"), owner=name) for name, each in _clients(data).items()]
    piece = _piece(data, source, what)
    whose = hub.owners_of(data, source)
    if owners is not None and whose is not None:
        raise ConfigError(f"client is {source.client!r}, and owners are given too: say only once whose a sample is")
    found = whose if owners is None else np.asarray(owners)
    return [piece if found is None else replace(piece, owner=found)]


def _piece(data: Any, source: ObjectSource, where: str) -> SamplePiece:
    data = hub.unpacked(data)
    if hub.is_dataset(data):
        return hub.piece_of(data, source, where)
    _refuse(source, "not a table", *_OF_TABLES)
    if isinstance(data, IterableDataset):
        raise ConfigError(f"{where} is an IterableDataset, whose samples have no numbers: give a map-style Dataset")
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return SamplePiece(as_inputs(data.tensors[0], where), as_labels(data.tensors[1]))
    if isinstance(data, TorchDataset):
        return read_items(len(data), lambda number: _pair(data[number], where), where)  # type: ignore[arg-type]
    if isinstance(data, Sequence) and not isinstance(data, str) and len(data) == 2:
        return SamplePiece(as_inputs(data[0], where), as_labels(data[1]))
    raise ConfigError(f"{where} is a {type(data).__name__}, but data must be {_ALLOWED}")


def _pair(item: Any, where: str) -> tuple[Any, Any]:
    if not isinstance(item, Sequence) or len(item) != 2:
        raise DataError(f"a sample of {where} is a {type(item).__name__}, but must be a pair of an input and its label")
    x, y = item
    return (torch.as_tensor(x) if isinstance(x, int | float) else x), y
