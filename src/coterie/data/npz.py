"""The user's own arrays: an ``.npz`` file."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from coterie.data._user_data import UserSource, count_owners, encode_labels, encode_owner, with_statistics
from coterie.data.dataset import Dataset, Preparation
from coterie.errors import DataError
from coterie.tasks import TaskName


class NpzSource(UserSource):
    """Your own arrays: an .npz file with x, y and, where there are natural clients, client."""

    name: ClassVar[str] = "npz"
    shape: ClassVar[str] = "as x"
    positional: ClassVar[str | None] = "path"

    path: Path = Field(description="the file; images as [N, H, W] or [N, channels, H, W]")
    client: str = Field("client", description="the array that says whose a sample is")
    task: TaskName = Field("multiclass", description="what is to be predicted")
    norm: Literal["unit", "own"] = Field("unit", description="unit: pixels in [0, 1]; own: mean 0, deviation 1")

    words: bool = Field(False, description="x holds numbers of words (integers), which reach the model as they are")
    series: bool = Field(False, description="x is [N, times, features], not images: samples reach the model so")

    def load(self, folder: Path, seed: int) -> Dataset:
        """Read the arrays."""
        path = self.path.expanduser()
        arrays = self._arrays(path, "x", "y", self.client)
        for key in ("x", "y", *(["client"] if self.client != "client" else [])):
            if key not in arrays:
                raise DataError(f"the file {path} has no array {self.client if key == 'client' else key!r}")
        counts = {key: len(np.atleast_1d(array)) for key, array in arrays.items()}
        if len(set(counts.values())) > 1 or arrays["y"].ndim != 1:
            raise DataError(
                f"the arrays of {path} must have one entry for each sample, and y one dimension, but have {counts}"
            )
        x = self._inputs(arrays.pop("x"), path)
        y, classes = encode_labels(arrays["y"], self.task, str(path))
        owner, names = encode_owner(arrays["client"], str(path)) if "client" in arrays else (None, ())
        if self.words and self.norm == "own":
            raise DataError("norm=own does not fit words=true: numbers of words are not normalised")
        if self.series and self.norm == "own":
            raise DataError("norm=own does not fit series=true: it would scale times, not features; scale x beforehand")
        preparation = Preparation((True,) * x.shape[1]) if self.norm == "own" else None
        known: dict[str, Any] = {"owner": owner, "owner_names": names, "preparation": preparation}
        return with_statistics(Dataset(self.text(), x, y, len(x), self.task, classes, (0.0,), (1.0,), **known))

    def owners(self) -> dict[str, int] | None:
        """Read the owners alone."""
        path = self.path.expanduser()
        found = self._arrays(path, self.client).get("client") if path.exists() else None
        return None if found is None else count_owners(*encode_owner(np.atleast_1d(found), str(path)))

    def _arrays(self, path: Path, *wanted: str) -> dict[str, npt.NDArray[Any]]:
        try:
            with path.open("rb") as file, np.load(file, allow_pickle=False) as archive:
                return {"client" if key == self.client else key: archive[key] for key in wanted if key in archive}
        except FileNotFoundError:
            raise DataError(f"there is no file {path}") from None
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError, TypeError) as error:
            raise DataError(f"the file {path} cannot be read as an .npz of plain arrays: {error}") from None

    def _inputs(self, x: npt.NDArray[Any], path: Path) -> Tensor:
        if self.words and self.series:
            raise DataError("words=true and series=true exclude each other: x holds numbers of words, or measurements")
        if self.words:
            if not np.issubdtype(x.dtype, np.integer) or x.ndim < 2 or x.min() < 0:
                raise DataError(f"the array 'x' of {path} must hold numbers of words from 0 on, a row for each sample")
            return torch.from_numpy(x.astype(np.int64))
        if x.dtype != np.uint8:
            if not np.issubdtype(x.dtype, np.number) or np.issubdtype(x.dtype, np.complexfloating):
                raise DataError(f"the array 'x' of {path} holds {x.dtype}, not numbers")
            x = x.astype(np.float32)
            if not np.isfinite(x).all():
                raise DataError(f"a number in the array 'x' of {path} is missing or infinite")
        if x.ndim < 2:
            raise DataError(f"the array 'x' of {path} has shape {x.shape}, but needs one row for each sample")
        if self.series and x.ndim != 3:
            raise DataError(f"the array 'x' of {path} has shape {x.shape}, but series=true needs [N, times, features]")
        return torch.from_numpy(x[:, None] if x.ndim == 3 and not self.series else x)
