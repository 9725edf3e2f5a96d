"""The backend of a matrix that no place has been chosen for yet."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.errors import AlgorithmError
from coterie.rows.backends.base import Backend, RowIndex


class InitialBackend(Backend):
    """One row that stands for all: takes no room until it is known where the matrix is to lie."""

    def gather(self, index: RowIndex) -> Tensor:
        return self.initial_row.expand(len(index), *self.shape[1:]).clone()

    def write(self, index: RowIndex, values: Tensor) -> None:
        raise AlgorithmError("rows were committed before it was known where they are kept")

    def changed(self) -> Tensor:
        return torch.zeros(0, dtype=torch.int64)

    def reset(self, initial_row: Tensor) -> None:
        self.initial_row = initial_row.clone()
