"""What backends away from the device have in common: rows travel by a thread, some before they are asked for."""

from __future__ import annotations

import abc
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from coterie.rows._transfers import PendingRows, Transfers
from coterie.rows.backends.base import Backend, RowIndex


@dataclass
class _Prefetched:
    """Rows that were fetched before they were asked for, and what has been written over them since."""

    index: RowIndex
    rows: PendingRows
    written: list[tuple[RowIndex, Tensor]] = field(default_factory=list)


class OffDeviceBackend(Backend):
    """Rows that do not lie on the device that computes.

    Everything that touches the storage or ``_written`` runs in the thread of ``transfers``, in the order in which it
    was submitted; so a row that is gathered after it was written is the new one, although neither call waits.

    Parameters
    ----------
    count
        How many rows.
    initial_row
        What all of them are at the start.
    transfers
        Moves them to and from the device.

    Attributes
    ----------
    gathered
        Whether rows were gathered since the placement last set this to false, at the begin of a round.
    gathered_last_round
        Whether they were in the last round, so that they probably will be in the next.
    """

    def __init__(self, count: int, initial_row: Tensor, transfers: Transfers) -> None:
        super().__init__(count, initial_row)
        self.transfers = transfers
        transfers.reserve_buffers(self.row_bytes)
        self.gathered = self.gathered_last_round = False
        self._host_initial_row = self.initial_row.cpu()
        self._written = torch.zeros(count, dtype=torch.bool)
        self._prefetched: list[_Prefetched] = []

    @abc.abstractmethod
    def read_storage(self, index: Tensor, positions: Tensor, out: Tensor) -> None:
        """Read rows that were written before into these positions of ``out``; all on the host."""

    @abc.abstractmethod
    def write_storage(self, index: Tensor, values: Tensor) -> None:
        """Write rows; all on the host."""

    # Called by the transfer thread.

    def read_rows(self, index: Tensor, out: Tensor) -> None:
        """Read any rows into ``out``, on the host."""
        written = self._written[index]
        positions = written.nonzero().squeeze(1)
        if len(positions) < len(index):
            out[~written] = self._host_initial_row
        if len(positions):
            self.read_storage(index[positions], positions, out)

    def write_rows(self, index: Tensor, values: Tensor) -> None:
        """Write rows from the host."""
        self.write_storage(index, values)
        self._written[index] = True

    # Called by everybody else.

    def gather(self, index: RowIndex) -> Tensor:
        self.gathered = True
        for prefetched in self._prefetched:
            position, there = index.find_in(prefetched.index)
            if not bool(there.all()):
                continue
            rows = self._wait_for(prefetched.rows)
            if torch.equal(index.on_host, prefetched.index.on_host):
                self._prefetched.remove(prefetched)  # nobody else will want them: they need not be copied
            else:
                rows = rows.index_select(0, position.to(rows.device))
            for written, values in prefetched.written:
                source, over = index.find_in(written)
                if bool(over.any()):
                    target, source = over.nonzero().squeeze(1).to(rows.device), source[over].to(rows.device)
                    rows.index_copy_(0, target, values.index_select(0, source))
            return rows
        return self._wait_for(self._fetch(index))

    def _fetch(self, index: RowIndex) -> PendingRows:
        return self.transfers.submit(partial(self.transfers.fetch, self, index.on_host))

    def _wait_for(self, rows: PendingRows) -> Tensor:
        out, arrived = rows.result()
        if arrived is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(arrived)
            # They were allocated on the transfers' stream: without this their memory could be used again there while
            # this stream still reads it.
            out.record_stream(stream)
        return out

    def write(self, index: RowIndex, values: Tensor) -> None:
        for prefetched in self._prefetched:
            prefetched.written.append((index, values))
        self.transfers.write_back(self, index.on_host, values)

    def prefetch(self, index: RowIndex) -> None:
        """Have rows fetched that will be asked for; the index increases."""
        self._prefetched.append(_Prefetched(index, self._fetch(index)))

    def drop_prefetched(self, keep: RowIndex | None = None) -> None:
        """Drop rows that were fetched and not asked for, but for those of exactly this index."""
        self._prefetched = [
            prefetched
            for prefetched in self._prefetched
            if keep is not None and torch.equal(prefetched.index.on_host, keep.on_host)
        ]

    def blocks(self, rows: int, first: int = 0) -> Iterator[Tensor]:
        pending: PendingRows | None = None
        for begin in range(first, self.shape[0], rows):
            following = self._fetch(self.index_range(begin, begin + rows))  # while the block before it is used
            if pending is not None:
                yield self._wait_for(pending)
            pending = following
        if pending is not None:
            yield self._wait_for(pending)

    def changed(self) -> Tensor:
        return self.transfers.submit(lambda: self._written.nonzero().squeeze(1)).result()

    def reset(self, initial_row: Tensor) -> None:
        self.drop_prefetched()

        def reset() -> None:
            self.initial_row, self._host_initial_row = initial_row.clone(), initial_row.cpu()
            self._written.zero_()

        self.transfers.submit(reset).result()

    def write_from_host(self, index: Tensor, values: Tensor) -> None:
        self.transfers.submit(partial(self.write_rows, index, values)).result()

    def gather_to_host(self, index: Tensor) -> Tensor:
        def read() -> Tensor:
            out = torch.empty((len(index), *self.shape[1:]), dtype=self.dtype)
            self.read_rows(index, out)
            return out

        return self.transfers.submit(read).result()
