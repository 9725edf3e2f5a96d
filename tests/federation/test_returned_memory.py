"""What is free goes back to the system: of blocks between others that are in use, which the C library would keep."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

COUNT = 100
PROGRAM = """
import ctypes
from coterie.federation import returned_memory

def held():
    text = open("/proc/self/status").read()
    return int(text.split("VmRSS:")[1].split()[0]) / 1024

c = ctypes.CDLL(None)
c.malloc.restype, c.malloc.argtypes, c.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
c.memset.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
c.mallopt(-3, 2**25)  # as it is after a block of that size was freed: smaller ones lie side by side
{before}
blocks = [c.malloc({size}) for _ in range({count})]
for block in blocks:
    c.memset(block, 1, {size})
used = held()
for block in blocks[:-1]:  # the last one keeps what is below it
    c.free(block)
{after}
print(used - held())
"""


def returned(size: int, before: str = "", after: str = "") -> float:
    """Give the MB by which a process shrinks when it frees a hundred blocks but for the last."""
    code = PROGRAM.format(size=size, count=COUNT, before=before, after=after)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    return float(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc keeps memory so")
def test_free_memory_and_large_blocks_go_back() -> None:
    size = 4 * 2**20
    most = 4.0 * (COUNT - 1)
    assert returned(size) < 0.1 * most
    assert returned(size, after="returned_memory.return_free_memory()") > 0.95 * most
    assert returned(size, before="returned_memory.return_large_blocks()") > 0.95 * most
    training = "training = returned_memory.kept_while_training(); training.__enter__()"
    assert returned(size, before=training) < 0.1 * most
    assert returned(size, before=training, after="training.__exit__(None, None, None)") > 0.95 * most
    assert returned(size, before=f"{training}; training.__exit__(None, None, None)") > 0.95 * most
