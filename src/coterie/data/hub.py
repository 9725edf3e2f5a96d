"""Data sets of Hugging Face's library ``datasets``, and partitions of ``flwr-datasets``.

A partitioner of ``flwr-datasets`` has ``load_partition`` and ``num_partitions``; its ``FederatedDataset`` has
``partitioners`` by split. They are known by these, so that no version of that package is needed here.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd
from pydantic import Field

from coterie import options
from coterie.data._user_data import UserSource, count_owners, encode_owner
from coterie.data.collected import SamplePiece, as_inputs, put_together, read_items
from coterie.data.dataset import Dataset
from coterie.data.frames import ColumnOptions, checked_frame, dataset_of
from coterie.errors import ConfigError, DataError
from coterie.tasks import TaskName

_LABEL = "label"  # the column to predict, unless another is named


class HubOptions(ColumnOptions, Protocol):
    """What is said of the columns of such a data set."""

    @property
    def input(self) -> str:
        """The column to predict from."""


def is_dataset(data: Any) -> bool:
    """Say whether something is a ``datasets.Dataset``."""
    return type(data).__module__.startswith("datasets.") and hasattr(data, "column_names") and hasattr(data, "features")


def is_split(data: Any) -> bool:
    """Say whether something is a ``datasets.DatasetDict``."""
    return isinstance(data, dict) and type(data).__module__.startswith("datasets.")


def splits(data: Any) -> tuple[Any, Any]:
    """Give the training set and, where there is one, the test set."""
    if "train" not in data:
        raise DataError(
            f"the data set has the splits {', '.join(data)}, but none is called train: hand one of them over"
        )
    return data["train"], data.get("test")


def unpacked(data: Any) -> Any:
    """Give the partitions of a partitioner, or of a ``FederatedDataset``, by the clients' names; all else as it is."""
    if hasattr(data, "partitioners") and hasattr(data, "load_partition"):
        names = list(data.partitioners)
        split = "train" if "train" in names else names[0]
        data.load_partition(0, split)  # which sets the partitioner up
        return unpacked(data.partitioners[split])
    if hasattr(data, "load_partition") and hasattr(data, "num_partitions"):
        data.load_partition(0)
        natural = getattr(data, "partition_id_to_natural_id", None) or {}
        return {str(natural.get(number, number)): data.load_partition(number) for number in range(data.num_partitions)}
    return data


def _first(data: Any) -> Any:
    return next(iter(data.values()), None) if isinstance(data, dict) else data


def default_label(data: Any) -> str:
    """Give the name of the column to predict where none is named: ``label``, if there is one."""
    first = _first(data)
    return _LABEL if is_dataset(first) and _LABEL in first.column_names else ""


def input_column(data: Any, source: HubOptions) -> str | None:
    """Give the one column to predict from: the one that is named, or the only one with images or sequences."""
    if source.input:
        if source.input not in data.column_names:
            raise DataError(f"the data set has no column {source.input!r}: it has {', '.join(data.column_names)}")
        return source.input
    left_out = {source.label or _LABEL, source.client, *source.drop}
    found = [name for name in data.column_names if name not in left_out and not hasattr(data.features[name], "dtype")]
    found += [name for name in data.column_names if name not in left_out and _is_special(data.features[name])]
    found = list(dict.fromkeys(found))
    if len(found) > 1:
        raise ConfigError(
            f"the columns {', '.join(found)} hold images or sequences: say with input= which to predict from"
        )
    return found[0] if found else None


def _is_special(feature: Any) -> bool:
    return type(feature).__name__ in ("Image", "Sequence", "List", "LargeList", "Array2D", "Array3D", "Array4D")


def class_names(data: Any, source: HubOptions) -> tuple[str, ...]:
    """Give the classes' names where the column to predict has them."""
    first = _first(data)
    if not is_dataset(first):
        return ()
    return tuple(getattr(first.features.get(source.label or _LABEL), "names", None) or ())


def owners_of(data: Any, source: HubOptions) -> npt.NDArray[Any] | None:
    """Give whose each row is, where a column says it."""
    if not is_dataset(data) or not source.client:
        return None
    if source.client not in data.column_names:
        raise DataError(f"the data set has no column {source.client!r}: it has {', '.join(data.column_names)}")
    feature = data.features[source.client]
    values = data.with_format(None)[source.client][:]
    names = getattr(feature, "names", None)
    return np.asarray([names[value] for value in values] if names else values)


def as_frame(data: Any) -> pd.DataFrame:
    """Give a table of a data set, with names in place of numbers of classes."""
    frame: pd.DataFrame = data.with_format(None).to_pandas()
    for name, feature in data.features.items():
        names = getattr(feature, "names", None)
        if names:
            frame[name] = [None if value is None or value != value else names[int(value)] for value in frame[name]]
    return frame


def piece_of(data: Any, source: HubOptions, where: str) -> SamplePiece:
    """Read the samples of a data set that has one column to predict from."""
    column, label = input_column(data, source), source.label or _LABEL
    if column is None:
        raise DataError(f"{where} has no column with images, sequences or arrays: give tables for all clients")
    if label not in data.column_names:
        raise DataError(f"{where} has no column {label!r} to predict: it has {', '.join(data.column_names)}")
    feature = type(data.features[column]).__name__
    if feature == "Value" and str(getattr(data.features[column], "dtype", "")) in ("string", "large_string"):
        raise DataError(f"column {column!r} of {where} holds texts: make numbers of their words first (data.map)")
    if feature == "Image":
        plain = data.with_format(None)

        def item(number: int) -> tuple[Any, Any]:
            row = plain[number]
            return row[column], row[label]

        return read_items(len(data), item, where)
    rows = data.with_format(None)[column][:]
    return SamplePiece(as_inputs(rows, where), np.asarray(data.with_format(None)[label][:]))


class HubSource(UserSource):
    """A data set that Hugging Face's library wrote to a folder (save_to_disk)."""

    name: ClassVar[str] = "hf"
    shape: ClassVar[str] = "as the column has them"
    positional: ClassVar[str | None] = "path"

    path: Path = Field(description="the folder")
    label: str = Field(_LABEL, description="the column to predict")
    client: str = Field("", description="the column that says whose a row is")
    input: str = Field("", description="the column to predict from; unless given, the one with images or sequences")
    drop: options.Names = Field((), description="columns to leave out")
    columns: Path | None = Field(None, description="of a table: a file that says what the columns are")
    length: int | None = Field(None, ge=1, description="cut or fill up sequences to this; auto: the longest one's")
    padding: int = Field(0, ge=0, description="the number that sequences are filled up with")
    task: TaskName = Field("multiclass", description="what is to be predicted")
    norm: Literal["auto", "own", "none"] = Field(
        "auto", description="own: mean 0, deviation 1 (auto: numbers of tables); none: as they are, bytes in [0, 1]"
    )
    sequence: ClassVar[str] = ""
    missing: ClassVar[tuple[str, ...]] = ()

    def load(self, folder: Path, seed: int) -> Dataset:
        """Read the data set."""
        train, test = self._read()
        if input_column(train, self) is None:
            frames = [checked_frame(as_frame(each), f"the data set {self.path}") for each in (train, test) if each]
            tested = frames[1] if len(frames) > 1 else None
            return dataset_of(self, self.text(), frames[0], f"the data set {self.path}", tested)
        parts = [each for each in (train, test) if each]
        where = f"the data set {self.path}"
        pieces = [replace(piece_of(each, self, where), owner=owners_of(each, self)) for each in parts]
        return put_together(
            self.text(),
            pieces[:1],
            pieces[1:],
            task=self.task,
            scaled=self.norm == "own",
            length=self.length,
            padding=self.padding,
            classes=class_names(train, self),
        )

    def owners(self) -> dict[str, int] | None:
        """Read the client column alone."""
        if not self.client or not self.path.expanduser().exists():
            return None
        found = [owners_of(each, self) for each in self._read() if each]
        return count_owners(*encode_owner(np.concatenate([each for each in found if each is not None]), str(self.path)))

    def _read(self) -> tuple[Any, Any]:
        try:
            import datasets
        except ImportError:
            raise ConfigError(
                "data is a folder of Hugging Face's library datasets, which is not installed: pip install "
                "'coterie[data-hub]'"
            ) from None
        path = self.path.expanduser()
        try:
            found = datasets.load_from_disk(str(path))
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read as a data set that save_to_disk wrote: {error}") from None
        return splits(found) if is_split(found) else (found, None)
