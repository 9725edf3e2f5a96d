"""Memory: how much of the host's and of a GPU's is free, and whether what was freed stays with this process."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from coterie.errors import ConfigError

if TYPE_CHECKING:
    import torch

GPU_SHARE = "COTERIE_GPU_SHARE"
"""Names the variable with the part of a GPU's memory that this process may take, where several share the GPU."""

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_LARGEST = 2**30  # bytes: what is larger still comes from the operating system, and goes back to it
_MOST = 2**31 - 1  # bytes that stay at the end of the heap: the most that can be asked for


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
    return bool(library.mallopt(_MMAP_THRESHOLD, _LARGEST)) and bool(library.mallopt(_TRIM_THRESHOLD, _MOST))


@contextlib.contextmanager
def without_collecting() -> Iterator[None]:
    """Import something large without looking for garbage among what stays: a fifth of the time that PyTorch takes.

    What was made is not looked at again by later collections either, but for the one at the end of the process: some
    libraries complain there of what nobody freed.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)
        if was_on:
            gc.enable()


def free_memory() -> int:
    """Say how much of the host's memory this process may still take.

    Returns
    -------
    int
        Bytes: what the system has available, or what this process's control group has left, whichever is less.
    """
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2]  # a guess, where Linux says nothing better
    system = Path("/proc/meminfo")
    if system.exists():
        for line in system.read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                found = [int(line.split()[1]) * 1024]
    group = Path("/sys/fs/cgroup")  # a container's limit may be far below what the machine has
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists():
        most = limit.read_text(encoding="utf-8").strip()
        if most.isdigit():
            found.append(max(0, int(most) - int(used.read_text(encoding="utf-8"))))
    return min(found)


def gpu_share() -> float:
    """Say which part of a GPU's memory this process may take.

    Returns
    -------
    float
        All of it, 1, unless ``COTERIE_GPU_SHARE`` says otherwise.

    Raises
    ------
    ConfigError
        If it is not a number above 0 and at most 1.
    """
    given = os.environ.get(GPU_SHARE, "1")
    try:
        share = float(given)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ConfigError(f"{GPU_SHARE} is {given!r}, but must be a number above 0 and at most 1")
    return share


def gpu_memory(device: torch.device) -> tuple[int, int]:
    """Say how much of a GPU's memory this process may still take.

    Parameters
    ----------
    device
        The GPU.

    Returns
    -------
    tuple
        Bytes that it may still take, and bytes that it may have in all.
    """
    import torch  # which the command line does without until something is computed

    free, total = torch.cuda.mem_get_info(device)
    share = gpu_share()
    if share == 1:
        return free, total
    mine = int(share * total)
    return max(0, min(free, mine - torch.cuda.memory_reserved(device))), mine
