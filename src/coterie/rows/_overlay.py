"""Rows that stand over those of a backend: what a client matrix is made of, and how they are committed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.rows.backends.base import Backend, RowIndex
from coterie.rows.host_copies import to_device


@dataclass(frozen=True, slots=True)
class Patch:
    """Some rows, and which they are, in increasing order."""

    index: RowIndex
    rows: Tensor

    def over(self, older: Patch) -> Patch:
        """Put this patch over an older one: where both have a row, this one's counts."""
        if torch.equal(older.index.on_host, self.index.on_host):
            return self
        left = (~older.index.find_in(self.index)[1]).nonzero().squeeze(1)
        numbers = torch.cat([older.index.on_host[left], self.index.on_host])
        order = numbers.argsort()
        device = older.rows.device
        rows = torch.cat([older.rows[to_device(left, device)], self.rows])[to_device(order, device)]
        return Patch(RowIndex.from_host(numbers[order], rows.device), rows)


class Overlay:
    """One version of a matrix: a backend, and the patch that stands over it."""

    __slots__ = ("__weakref__", "backend", "patch")

    def __init__(self, backend: Backend, patch: Patch | None = None) -> None:
        self.backend, self.patch = backend, patch
        backend.overlays.add(self)

    def gather(self, index: RowIndex, local: bool = False) -> Tensor:
        """Copy some rows; if ``local``, all of them lie with this process."""
        gather = self.backend.gather_local if local else self.backend.gather
        if self.patch is None:
            return gather(index)
        position, patched = index.find_in(self.patch.index)
        if bool(patched.all()):
            return self.patch.rows.index_select(0, to_device(position, self.backend.device))
        out = gather(index)
        if bool(patched.any()):
            over = to_device(position[patched], self.backend.device)
            places = to_device(patched.nonzero().squeeze(1), out.device)
            out.index_copy_(0, places, self.patch.rows.index_select(0, over))
        return out

    def blocks(self, rows: int, begin: int) -> Iterator[Tensor]:
        for block in self.backend.blocks(rows, begin):
            end = begin + len(block)
            if self.patch is not None:
                low, high = torch.searchsorted(self.patch.index.on_host, torch.tensor([begin, end])).tolist()
                if low < high:
                    block = block.clone()
                    block.index_copy_(0, self.patch.index.on_device[low:high] - begin, self.patch.rows[low:high])
            yield block
            begin = end

    def local_blocks(self, rows: int) -> Iterator[tuple[RowIndex, Tensor]]:
        for index, block in self.backend.local_blocks(rows):
            if self.patch is not None:
                position, patched = index.find_in(self.patch.index)
                if bool(patched.any()):
                    over = self.patch.rows.index_select(0, position[patched].to(self.backend.device))
                    block = block.index_copy(0, patched.nonzero().squeeze(1).to(block.device), over)
            yield index, block

    def commit(self) -> None:
        """Write the patch to the backend; may be stopped anywhere and called again."""
        backend, patch = self.backend, self.patch
        if patch is None:
            return
        others = [other for other in backend.overlays if other is not self]
        # Asked of all processes: how long an old version lives may differ between them, and gathering is a collective.
        if backend.any_process(bool(others)):
            old = Patch(patch.index, backend.gather(patch.index))
            for other in others:
                # What another version has over these rows already is what it must go on to show.
                other.patch = old if other.patch is None else other.patch.over(old)
        backend.write(patch.index, patch.rows)
        self.patch = None
