"""Rows on the device that computes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from coterie.rows.backends.base import Backend, RowIndex


class DeviceBackend(Backend):
    """The matrix as one tensor on the device that computes."""

    def __init__(self, count: int, initial_row: Tensor) -> None:
        super().__init__(count, initial_row)
        self._matrix = initial_row.expand(self.shape).clone(memory_format=torch.contiguous_format)
        self._changed = np.zeros(count, dtype=np.bool_)  # on the host, where whoever writes knows the rows

    def gather(self, index: RowIndex) -> Tensor:
        return self._matrix.index_select(0, index.on_device)

    def write(self, index: RowIndex, values: Tensor) -> None:
        self._matrix.index_copy_(0, index.on_device, values)
        self._changed[index.on_host.numpy()] = True

    def changed(self) -> Tensor:
        return torch.from_numpy(np.flatnonzero(self._changed))

    def reset(self, initial_row: Tensor) -> None:
        self.initial_row = initial_row.clone()
        self._matrix.copy_(initial_row.expand(self.shape))
        self._changed[:] = False

    def gather_to_host(self, index: Tensor) -> Tensor:
        numbers = index.numpy()
        if not len(numbers) or not (np.diff(numbers) == 1).all():
            return super().gather_to_host(index)
        return self._matrix[int(numbers[0]) : int(numbers[-1]) + 1].cpu()  # once all were written: as they lie

    def blocks(self, rows: int, first: int = 0) -> Iterator[Tensor]:
        yield from self._matrix[first:].split(rows)  # views

    def device_tensor(self) -> Tensor | None:
        return self._matrix
