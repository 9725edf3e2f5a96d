"""Seeded schedules of kills, stops, cut connections, full disks, jumping clocks and garbage.

After each, the server's state and every member's own are those of a simulation that lost the same replies, to the last
bit. ``make soak`` plays 200 of them, and some over Flower; without it there are a few. ``COTERIE_SOAK`` says how many,
or which: ``50-99`` for those from 50 to 99.
"""

from __future__ import annotations

import faulthandler
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

from coterie.errors import CoterieError
from coterie.federation.plan import Plan
from coterie.federation.server import serve
from tests.federation.chaos import ChaosGrid, Clock, full, seeds, watch_disk
from tests.federation.grid import equal, make_federation, node_rows, reference, states
from tests.small_runs import Killed

SCHEDULES = seeds(os.environ.get("COTERIE_SOAK", "4"))
METHODS = ("flame", "fedavg", "fedacs", "fedpg", "ditto")
ROUNDS, CLIENTS = 4, 3
TOO_LONG = 600.0  # seconds after which a schedule counts as hanging


@pytest.mark.parametrize("seed", SCHEDULES)
def test_a_schedule(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = np.random.default_rng(seed)
    algorithm = METHODS[seed % len(METHODS)]
    local = make_federation(tmp_path, CLIENTS)
    local.grid.nodes_ = {node.client: node for node in local.grid.nodes_.values()}
    disk, clock = watch_disk(monkeypatch), Clock(monkeypatch)
    grid = ChaosGrid(local, draw, disk, clock, float(draw.uniform(0.1, 0.6)), int(draw.integers(0, 3)), ROUNDS)
    plan = Plan(algorithm=algorithm, rounds=ROUNDS, wait=0.0, deadline=5.0)
    faulthandler.dump_traceback_later(TOO_LONG, exit=True)
    disk_full = int(draw.integers(0, 2))
    try:
        for attempt in range(20):
            try:
                if disk_full and attempt == 0:
                    with disk.failing(int(draw.integers(5, 60)), full):
                        serve(local.agreement, grid, plan, tmp_path / "run")
                else:
                    serve(local.agreement, grid, plan, tmp_path / "run")
                break
            except Killed:
                pass
            except (CoterieError, OSError) as error:
                assert disk_full and attempt == 0, error
                grid.happened.append("the server's disk was full")
        else:
            pytest.fail(f"it did not end: {grid.happened}")
    finally:
        faulthandler.cancel_dump_traceback_later()
    monkeypatch.undo()
    other = reference(local, algorithm, tmp_path / "reference", grid.oracle)
    start = {name: rows.clone() for name, rows in other.clients.rows.items()}
    for number in range(1, ROUNDS + 1):
        other.play_round(torch.arange(CLIENTS), number)
    equal(states(tmp_path / "run")[0], other.server)
    for client in range(CLIENTS):
        mine = {name: rows[client : client + 1] for name, rows in other.clients.rows.items()}
        found = node_rows(local, client, tmp_path / "run")
        # Of a node none of whose replies ever counted, nothing lies on its disk: it is where it began.
        equal(found or {name: rows[client : client + 1] for name, rows in start.items()}, mine)
    print(seed, algorithm, dict(Counter(grid.happened)))
