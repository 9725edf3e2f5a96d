"""The 1,797 handwritten digits that come with scikit-learn."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from coterie.data.dataset import Dataset, Source


class Digits(Source):
    """Handwritten digits of 8x8 pixels, embedded in scikit-learn: no download."""

    name: ClassVar[str] = "digits"
    how_many: ClassVar[str] = "1,797"
    shape: ClassVar[str] = "1x8x8"
    class_count: ClassVar[str] = "10"
    obtained: ClassVar[str] = "built in"
    citation: ClassVar[str] = (
        "E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998"
    )

    def load(self, folder: Path, seed: int) -> Dataset:
        """Read the digits; pixels 0..16 become 0..1."""
        from sklearn.datasets import load_digits  # takes a second to import

        pixels, labels = load_digits(return_X_y=True)
        x = torch.from_numpy(np.asarray(pixels, dtype=np.float32) / 16.0).reshape(-1, 1, 8, 8)
        y = torch.from_numpy(np.asarray(labels, dtype=np.int64))
        return Dataset(self.text(), x, y, len(x), "multiclass", tuple("0123456789"), (0.0,), (1.0,))
