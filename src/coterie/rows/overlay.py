"""Rows that stand over those of a backend: what a kept matrix is made of."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from coterie.rows.backends import Backend, RowIndex


class Overlay:
    """What a :class:`~coterie.rows.matrix.ClientMatrix` is made of: a backend, and rows that stand over the backend's.

    Parameters
    ----------
    backend
        The backend.
    chosen
        Which rows stand over it, in increasing order.
    values
        They.
    """

    __slots__ = ("__weakref__", "backend", "chosen", "values")

    def __init__(self, backend: Backend, chosen: RowIndex | None = None, values: Tensor | None = None) -> None:
        self.backend, self.chosen, self.values = backend, chosen, values
        backend.readers = [reader for reader in backend.readers if reader() is not None]
        backend.readers.append(weakref.ref(self))

    def take(self, chosen: RowIndex, own: bool = False) -> Tensor:
        """Give some rows.

        Parameters
        ----------
        chosen
            Which.
        own
            Whether all of them lie with this process.

        Returns
        -------
        Tensor
            A copy.
        """
        gather = self.backend.own if own else self.backend.gather
        if self.chosen is None or self.values is None:
            return gather(chosen)
        place, mine = chosen.within(self.chosen)
        if bool(mine.all()):
            return self.values.index_select(0, place.to(self.backend.device))
        out = gather(chosen)
        if bool(mine.any()):
            over = place[mine].to(self.backend.device)
            out.index_copy_(0, mine.nonzero().squeeze(1).to(out.device), self.values.index_select(0, over))
        return out

    def blocks(self, rows: int, begin: int) -> Iterator[Tensor]:
        """Give rows, block after block; see :meth:`Backend.blocks`.

        Parameters
        ----------
        rows
            Rows in a block.
        begin
            Where to begin.

        Yields
        ------
        Tensor
            Consecutive rows, which must not be changed.
        """
        for block in self.backend.blocks(rows, begin):
            end = begin + len(block)
            if self.chosen is not None and self.values is not None:
                low, high = torch.searchsorted(self.chosen.host, torch.tensor([begin, end])).tolist()
                if low < high:
                    block = block.clone()
                    block.index_copy_(0, self.chosen.here[low:high] - begin, self.values[low:high])
            yield block
            begin = end

    def own_blocks(self, rows: int) -> Iterator[tuple[RowIndex, Tensor]]:
        """Give the rows that lie with this process; see :meth:`Backend.own_blocks`.

        Parameters
        ----------
        rows
            Rows in a block.

        Yields
        ------
        tuple
            Which rows, and the rows, which must not be changed.
        """
        for chosen, block in self.backend.own_blocks(rows):
            if self.chosen is not None and self.values is not None:
                place, mine = chosen.within(self.chosen)
                if bool(mine.any()):
                    over = self.values.index_select(0, place[mine].to(self.backend.device))
                    block = block.index_copy(0, mine.nonzero().squeeze(1).to(block.device), over)
            yield chosen, block


def joined(below: tuple[RowIndex, Tensor], above: tuple[RowIndex, Tensor]) -> tuple[RowIndex, Tensor]:
    """Put one patch over another.

    Parameters
    ----------
    below
        Which rows the older one has, and they.
    above
        The same of the newer one.

    Returns
    -------
    tuple
        The same of both together.
    """
    (old, old_values), (new, new_values) = below, above
    if torch.equal(old.host, new.host):
        return above
    left = (~old.within(new)[1]).nonzero().squeeze(1)
    host = torch.cat([old.host[left], new.host])
    order = host.argsort()
    values = torch.cat([old_values[left.to(old_values.device)], new_values])[order.to(old_values.device)]
    host = host[order]
    return RowIndex(host.to(values.device), host), values
