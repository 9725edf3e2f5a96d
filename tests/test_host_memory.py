"""The host's memory: what is free of it, and freed memory that stays with the process, counted in pages handed out."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys

import pytest

from coterie.memory import free_memory

COUNT = """
import json, resource
import torch
from coterie.memory import keep_freed_memory

def pages():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        one, two = torch.ones(4_000_000), torch.ones(2_500_000)
        del one, two
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

torch.set_num_threads(1)
without = pages()
able = keep_freed_memory()
pages()
print(json.dumps({"able": able, "without": without, "with": pages()}))
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"),
    reason="only the GNU C library can be told what to do with freed memory",
)
def test_rounds_after_the_first_take_no_new_pages() -> None:
    done = subprocess.run([sys.executable, "-c", COUNT], check=True, capture_output=True, text=True)
    seen = json.loads(done.stdout)
    assert seen["able"]
    # 26 MB in ten rounds: 63,000 pages of 4 kB, or 130 large ones, if each has to be handed out anew
    assert seen["with"] < seen["without"] / 10


def test_it_says_so_where_it_cannot(monkeypatch: pytest.MonkeyPatch) -> None:
    from coterie.memory import keep_freed_memory

    monkeypatch.setattr(sys, "platform", "darwin")
    assert not keep_freed_memory()


def test_the_memory_that_is_free() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < free_memory() < total
