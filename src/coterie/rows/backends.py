"""Where the rows of a matrix lie: nowhere yet, or on the device that computes; other places are the engines' matter."""

from __future__ import annotations

import abc
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from coterie.errors import AlgorithmError
from coterie.rows.distributed import Ranks


class RowIndex:
    """Which rows: their numbers on the device and, once they are needed there, on the host.

    Parameters
    ----------
    here
        Row numbers ``[rows]``, on the device that computes.
    host
        The same on the host, where they are known.
    """

    __slots__ = ("_host", "here")

    def __init__(self, here: Tensor, host: Tensor | None = None) -> None:
        self.here, self._host = here, host

    def __len__(self) -> int:
        return len(self.here)

    @property
    def host(self) -> Tensor:
        """The numbers on the host."""
        if self._host is None:
            self._host = self.here.cpu()
        return self._host

    def within(self, more: RowIndex) -> tuple[Tensor, Tensor]:
        """Find these rows among others.

        Parameters
        ----------
        more
            Rows in increasing order.

        Returns
        -------
        tuple of Tensor
            On the host, for each row a place among the others, and whether it is that row's.
        """
        if not len(more):
            return torch.zeros_like(self.host), torch.zeros_like(self.host, dtype=torch.bool)
        place = torch.searchsorted(more.host, self.host).clamp_max_(len(more) - 1)
        return place, more.host[place] == self.host


class Backend(abc.ABC):
    """Where the rows of one matrix lie.

    Parameters
    ----------
    count
        How many rows.
    opening
        What all of them are at the start ``[...]``, on the device that computes.
    """

    def __init__(self, count: int, opening: Tensor) -> None:
        self.opening = opening.detach().clone(memory_format=torch.contiguous_format)
        self.shape = (count, *opening.shape)
        self.dtype, self.device = opening.dtype, opening.device
        self.readers: list[weakref.ref[Any]] = []  # those that read from it, and must not see it change
        self.ranks: Ranks | None = None  # those over which the rows are spread, if they are

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.opening.nbytes

    @abc.abstractmethod
    def gather(self, chosen: RowIndex) -> Tensor:
        """Give some rows.

        Parameters
        ----------
        chosen
            Which.

        Returns
        -------
        Tensor
            A copy on the device that computes.
        """

    @abc.abstractmethod
    def write(self, chosen: RowIndex, values: Tensor) -> None:
        """Replace some rows.

        Parameters
        ----------
        chosen
            Which, each once.
        values
            What to put there, on the device that computes; it must not change any more.
        """

    @abc.abstractmethod
    def changed(self) -> Tensor:
        """Say which rows have ever been written.

        Returns
        -------
        Tensor
            Their numbers on the host, in increasing order; all others are the opening row.
        """

    @abc.abstractmethod
    def reset(self, opening: Tensor) -> None:
        """Set all rows to one.

        Parameters
        ----------
        opening
            The row, on the device that computes.
        """

    def blocks(self, rows: int, first: int = 0) -> Iterator[Tensor]:
        """Give rows, block after block.

        Parameters
        ----------
        rows
            Rows in a block.
        first
            Where to begin.

        Yields
        ------
        Tensor
            Consecutive rows on the device that computes, which must not be changed.
        """
        for begin in range(first, self.shape[0], rows):
            yield self.gather(self.span(begin, begin + rows))

    def own_blocks(self, rows: int) -> Iterator[tuple[RowIndex, Tensor]]:
        """Give the rows that lie with this process, block after block.

        Parameters
        ----------
        rows
            Rows in a block.

        Yields
        ------
        tuple
            Which rows, in increasing order, and the rows on the device that computes, which must not be changed.
        """
        begin = 0
        for block in self.blocks(rows):
            yield self.span(begin, begin + len(block)), block
            begin += len(block)

    def own(self, chosen: RowIndex) -> Tensor:
        """Give some of the rows that lie with this process; see :meth:`gather`.

        Parameters
        ----------
        chosen
            Which.

        Returns
        -------
        Tensor
            A copy on the device that computes.
        """
        return self.gather(chosen)

    def anybody(self, flag: bool) -> bool:
        """Say whether something holds for any of the processes over which the rows are spread.

        Parameters
        ----------
        flag
            Whether it holds for this one.

        Returns
        -------
        bool
            The same for all of them.
        """
        return flag

    def span(self, begin: int, end: int) -> RowIndex:
        """Choose consecutive rows.

        Parameters
        ----------
        begin
            The first.
        end
            One past the last; there may be fewer.

        Returns
        -------
        Chosen
            Their numbers.
        """
        host = torch.arange(begin, min(end, self.shape[0]))
        return RowIndex(host.to(self.device), host)

    def fill(self, index: Tensor, values: Tensor) -> None:
        """Replace some rows from the host.

        Parameters
        ----------
        index
            Which, on the host.
        values
            What to put there, on the host.
        """
        self.write(RowIndex(index.to(self.device), index), values.to(self.device))

    def whole(self) -> Tensor | None:
        """Give the matrix itself, where it lies on the device that computes.

        Returns
        -------
        Tensor or None
            Not a copy: it must not be changed.
        """
        return None

    def on_host(self, index: Tensor) -> Tensor:
        """Give some rows on the host.

        Parameters
        ----------
        index
            Which, on the host.

        Returns
        -------
        Tensor
            A copy.
        """
        return self.gather(RowIndex(index.to(self.device), index)).cpu()


class InitialBackend(Backend):
    """Takes no room: rows that are all alike, until it is known where they are to lie."""

    def gather(self, chosen: RowIndex) -> Tensor:
        """Repeat the row; see :meth:`Backend.gather`."""
        return self.opening.expand(len(chosen), *self.shape[1:]).clone()

    def write(self, chosen: RowIndex, values: Tensor) -> None:
        """Refuse; see :meth:`Backend.write`."""
        raise AlgorithmError("rows were changed for good before it was known where they are kept")

    def changed(self) -> Tensor:
        """None were; see :meth:`Backend.changed`."""
        return torch.zeros(0, dtype=torch.int64)

    def reset(self, opening: Tensor) -> None:
        """Take another row; see :meth:`Backend.reset`."""
        self.opening = opening.clone()


class DeviceBackend(Backend):
    """The matrix as one tensor on the device that computes."""

    def __init__(self, count: int, opening: Tensor) -> None:
        super().__init__(count, opening)
        self._base = opening.expand(self.shape).clone(memory_format=torch.contiguous_format)
        self._changed = torch.zeros(count, dtype=torch.bool, device=self.device)

    def gather(self, chosen: RowIndex) -> Tensor:
        """Index; see :meth:`Backend.gather`."""
        return self._base.index_select(0, chosen.here)

    def write(self, chosen: RowIndex, values: Tensor) -> None:
        """Copy in; see :meth:`Backend.write`."""
        self._base.index_copy_(0, chosen.here, values)
        self._changed.index_fill_(0, chosen.here, True)

    def changed(self) -> Tensor:
        """See :meth:`Backend.changed`."""
        return self._changed.cpu().nonzero().squeeze(1)

    def reset(self, opening: Tensor) -> None:
        """Fill; see :meth:`Backend.reset`."""
        self.opening = opening.clone()
        self._base.copy_(opening.expand(self.shape))
        self._changed.zero_()

    def blocks(self, rows: int, first: int = 0) -> Iterator[Tensor]:
        """Give views; see :meth:`Backend.blocks`."""
        yield from self._base[first:].split(rows)

    def whole(self) -> Tensor | None:
        """Give the tensor; see :meth:`Backend.whole`."""
        return self._base
