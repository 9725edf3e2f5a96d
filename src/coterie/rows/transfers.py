"""Carries rows between the device that computes and wherever they are kept.

A :class:`Transfers` works in a thread of its own, in the order in which it was asked: what is written behind a round's
back is there for whoever reads next, and the next cohort's rows are brought while this one trains. To and from a GPU it
goes through two buffers of pinned memory, on a stream of its own.
"""

from __future__ import annotations

import errno
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from coterie.errors import RunFolderError

_STAGED = 2**25  # bytes of a pinned buffer

Result = TypeVar("Result")
Brought = Future[tuple[Tensor, "torch.cuda.Event | None"]]
"""Rows that are on their way to the device, with the event after which they are there on a GPU."""


class Store(Protocol):
    """What a transfer thread carries from and to: rows on the host."""

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

    def read(self, index: Tensor, out: Tensor) -> None:
        """Read rows.

        Parameters
        ----------
        index
            Which, on the host.
        out
            Memory on the host ``[rows, ...]``.
        """
        ...

    def put(self, index: Tensor, values: Tensor) -> None:
        """Write rows.

        Parameters
        ----------
        index
            Which, on the host.
        values
            What they are from now on, on the host.
        """
        ...


class Transfers:
    """Carries rows to and from backends, one errand after another.

    Parameters
    ----------
    device
        The device that computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._errands = ThreadPoolExecutor(1, "coterie-rows")
        self._failure: BaseException | None = None
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._most = _free(device) // 8  # bytes that may wait to be taken away
        self.stream: torch.cuda.Stream | None = None
        self._buffers: list[Tensor] = []
        self._sent: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            self._sent = [torch.cuda.Event(), torch.cuda.Event()]

    def make_room(self, row_bytes: int) -> None:
        """Have buffers that hold a row; to be called before the first errand.

        Parameters
        ----------
        row_bytes
            Bytes of the longest row.
        """
        if self.stream is not None and (not self._buffers or len(self._buffers[0]) < row_bytes):
            size = max(_STAGED, row_bytes)
            self._buffers = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for _ in range(2)]

    def ask(self, errand: Callable[[], Result]) -> Future[Result]:
        """Have something done after all that was asked before.

        Parameters
        ----------
        errand
            What to do. If it fails, so does every later one.

        Returns
        -------
        Future
            Its result.
        """

        def run() -> Result:
            if self._failure is not None:
                raise self._failure
            try:
                return errand()
            except BaseException as error:
                self._failure = _explained(error)
                raise self._failure from error

        return self._errands.submit(run)

    def take_away(self, backend: Store, index: Tensor, values: Tensor) -> None:
        """Have rows put on a backend; returns before they are there, unless too many are waiting.

        Parameters
        ----------
        backend
            Where to.
        index
            Which rows, on the host.
        values
            What they are from now on, on the device; it must not change any more.
        """
        ready = None
        if self.stream is not None:
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self.device))
            values.record_stream(self.stream)
        self._waiting.append((self.ask(partial(self.store, backend, index, values, ready)), values.nbytes))
        while self._waiting[0][0].done() or sum(size for _, size in self._waiting) > self._most:
            self._waiting.popleft()[0].result()
            if not self._waiting:
                break

    def fetch(self, backend: Store, index: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Bring rows to the device; an errand.

        Parameters
        ----------
        backend
            Where from.
        index
            Which, on the host.

        Returns
        -------
        tuple
            The rows, and on a GPU the event after which they are there.
        """
        shape = (len(index), *backend.shape[1:])
        if self.stream is None:
            out = torch.empty(shape, dtype=backend.dtype)
            backend.read(index, out)
            return out, None
        with torch.cuda.stream(self.stream):
            out = torch.empty(shape, dtype=backend.dtype, device=self.device)
            for turn, (begin, end) in enumerate(self._pieces(backend, len(index))):
                piece, sent = self._buffer(backend, turn, end - begin)
                sent.synchronize()  # until what was in it has left
                backend.read(index[begin:end], piece)
                out[begin:end].copy_(piece, non_blocking=True)
                sent.record(self.stream)
            done = torch.cuda.Event()
            done.record(self.stream)
        return out, done

    def store(self, backend: Store, index: Tensor, values: Tensor, ready: torch.cuda.Event | None) -> None:
        """Put rows on a backend; an errand.

        Parameters
        ----------
        backend
            Where to.
        index
            Which rows, on the host.
        values
            What they are from now on, on the device.
        ready
            On a GPU, the event after which the values are there.
        """
        if self.stream is None or ready is None:
            backend.put(index, values)
            return
        ready.wait(self.stream)
        waiting: tuple[int, int, Tensor, torch.cuda.Event] | None = None
        for turn, (begin, end) in enumerate(self._pieces(backend, len(index))):
            piece, sent = self._buffer(backend, turn, end - begin)
            sent.synchronize()
            with torch.cuda.stream(self.stream):
                piece.copy_(values[begin:end], non_blocking=True)
                sent.record(self.stream)
            if waiting is not None:
                self._arrived(backend, index, *waiting)
            waiting = (begin, end, piece, sent)
        if waiting is not None:
            self._arrived(backend, index, *waiting)

    @staticmethod
    def _arrived(backend: Store, index: Tensor, begin: int, end: int, piece: Tensor, sent: torch.cuda.Event) -> None:
        sent.synchronize()
        backend.put(index[begin:end], piece)

    def _pieces(self, backend: Store, count: int) -> Iterator[tuple[int, int]]:
        rows = max(1, len(self._buffers[0]) // max(1, backend.row_bytes))
        for begin in range(0, count, rows):
            yield begin, min(begin + rows, count)

    def _buffer(self, backend: Store, turn: int, rows: int) -> tuple[Tensor, torch.cuda.Event]:
        memory = self._buffers[turn % 2][: rows * backend.row_bytes]
        return memory.view(backend.dtype).view(rows, *backend.shape[1:]), self._sent[turn % 2]


def _free(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()


def free_memory() -> int:
    """Say how much of the host's memory may still be taken.

    Returns
    -------
    int
        Bytes; the least of what the system has and what this process may have.
    """
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    found = [pages // 2]
    system = Path("/proc/meminfo")
    if system.exists():
        for line in system.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                found = [int(line.split()[1]) * 1024]
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists():
        most = limit.read_text(encoding="utf-8").strip()
        if most.isdigit():
            found.append(max(0, int(most) - int(used.read_text(encoding="utf-8"))))
    return min(found)


def _explained(error: BaseException) -> BaseException:
    if isinstance(error, OSError):
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        remedy = "choose another --scratch, or --keep host" if full else "choose another --scratch"
        return RunFolderError(f"the rows that are kept on disk cannot be written or read ({error.strerror}): {remedy}")
    return error
