"""The 1,797 handwritten digits that come with scikit-learn."""

from __future__ import annotations

import gzip
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from coterie.data.dataset import Dataset, Source

_PLACE = "data/digits.csv.gz"


class Digits(Source):
    """Handwritten digits of 8x8 pixels, embedded in scikit-learn: no download."""

    name: ClassVar[str] = "digits"
    how_many: ClassVar[str] = "1,797"
    shape: ClassVar[str] = "1x8x8"
    class_count: ClassVar[str] = "10"
    obtained: ClassVar[str] = "built in"
    drawn: ClassVar[bool] = False
    citation: ClassVar[str] = (
        "E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998"
    )

    def load(self, folder: Path, seed: int) -> Dataset:
        """Read the digits; pixels 0..16 become 0..1."""
        pixels, labels = _embedded()
        x = torch.from_numpy(np.asarray(pixels, dtype=np.float32) / 16.0).reshape(-1, 1, 8, 8)
        y = torch.from_numpy(np.asarray(labels, dtype=np.int64))
        return Dataset(self.text(), x, y, len(x), "multiclass", tuple("0123456789"), (0.0,), (1.0,))


def _embedded() -> tuple[NDArray[Any], NDArray[Any]]:
    """Read scikit-learn's file without scikit-learn, which takes a second to import: a fifth of a short run."""
    found = find_spec("sklearn")
    path = None if found is None or found.origin is None else Path(found.origin).with_name("datasets") / _PLACE
    if path is None or not path.is_file():  # a version that keeps it elsewhere knows where
        from sklearn.datasets import load_digits

        pixels, labels = load_digits(return_X_y=True)
        return pixels, labels
    with gzip.open(path, "rt", encoding="ascii") as lines:
        table = np.loadtxt(lines, delimiter=",", dtype=np.float64)
    return table[:, :-1], table[:, -1]
