"""What an experiment holds in memory, on the real sets; skipped where ``COTERIE_DATA`` has none."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from coterie.config import from_mapping
from coterie.data.download import status_of
from coterie.data.registry import SOURCES
from coterie.runs.builder import assemble

pytestmark = [
    pytest.mark.realdata,
    pytest.mark.skipif("COTERIE_DATA" not in os.environ, reason="COTERIE_DATA is not set"),
]

MEGABYTE = 2**20


def need(name: str) -> None:
    if status_of(SOURCES[name], Path(os.environ["COTERIE_DATA"])).state != "whole":
        pytest.skip(f"{name} is not in COTERIE_DATA")


def storages() -> dict[int, int]:
    """The bytes of every memory block that a tensor in this process lies in."""
    gc.collect()
    found = {}
    for value in gc.get_objects():
        if issubclass(type(value), torch.Tensor):
            block = value.untyped_storage()
            found[block.data_ptr()] = block.nbytes()
    return found


def test_a_hundred_clients_on_cifar10_hold_one_copy_of_the_data() -> None:
    need("cifar10")
    before = storages()
    config = from_mapping(
        {"algorithm": "fedavg", "data": "cifar10", "clients": 100, "model": "linear", "partition": "dirichlet:0.5"}
    )
    parts = assemble(config)
    assert parts.engine.samples.clients == 100
    new = {place: size for place, size in storages().items() if place not in before}
    images = 60_000 * 3 * 32 * 32
    assert sorted(size for size in new.values() if size > 16 * MEGABYTE) == [images]
    # A hundred models of 3072·10 + 10 floats (the clients' rows), and who holds which of the samples, come to this.
    assert sum(new.values()) - images < 16 * MEGABYTE
    parts.simulation.play_round(torch.arange(100), 1)
    parts.scorer.scores(1)
    after = {place: size for place, size in storages().items() if place not in before}
    assert sum(size for size in after.values() if size > 16 * MEGABYTE) == images


# The peak of this process's own memory: what `getrusage` gives includes that of the process it was forked from.
PROGRAM = """
import sys
from coterie.cli import main
try:
    main()
except SystemExit as end:
    assert not end.code, end.code
with open("/proc/self/status") as status:
    print(next(line.split()[1] for line in status if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read where Linux keeps it")
def test_a_run_on_fashion_mnist_stays_below_one_and_a_half_gigabytes(tmp_path: Path) -> None:
    need("fashion_mnist")
    options = "--data fashion_mnist --partition dirichlet:0.5 --clients 100 --scarcity 50 --max-test 200 --rounds 2"
    options += " --model mlp:hidden=100 --local-epochs 5 --batch-size 10 --lr 0.05 --threads 1 --matrix -q"
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "run", "fedacs", *options.split(), "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout.split()[-1]) * 1024
    assert 200 * MEGABYTE < peak < 1.5e9
