"""How ranks divide large products: by rows where these are spread over them, else by columns."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from coterie.rows._collectives import RowsPart
from coterie.rows.matrix import ClientMatrix

if TYPE_CHECKING:
    from coterie.rows.distributed.ranks import Ranks

_SLICE_ELEMENTS = 2**26  # of the columns of all rows that a rank holds at once


class RankCollectives:
    """The :class:`~coterie.rows._collectives.Collectives` of a sharded run."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    @property
    def size(self) -> int:
        return self.ranks.count

    def pays(self, multiplications: int) -> bool:
        return self.ranks.count > 1 and multiplications >= self.ranks.worth

    def takes(self, number: int) -> bool:
        return number % self.ranks.count == self.ranks.rank

    def sum(self, value: Tensor) -> Tensor:
        return self.ranks.sum(value)

    def sum_rows(self, rows: Tensor, out: Tensor, part: RowsPart) -> Tensor:
        assert isinstance(rows, ClientMatrix)
        for index, block in rows.local_blocks():
            out += part(index.on_device, block)
        return self.ranks.sum(out)

    def map_rows(self, rows: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        assert isinstance(rows, ClientMatrix)
        found = [part(block) for _, block in rows.local_blocks()]
        if not found:  # a rank without clients still says what type and shape a result has
            found = [part(rows.backend.initial_row.new_empty((0, *rows.shape[1:])))]
        return self.ranks.collect(torch.cat(found), self.ranks.owner(torch.arange(len(rows))))

    def sum_columns(self, rows: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        assert isinstance(rows, ClientMatrix)
        count, size = rows.shape
        empty = torch.empty(0, size, dtype=rows.dtype, device=rows.device)
        own = torch.cat([empty, *(block for _, block in rows.local_blocks())])
        width = max(1, min(-(-size // self.ranks.count), _SLICE_ELEMENTS // max(1, count)))
        out: Tensor | None = None
        for begin in range(0, max(1, size), width * self.ranks.count):
            found = part(self.ranks.exchange_columns(own, count, begin, width))
            out = found if out is None else out.add_(found)
        assert out is not None
        return self.ranks.sum(out)

    def sum_slices(self, part: Callable[[slice], Tensor], columns: int) -> Tensor:
        return self.ranks.sum(part(slice(*self.ranks.column_bounds(columns)[self.ranks.rank])))

    def join_slices(self, part: Callable[[slice], Tensor], columns: int) -> Tensor:
        bounds = self.ranks.column_bounds(columns)
        own = part(slice(*bounds[self.ranks.rank])).contiguous()
        pieces = [
            own if rank == self.ranks.rank else own.new_empty(len(own), end - begin)
            for rank, (begin, end) in enumerate(bounds)
        ]
        return torch.cat(self.ranks.all_gather(pieces), 1)
