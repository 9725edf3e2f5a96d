"""What the C library does with the host's memory that a round gives back: keep it for the next round."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGEST = 2**30  # bytes: what is larger still comes from the operating system, and goes back to it
_KEPT = 2**31 - 1  # bytes at the end of the heap, the most that can be asked for


def keep_freed_memory() -> bool:
    """Let blocks of up to a gigabyte stay with this process when they are freed.

    Otherwise the GNU C library gives each large block back to the operating system, which clears it anew, page by page,
    when the next round asks for it: a third of the time of rounds with many small models on a CPU. The price is that
    the process holds, until it ends, about as much memory as it once needed. The command line does this; whoever uses
    the library decides for the process that it is part of.

    Returns
    -------
    bool
        Whether this C library can be told so.
    """
    if not sys.platform.startswith("linux"):
        return False
    library = ctypes.CDLL(None)
    if not hasattr(library, "gnu_get_libc_version"):
        return False
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(library.mallopt(_TRIM_THRESHOLD, _KEPT))
