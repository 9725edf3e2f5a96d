"""Kill a run at every step that it takes on the disk, resume it, and compare it with the run that was never killed.

A program and not a test, because the hook that counts the steps cannot be taken out of a process again. It forks for
each step, and the child ends there by ``os._exit``: no ``finally``, no ``except``, no flush, as with ``kill -9``.

    python kill_everywhere.py FOLDER
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from coterie.runs.storage import RunFolder, collaboration_weights_log

ROUNDS = 4
UNCHECKED = 2  # a round without a checkpoint: a kill after it loses what was not flushed
CLIENTS = np.arange(3)
STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"}
KILLED = 9

steps_left = -1
inside = ""


def count_down(event: str, arguments: tuple[object, ...]) -> None:
    """End the process at the given step inside the run's folder."""
    global steps_left
    if steps_left < 0 or event not in STEPS:
        return
    # A removal relative to an open folder names the file alone.
    if event == "open" and not os.fspath(arguments[0] if isinstance(arguments[0], str | Path) else "").startswith(
        inside
    ):
        return
    if steps_left == 0:
        os._exit(KILLED)
    steps_left -= 1


def go_on(path: Path) -> None:
    """Begin the run, or resume it, and bring it to its end."""
    begun = (path / "config.yaml").exists()
    with RunFolder.open(path) if begun else RunFolder.create(path, {"rounds": ROUNDS}) as run:
        found = run.checkpoints.latest()
        number = found.round if found else 0
        server = found.server if found else {"total": torch.arange(4, dtype=torch.int64)}
        clients = found.clients if found else {"rows": torch.linspace(0, 1, 6, dtype=torch.float64).view(3, 2)}
        run.rewind(found.round if found else -1)
        while number < ROUNDS:
            number += 1
            server = {"total": server["total"] * 3 + number}
            clients = {"rows": torch.sin(clients["rows"] + number)}
            run.metrics.append(number, "personal", "test", "accuracy", clients["rows"][:, 0].numpy(), CLIENTS)
            run.metrics.append_bytes(number, up=24, down=48)
            run.collaboration_weights.append(number, clients["rows"].numpy(), CLIENTS, [0, 1])
            run.timings.append(number, train=1.0)
            if number != UNCHECKED:
                run.checkpoint(number, server, clients, {"best": float(clients["rows"].max())})
        run.finish({"rounds": ROUNDS})


def killed(path: Path, at: int) -> bool:
    """Go on in a child that is killed at a step; say whether it was, and not at its end already."""
    global steps_left, inside
    child = os.fork()
    if child == 0:
        steps_left, inside = at, str(path)
        go_on(path)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code not in (0, KILLED):
        raise SystemExit(f"the child of step {at} failed with exit code {code}")
    return code == KILLED


def same(path: Path, whole: Path) -> None:
    """Compare two finished runs."""
    for name in ("metrics.parquet", "config.yaml", "summary.json", "timings.jsonl"):
        assert (path / name).read_bytes() == (whole / name).read_bytes(), name
    for number in range(1, ROUNDS + 1):
        pd.testing.assert_frame_equal(
            *(collaboration_weights_log(each).read(number) for each in (path, whole)), check_exact=True
        )
    with RunFolder.open(path) as one, RunFolder.open(whole) as other:
        left, right = one.checkpoints.latest(), other.checkpoints.latest()
    assert left is not None and right is not None
    assert (left.round, left.extra) == (right.round, right.extra)
    assert torch.equal(left.server["total"], right.server["total"])
    assert torch.equal(left.clients["rows"], right.clients["rows"])
    assert not list(path.glob("metrics/*")) and sorted(os.listdir(path)) == sorted(os.listdir(whole))


def main(folder: Path) -> None:
    """Kill at step 0, 1, 2, … until the run takes no more steps; every third time, kill the resumed run as well."""
    go_on(folder / "whole")
    sys.addaudithook(count_down)
    step = 0
    while True:
        path = folder / f"killed-{step}"
        if not killed(path, step):
            break
        if step % 3 == 0:
            killed(path, step * 7 % 60)
        go_on(path)
        same(path, folder / "whole")
        shutil.rmtree(path)
        step += 1
    print(f"killed at {step} steps")


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.fsync = lambda handle: None  # the kernel outlives the process, so a kill loses nothing that waits for the disk
    main(Path(sys.argv[1]))
