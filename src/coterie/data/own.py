"""The user's own data: images in folders, arrays in an ``.npz``, a table with a label column."""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from PIL import Image, UnidentifiedImageError
from pydantic import BeforeValidator, Field
from torch import Tensor

from coterie.data._images import image_files, read_images
from coterie.data.dataset import Dataset, Source
from coterie.errors import DataError

Task = Literal["multiclass", "binary", "regression"]
_MOST_TEXTS = 100  # different texts in a column beyond which one-hot columns are hardly what is wanted


def _split(value: Any) -> Any:
    return [part for part in value.split("+") if part] if isinstance(value, str) else value


Texts = Annotated[tuple[str, ...], BeforeValidator(_split)]
AsText = BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)


def own_norm(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Measure mean and deviation of each channel, in pieces, so that no second copy is made."""
    unit = 255.0 if x.dtype == torch.uint8 else 1.0
    rest = [axis for axis in range(x.dim()) if axis != 1]
    count = x.numel() // x.shape[1]
    pieces = x.split(4096)
    mean = torch.stack([piece.double().sum(rest) for piece in pieces]).sum(0) / count
    shape = (1, -1, *(1,) * (x.dim() - 2))
    square = torch.stack([(piece.double() - mean.view(shape)).square().sum(rest) for piece in pieces]).sum(0) / count
    std = (square.sqrt() / unit).where(square > 0, torch.ones(()).double())
    return tuple((mean / unit).tolist()), tuple(std.tolist())


def encode_labels(values: npt.NDArray[Any], task: Task, where: str) -> tuple[Tensor, tuple[str, ...]]:
    """Turn labels of any kind into what a task wants."""
    numeric = np.issubdtype(values.dtype, np.number)
    if numeric and not np.isfinite(values).all():
        raise DataError(f"a label in {where} is missing or infinite")
    if task == "regression":
        if not numeric:
            raise DataError(f"the labels in {where} are not numbers, so the task cannot be regression")
        return torch.from_numpy(values.astype(np.float32)), ()
    if np.issubdtype(values.dtype, np.floating) and (values != np.rint(values)).any():
        raise DataError(f"the labels in {where} are fractions: give task=regression, or whole numbers or texts")
    names, codes = np.unique(values, return_inverse=True)
    if len(names) < 2 or (task == "binary" and len(names) != 2):
        raise DataError(f"the labels in {where} have {len(names)} different values, too few or many for a {task} task")
    shown = [str(int(name)) if np.issubdtype(values.dtype, np.floating) else str(name) for name in names]
    return torch.from_numpy(codes.astype(np.int64)), tuple(shown)


def encode_owner(values: npt.NDArray[Any]) -> Tensor:
    """Give natural clients numbers, in the sorted order of their names."""
    return torch.from_numpy(np.unique(values, return_inverse=True)[1].astype(np.int64))


class Folder(Source):
    """Your own images: a folder of images for each class, or such folders in train and test."""

    name: ClassVar[str] = "folder"
    how_many: ClassVar[str] = "your own"
    shape: ClassVar[str] = "as the images"
    class_count: ClassVar[str] = "your own"
    obtained: ClassVar[str] = "your own"
    citation: ClassVar[str] = "your own"
    positional: ClassVar[str | None] = "path"

    path: Path = Field(description="the folder")
    size: Annotated[str, AsText] = Field("", pattern=r"^(\d+(x\d+)?)?$", description="bring images to HEIGHTxWIDTH")
    channels: Annotated[Literal["auto", "1", "3"], AsText] = Field(
        "auto", description="1 grey, 3 colour; auto: as the first image is"
    )
    task: Literal["multiclass", "binary"] = Field("multiclass", description="what is to be predicted")
    norm: Literal["unit", "own"] = Field("unit", description="unit: pixels in [0, 1]; own: mean 0, deviation 1")

    def load(self, folder: Path, seed: int) -> Dataset:
        """Read the images, class by class, training images first."""
        root = self.path.expanduser()
        if not root.is_dir():
            raise DataError(f"there is no folder {root}")
        parts = [root / "train", root / "test"]
        if not all(part.is_dir() for part in parts):
            parts = [root]
        classes = sorted(path.name for path in parts[0].iterdir() if path.is_dir() and not path.name.startswith("."))
        found = [self._find(part, classes) for part in parts]
        if len(classes) < 2:
            raise DataError(f"the folder {parts[0]} holds {len(classes)} folder(s) of images: give one for each class")
        paths = [path for part in found for files in part for path in files]
        height, _, width = self.size.partition("x")
        size = (int(height), int(width or height)) if height else None
        x = torch.from_numpy(read_images(paths, size, self._channels(paths[0])))
        y = torch.tensor([label for part in found for label, files in enumerate(part) for _ in files])
        train = sum(map(len, found[0]))
        mean, std = own_norm(x[:train]) if self.norm == "own" else ((0.0,), (1.0,))
        return Dataset(self.text(), x, y, train, self.task, tuple(classes), mean, std)

    def _find(self, part: Path, classes: Sequence[str]) -> list[list[Path]]:
        stranger = {path.name for path in part.iterdir() if path.is_dir()} - set(classes)
        if any(image_files(part / name) for name in stranger):
            raise DataError(f"the folder {part} holds the class {min(stranger)!r}, which is not in the training set")
        found = [image_files(part / name) if (part / name).is_dir() else [] for name in classes]
        for name, files in zip(classes, found, strict=True):
            if not files and part.name != "test":
                raise DataError(f"the folder {part / name} holds no images")
        return found

    def _channels(self, first: Path) -> int:
        if self.channels != "auto":
            return int(self.channels)
        try:
            with Image.open(first) as image:
                return 1 if image.mode in ("1", "L", "LA") else 3
        except (UnidentifiedImageError, OSError) as error:
            raise DataError(f"the image {first} cannot be read: {error}") from None


class Npz(Source):
    """Your own arrays: an .npz file with x, y and, where there are natural clients, client."""

    name: ClassVar[str] = "npz"
    how_many: ClassVar[str] = "your own"
    shape: ClassVar[str] = "as x"
    class_count: ClassVar[str] = "your own"
    obtained: ClassVar[str] = "your own"
    citation: ClassVar[str] = "your own"
    positional: ClassVar[str | None] = "path"

    path: Path = Field(description="the file; images as [N, H, W] or [N, channels, H, W]")
    task: Task = Field("multiclass", description="what is to be predicted")
    norm: Literal["unit", "own"] = Field("unit", description="unit: pixels in [0, 1]; own: mean 0, deviation 1")

    def load(self, folder: Path, seed: int) -> Dataset:
        """Read the arrays."""
        path = self.path.expanduser()
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                arrays = {key: archive[key] for key in ("x", "y", "client") if key in archive}
        except FileNotFoundError:
            raise DataError(f"there is no file {path}") from None
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
            raise DataError(f"the file {path} cannot be read as an .npz of plain arrays: {error}") from None
        for key in ("x", "y"):
            if key not in arrays:
                raise DataError(f"the file {path} has no array {key!r}")
        counts = {key: len(np.atleast_1d(array)) for key, array in arrays.items()}
        if len(set(counts.values())) > 1 or arrays["y"].ndim != 1:
            raise DataError(f"the arrays of {path} must have one entry a sample, y in one dimension, not {counts}")
        x = self._inputs(arrays.pop("x"), path)
        y, classes = encode_labels(arrays["y"], self.task, str(path))
        owner = encode_owner(arrays["client"]) if "client" in arrays else None
        mean, std = own_norm(x) if self.norm == "own" else ((0.0,), (1.0,))
        return Dataset(self.text(), x, y, len(x), self.task, classes, mean, std, owner=owner)

    def _inputs(self, x: npt.NDArray[Any], path: Path) -> Tensor:
        if x.dtype != np.uint8:
            if not np.issubdtype(x.dtype, np.number) or np.issubdtype(x.dtype, np.complexfloating):
                raise DataError(f"the array 'x' of {path} holds {x.dtype}, not numbers")
            x = x.astype(np.float32)
            if not np.isfinite(x).all():
                raise DataError(f"a number in the array 'x' of {path} is missing or infinite")
        if x.ndim < 2:
            raise DataError(f"the array 'x' of {path} has shape {x.shape}, but needs a row a sample")
        return torch.from_numpy(x[:, None] if x.ndim == 3 else x)


class Table(Source):
    """Your own table: a CSV or Parquet file with a label column and, where there are natural clients, their column."""

    name: ClassVar[str] = "table"
    how_many: ClassVar[str] = "your own"
    shape: ClassVar[str] = "features"
    class_count: ClassVar[str] = "your own"
    obtained: ClassVar[str] = "your own"
    citation: ClassVar[str] = "your own"
    positional: ClassVar[str | None] = "path"

    path: Path = Field(description="the file")
    label: str = Field(description="the column to predict")
    client: str = Field("", description="the column that says whose a row is")
    drop: Texts = Field((), description="columns to leave out, as name+date")
    task: Task = Field("multiclass", description="what is to be predicted")
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
        owner = encode_owner(_plain(frame[self.client])) if self.client else None
        inputs = frame.drop(columns=[self.label, *([self.client] if self.client else []), *self.drop])
        x, numeric, features = self._features(inputs, path)
        mean, std = [0.0] * x.shape[1], [1.0] * x.shape[1]
        if self.norm == "own":
            means, stds = own_norm(x)
            mean = [value if number else 0.0 for value, number in zip(means, numeric, strict=True)]
            std = [value if number else 1.0 for value, number in zip(stds, numeric, strict=True)]
        norm = (tuple(mean), tuple(std))
        return Dataset(self.text(), x, y, len(x), self.task, classes, *norm, owner=owner, features=tuple(features))

    def _read(self, path: Path) -> pd.DataFrame:
        ending = path.suffix.lower()
        if ending not in (".csv", ".parquet"):
            raise DataError(f"the table {path} is neither .csv nor .parquet")
        if not path.is_file():
            raise DataError(f"there is no file {path}")
        try:
            frame = pd.read_csv(path) if ending == ".csv" else pd.read_parquet(path)
        except (OSError, ValueError, pd.errors.ParserError) as error:
            raise DataError(f"the table {path} cannot be read: {error}") from None
        frame.columns = [str(column) for column in frame.columns]
        if frame.columns.duplicated().any():
            raise DataError(f"the table {path} has two columns of one name")
        return frame

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
