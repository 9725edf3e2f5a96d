"""Rows that stand over those of a shelf: what a kept matrix is made of."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor

from coterie.rows.shelves import Chosen, Shelf


class Held:
    """What a :class:`~coterie.rows.kept.Kept` matrix is made of: a shelf, and rows that stand over the shelf's.

    Parameters
    ----------
    shelf
        The shelf.
    chosen
        Which rows stand over it, in increasing order.
    values
        They.
    """

    __slots__ = ("__weakref__", "chosen", "shelf", "values")

    def __init__(self, shelf: Shelf, chosen: Chosen | None = None, values: Tensor | None = None) -> None:
        self.shelf, self.chosen, self.values = shelf, chosen, values
        shelf.readers = [reader for reader in shelf.readers if reader() is not None]
        shelf.readers.append(weakref.ref(self))

    def take(self, chosen: Chosen, own: bool = False) -> Tensor:
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
        gather = self.shelf.own if own else self.shelf.gather
        if self.chosen is None or self.values is None:
            return gather(chosen)
        place, mine = chosen.within(self.chosen)
        if bool(mine.all()):
            return self.values.index_select(0, place.to(self.shelf.device))
        out = gather(chosen)
        if bool(mine.any()):
            over = place[mine].to(self.shelf.device)
            out.index_copy_(0, mine.nonzero().squeeze(1).to(out.device), self.values.index_select(0, over))
        return out

    def blocks(self, rows: int, begin: int) -> Iterator[Tensor]:
        """Give rows, block after block; see :meth:`Shelf.blocks`.

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
        for block in self.shelf.blocks(rows, begin):
            end = begin + len(block)
            if self.chosen is not None and self.values is not None:
                low, high = torch.searchsorted(self.chosen.host, torch.tensor([begin, end])).tolist()
                if low < high:
                    block = block.clone()
                    block.index_copy_(0, self.chosen.here[low:high] - begin, self.values[low:high])
            yield block
            begin = end

    def own_blocks(self, rows: int) -> Iterator[tuple[Chosen, Tensor]]:
        """Give the rows that lie with this process; see :meth:`Shelf.own_blocks`.

        Parameters
        ----------
        rows
            Rows in a block.

        Yields
        ------
        tuple
            Which rows, and the rows, which must not be changed.
        """
        for chosen, block in self.shelf.own_blocks(rows):
            if self.chosen is not None and self.values is not None:
                place, mine = chosen.within(self.chosen)
                if bool(mine.any()):
                    over = self.values.index_select(0, place[mine].to(self.shelf.device))
                    block = block.index_copy(0, mine.nonzero().squeeze(1).to(block.device), over)
            yield chosen, block


def joined(below: tuple[Chosen, Tensor], above: tuple[Chosen, Tensor]) -> tuple[Chosen, Tensor]:
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
    return Chosen(host.to(values.device), host), values
