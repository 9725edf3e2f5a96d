"""Rows in the host's memory."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from coterie.rows._transfers import Transfers
from coterie.rows.backends.off_device import OffDeviceBackend


class HostBackend(OffDeviceBackend):
    """Rows in the host's memory, of which the operating system hands out only what is written."""

    def __init__(self, count: int, initial_row: Tensor, transfers: Transfers) -> None:
        super().__init__(count, initial_row, transfers)
        empty = np.zeros((count, max(1, self.row_bytes)), np.uint8)  # not torch.zeros, which writes all of it
        self._matrix = torch.from_numpy(empty)[:, : self.row_bytes].view(self.dtype).view(self.shape)

    def read_storage(self, index: Tensor, positions: Tensor, out: Tensor) -> None:
        if len(positions) == len(out):
            torch.index_select(self._matrix, 0, index, out=out)
        else:
            out.index_copy_(0, positions, self._matrix.index_select(0, index))

    def write_storage(self, index: Tensor, values: Tensor) -> None:
        self._matrix.index_copy_(0, index, values)
