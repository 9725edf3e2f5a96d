"""Memory that goes back to the system when it is free.

Messages are models in pieces of some MB, which several threads fetch. The C library keeps what each of them frees for
the next block of that size, in a place of its own for every thread; beside a model's own tensors that came to some
hundred MB that nobody used.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator

from coterie.memory import keep_freed_memory

_MMAP_THRESHOLD = -3  # of mallopt in glibc: blocks of so many bytes are mapped; setting it stops it from growing
_LARGE = 2**21
_ARENA_MAX = -8  # how many places for blocks there are


def return_large_blocks() -> None:
    """Have this process give every large block back at once.

    One that trains would spend half its time on getting its memory again: see :func:`kept_while_training`.
    """
    _call("mallopt", _MMAP_THRESHOLD, _LARGE)


def share_free_memory() -> None:
    """Have all threads of this process that begin from now on use what any of them has freed."""
    _call("mallopt", _ARENA_MAX, 1)


@contextlib.contextmanager
def kept_while_training() -> Iterator[None]:
    """Let large blocks stay with this process while the context is open, as a step frees what the next one needs.

    Before and after, :func:`return_large_blocks` holds.
    """
    return_free_memory()
    keep_freed_memory()
    try:
        yield
    finally:
        return_large_blocks()
        return_free_memory()


def return_free_memory() -> None:
    """Give back what is free now."""
    _call("malloc_trim", 0)


def _call(function: str, *values: int) -> None:
    """Call the C library; where it has no such function, nothing changes."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            getattr(ctypes.CDLL(None), function)(*values)
