"""Rows on the device that computes."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from coterie.rows.backends.base import Backend, RowIndex


class DeviceBackend(Backend):
    """The matrix as one tensor on the device that computes."""

    def __init__(self, count: int, initial_row: Tensor) -> None:
        super().__init__(count, initial_row)
        self._matrix = initial_row.expand(self.shape).clone(memory_format=torch.contiguous_format)
        self._changed = torch.zeros(count, dtype=torch.bool, device=self.device)

    def gather(self, index: RowIndex) -> Tensor:
        return self._matrix.index_select(0, index.on_device)

    def write(self, index: RowIndex, values: Tensor) -> None:
        self._matrix.index_copy_(0, index.on_device, values)
        self._changed.index_fill_(0, index.on_device, True)

    def changed(self) -> Tensor:
        return self._changed.cpu().nonzero().squeeze(1)

    def reset(self, initial_row: Tensor) -> None:
        self.initial_row = initial_row.clone()
        self._matrix.copy_(initial_row.expand(self.shape))
        self._changed.zero_()

    def blocks(self, rows: int, first: int = 0) -> Iterator[Tensor]:
        yield from self._matrix[first:].split(rows)  # views

    def device_tensor(self) -> Tensor | None:
        return self._matrix
