"""Seeded schedules over Flower: processes are killed and stopped, connections cut, strangers knock; the result stands.

The oracle is a simulation that loses the replies of which the run's events say that they were lost, to the last bit.
``make soak`` plays ten of them. ``COTERIE_SOAK_FLOWER`` says how many, or which: ``3-9`` for those from 3 to 9.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import yaml
from torch import Tensor

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

from coterie.compute.engine import Call
from coterie.federation import agreement, project
from coterie.federation.flower import processes
from coterie.federation.party_data import load_own
from coterie.runs.storage import events, read_summary
from tests.federation.chaos import seeds
from tests.federation.conftest import Flower
from tests.federation.grid import LocalGrid, equal, node_rows, reference, states
from tests.federation.running import PATIENCE, Federation, free_pair, wait_until

pytestmark = pytest.mark.processes

SCHEDULES = seeds(os.environ.get("COTERIE_SOAK_FLOWER", "1"))
SILOS = ("silo-0", "silo-1", "silo-2")
ROUNDS = 5
LOST = ("no reply", "error", "garbage")


class Cable:
    """A proxy between nodes and the server; ``cut`` breaks all connections, in the middle of whatever they carry."""

    def __init__(self, target: int) -> None:
        self._target, self._open = target, set[socket.socket]()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it was closed
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        with contextlib.suppress(OSError), near, socket.create_connection(("127.0.0.1", self._target)) as far:
            self._open |= {near, far}
            back = threading.Thread(target=self._pass, args=(far, near), daemon=True)
            back.start()
            self._pass(near, far)
            back.join()
            self._open -= {near, far}

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(2**14):
                sink.sendall(piece)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Federation, Cable, int]]:
    federation, port = Federation(tmp_path_factory.mktemp("soak") / "demo"), free_pair()
    project.init(federation.folder, list(SILOS), port=port)
    cable = Cable(port)
    for silo in SILOS:
        file = federation.folder / "nodes" / silo / "node.yaml"
        file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "server": f"127.0.0.1:{cable.port}"}))
    try:
        federation.serve()
        for silo in SILOS:
            federation.node(silo)
        federation.wait_for_nodes(len(SILOS))
        yield federation, cable, port
    finally:
        federation.close()
        cable.close()


def stop_and_continue(process: subprocess.Popen[bytes], seconds: float) -> None:
    groups = processes._groups(process.pid)

    def send(number: signal.Signals) -> None:
        for group in groups:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, number)

    try:
        send(signal.SIGSTOP)
        time.sleep(seconds)
    finally:
        send(signal.SIGCONT)


def knock(port: int, draw: np.random.Generator) -> None:
    for _ in range(5):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(draw.bytes(int(draw.integers(1, 10_000))))


@pytest.mark.parametrize("seed", SCHEDULES)
def test_a_schedule_over_flower(seed: int, running: tuple[Federation, Cable, int]) -> None:
    federation, cable, port = running
    draw, happened = np.random.default_rng(1000 + seed), []
    name = f"soak-{seed}"
    path = federation.folder / "runs" / name
    command = ("flame", "--rounds", str(ROUNDS), "--deadline", "90", "--wait", str(PATIENCE), "--out", str(path))
    federation.run(name, *command)
    wait_until(lambda: (path / "events.jsonl").exists(), "the run begins", federation.started[name])
    until = time.monotonic() + 2 * PATIENCE
    for _ in range(int(draw.integers(2, 6))):
        time.sleep(float(draw.uniform(0.5, 6.0)))
        if read_summary(path) is not None:
            break
        fault = str(draw.choice(["kill node", "stop node", "cut", "knock", "kill server"]))
        happened.append(fault)
        silo = str(draw.choice(SILOS))
        if fault == "kill node":
            federation.kill(silo)
            federation.node(silo)
        elif fault == "stop node":
            stop_and_continue(federation.started[silo], float(draw.uniform(1.0, 8.0)))
        elif fault == "cut":
            cable.cut()
        elif fault == "knock":
            knock(port, draw)
        else:
            federation.kill("server")
            federation.kill(name)  # it follows a run that is no more
            federation.serve()
            federation.run(name, *command)
    while read_summary(path) is None:
        process = federation.started[name]
        if process.poll() is not None and read_summary(path) is None:
            federation.run(name, *command)
        assert time.monotonic() < until, (happened, federation.said(name), federation.said("server"))
        time.sleep(0.5)
    federation.end(name)
    lost: dict[int, set[int]] = {}
    for event in events.read(path):
        if event.what == "resumed":
            lost = {number: who for number, who in lost.items() if number <= event.round}
        elif event.what in LOST and event.client is not None:
            lost.setdefault(event.round, set()).add(event.client)

    def oracle(clients: Tensor, call: Call) -> Tensor:
        return torch.tensor([int(client) in lost.get(call.round, set()) for client in clients.tolist()])

    folder = federation.folder
    agreed = agreement.read(folder / agreement.FILE)
    datasets = [load_own("data.npz", folder / "nodes" / silo, agreed) for silo in SILOS]
    local = Flower(agreed, LocalGrid({}), folder, datasets)
    other = reference(local, "flame", folder.parent / f"reference-{seed}", oracle)
    for number in range(1, ROUNDS + 1):
        other.play_round(torch.arange(len(SILOS)), number)
    equal(states(path)[0], other.server)
    told = {event.client for event in events.read(path) if event.what == "no evaluation"}
    for client in range(len(SILOS)):
        if client not in told:  # it heard that its last reply counts
            mine = {key: rows[client : client + 1] for key, rows in other.clients.rows.items()}
            equal(node_rows(local, client, path), mine)
    print(seed, happened, {number: sorted(who) for number, who in lost.items()})
