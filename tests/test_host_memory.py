"""The host's memory: what is free of it, and freed memory that stays with the process, counted in pages handed out."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coterie.errors import ConfigError
from coterie.memory import GPU_SHARE, free_memory, gpu_memory, gpu_share, without_collecting

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


def test_a_process_has_its_share_of_a_gpu_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (700, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    device = torch.device("cuda")
    monkeypatch.delenv(GPU_SHARE, raising=False)
    assert gpu_memory(device) == (700, 1000)
    monkeypatch.setenv(GPU_SHARE, "0.25")  # 250 of 1,000, of which it has 50
    assert gpu_memory(device) == (200, 250)
    monkeypatch.setenv(GPU_SHARE, "0.9")  # others have taken so much that less is free than it may have
    assert gpu_memory(device) == (700, 900)
    monkeypatch.setenv(GPU_SHARE, "0.01")
    assert gpu_memory(device) == (0, 10)
    for wrong in ("0", "1.5", "half", "nan"):
        monkeypatch.setenv(GPU_SHARE, wrong)
        with pytest.raises(ConfigError, match=f"COTERIE_GPU_SHARE is '{wrong}'"):
            gpu_share()


def test_nothing_asks_a_gpu_but_through_its_share() -> None:
    source = Path(__file__).resolve().parents[1] / "src/coterie"
    asking = {
        path.relative_to(source).as_posix()
        for path in source.rglob("*.py")
        if re.search(r"mem_get_info|total_memory", path.read_text(encoding="utf-8"))
    }
    assert asking == {"memory.py"}


def test_nothing_is_collected_within() -> None:
    was_on = gc.isenabled()
    gc.enable()
    try:
        with without_collecting():
            assert not gc.isenabled()
        assert gc.isenabled()
        gc.disable()
        with without_collecting():
            pass
        assert not gc.isenabled()
    finally:
        (gc.enable if was_on else gc.disable)()
        gc.unfreeze()


def test_what_was_imported_without_collecting_is_freed_at_the_end() -> None:
    """Triton's library would complain on the terminal of all that it made, after a command that went well."""
    pytest.importorskip("triton")
    program = "import torch, coterie.memory\nwith coterie.memory.without_collecting():\n import triton.language"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert "leaked" not in done.stderr + done.stdout
