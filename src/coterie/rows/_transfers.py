"""Moves rows between the device that computes and the backends away from it.

:class:`Transfers` works in one thread, in the order in which jobs were submitted: what a round has committed is there
for whoever reads next although nobody waited for it, and the next cohort's rows are fetched while this one trains. To
and from a GPU, rows go through two buffers of pinned memory, on a stream of their own: while one buffer is copied to or
from the device, the other is filled or emptied.
"""

from __future__ import annotations

import errno
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from coterie.errors import RunFolderError
from coterie.memory import free_memory, gpu_memory

_BUFFER_BYTES = 2**25  # of a pinned buffer, unless a row is longer

Result = TypeVar("Result")
PendingRows = Future[tuple[Tensor, "torch.cuda.Event | None"]]
"""Rows on their way to the device, with the event after which they are there on a GPU."""


class RowStorage(Protocol):
    """Rows on the host, which the thread reads and writes."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of all rows together."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of their numbers."""
        ...

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        ...

    def read_rows(self, index: Tensor, out: Tensor) -> None:
        """Read rows into ``out``; all on the host."""
        ...

    def write_rows(self, index: Tensor, values: Tensor) -> None:
        """Write rows; all on the host."""
        ...


class Transfers:
    """The thread that moves rows, for all backends of a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._thread = ThreadPoolExecutor(1, "coterie-rows")
        self._failure: BaseException | None = None
        self._pending_writes: deque[tuple[Future[None], int]] = deque()  # and their bytes
        self._max_pending_bytes = _free_bytes(device) // 8
        self.stream: torch.cuda.Stream | None = None
        self._buffers: list[Tensor] = []
        self._copied: list[torch.cuda.Event] = []  # for each buffer, the last copy from or to the device
        if device.type == "cuda":
            # PyTorch lends 32 streams of each priority in turn. Steps are recorded on streams of the usual one, and
            # what this thread did on the same stream meanwhile would become part of the recording.
            self.stream = torch.cuda.Stream(device, priority=-1)
            self._copied = [torch.cuda.Event(), torch.cuda.Event()]

    def reserve_buffers(self, row_bytes: int) -> None:
        """Have buffers that hold a row; to be called before the first job."""
        if self.stream is not None and (not self._buffers or len(self._buffers[0]) < row_bytes):
            size = max(_BUFFER_BYTES, row_bytes)
            self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        """Have something done after all that was submitted before; once a job failed, every later one fails too."""

        def run() -> Result:
            if self._failure is not None:
                raise self._failure
            try:
                return job()
            except BaseException as error:
                self._failure = _explained(error)
                raise self._failure from error

        return self._thread.submit(run)

    def write_back(self, storage: RowStorage, index: Tensor, values: Tensor) -> None:
        """Have rows written; waits only if too many are pending. ``values`` must not change any more."""
        ready = None
        if self.stream is not None:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self.device))
            values.record_stream(self.stream)
        job = self.submit(partial(self.store, storage, index, values, ready))
        self._pending_writes.append((job, values.nbytes))
        while self._pending_writes[0][0].done() or self._pending_bytes() > self._max_pending_bytes:
            self._pending_writes.popleft()[0].result()  # raises what failed in the thread
            if not self._pending_writes:
                break

    def _pending_bytes(self) -> int:
        return sum(size for _, size in self._pending_writes)

    # Jobs: what the thread does.

    def fetch(self, storage: RowStorage, index: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Copy rows to the device; on a GPU they are there after the event."""
        shape = (len(index), *storage.shape[1:])
        if self.stream is None:
            out = torch.empty(shape, dtype=storage.dtype)
            storage.read_rows(index, out)
            return out, None
        with torch.cuda.stream(self.stream):
            out = torch.empty(shape, dtype=storage.dtype, device=self.device)
            for turn, (begin, end) in enumerate(self._pieces(storage, len(index))):
                piece, copied = self._buffer(storage, turn, end - begin)
                copied.synchronize()  # until what was in the buffer has left it
                storage.read_rows(index[begin:end], piece)
                out[begin:end].copy_(piece, non_blocking=True)
                copied.record(self.stream)
            arrived = torch.cuda.Event()
            arrived.record(self.stream)
        return out, arrived

    def store(self, storage: RowStorage, index: Tensor, values: Tensor, ready: torch.cuda.Event | None) -> None:
        """Write rows that lie on the device, on a GPU once the event ``ready`` has passed."""
        if self.stream is None or ready is None:
            storage.write_rows(index, values)
            return
        ready.wait(self.stream)
        # A piece is written while the next one is on its way to the other buffer.
        pending: tuple[int, int, Tensor, torch.cuda.Event] | None = None
        for turn, (begin, end) in enumerate(self._pieces(storage, len(index))):
            piece, copied = self._buffer(storage, turn, end - begin)
            copied.synchronize()
            with torch.cuda.stream(self.stream):
                piece.copy_(values[begin:end], non_blocking=True)
                copied.record(self.stream)
            if pending is not None:
                self._write_piece(storage, index, *pending)
            pending = (begin, end, piece, copied)
        if pending is not None:
            self._write_piece(storage, index, *pending)

    @staticmethod
    def _write_piece(
        storage: RowStorage, index: Tensor, begin: int, end: int, piece: Tensor, copied: torch.cuda.Event
    ) -> None:
        copied.synchronize()
        storage.write_rows(index[begin:end], piece)

    def _pieces(self, storage: RowStorage, count: int) -> Iterator[tuple[int, int]]:
        """Cut so many rows into pieces that fit a buffer: the first row, and one past the last."""
        rows = max(1, len(self._buffers[0]) // max(1, storage.row_bytes))
        for begin in range(0, count, rows):
            yield begin, min(begin + rows, count)

    def _buffer(self, storage: RowStorage, turn: int, rows: int) -> tuple[Tensor, torch.cuda.Event]:
        memory = self._buffers[turn % 2][: rows * storage.row_bytes]
        return memory.view(storage.dtype).view(rows, *storage.shape[1:]), self._copied[turn % 2]


def _free_bytes(device: torch.device) -> int:
    return gpu_memory(device)[0] if device.type == "cuda" else free_memory()


def _explained(error: BaseException) -> BaseException:
    if isinstance(error, OSError):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "choose another --scratch, or --keep host" if full else "choose another --scratch"
        return RunFolderError(f"the rows that are kept on disk cannot be written or read ({error.strerror}): {remedy}")
    return error
