"""Memory that goes back to the system when it is free.

Messages are models in pieces of some MB, which several threads fetch. The C library keeps what each of them frees for
the next block of that size, in a place of its own for every thread; beside a model's own tensors that came to some
hundred MB that nobody used.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

_MMAP_THRESHOLD = -3  # of mallopt in glibc: blocks of so many bytes are mapped; setting it stops it from growing
_LARGE = 2**21


def return_large_blocks() -> None:
    """Have this process give every large block back at once; where the C library cannot, nothing changes.

    For processes that pass messages on. One that trains would spend half its time on getting its memory again.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, _LARGE)


def return_free_memory() -> None:
    """Give back what is free now; where the C library cannot, nothing changes."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
