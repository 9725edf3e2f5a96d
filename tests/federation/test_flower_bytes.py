"""Bytes on the network itself: what a node's connection carried, against the numbers that the method sends."""

from __future__ import annotations

import contextlib
import shutil
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

from coterie.federation import project
from coterie.results import Result
from tests.federation.running import PATIENCE, Federation, free_pair

pytestmark = pytest.mark.processes

ROUNDS = 2
HIDDEN = 6_000
PARAMETERS = 64 * HIDDEN + HIDDEN + HIDDEN * 10 + 10  # of mlp on digits: 1.8 MB


class Counting:
    """A proxy between nodes and the server that passes bytes on and counts them: TLS, HTTP, Flower's polls and all."""

    def __init__(self, target: int) -> None:
        self.up = self.down = 0
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # the listener was closed
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._connect, args=(near,), daemon=True).start()

    def _connect(self, near: socket.socket) -> None:
        # After the end of the test the server may be gone, and a node still ask for it.
        with contextlib.suppress(OSError), near, socket.create_connection(("127.0.0.1", self._target)) as far:
            back = threading.Thread(target=self._pass, args=(far, near, "down"), daemon=True)
            back.start()
            self._pass(near, far, "up")
            back.join()

    def _pass(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(2**16):
                setattr(self, way, getattr(self, way) + len(piece))
                sink.sendall(piece)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def large(tmp_path: Path) -> Iterator[tuple[Federation, Counting]]:
    folder, port = tmp_path / "large", free_pair()
    project.init(folder, ["silo"], port=port)
    for file in (folder / "federation.yaml", folder / "nodes" / "silo" / "federation.yaml"):
        file.write_text(file.read_text().replace("model: mlp\n", f"model: mlp:hidden={HIDDEN}\n"))
    counting = Counting(port)
    file = folder / "nodes" / "silo" / "node.yaml"
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "server": f"127.0.0.1:{counting.port}"}))
    federation = Federation(folder)
    try:
        federation.serve()
        federation.node("silo")
        yield federation, counting
    finally:
        federation.abandon()
        counting.close()
        shutil.rmtree(folder)


def test_overhead_is_small_where_messages_are_large(large: tuple[Federation, Counting]) -> None:
    federation, counting = large
    federation.wait_for_nodes(1)
    up, down = counting.up, counting.down
    federation.run("run", "fedavg", "--rounds", str(ROUNDS), "--wait", str(PATIENCE))
    federation.end("run")
    up, down = counting.up - up, counting.down - down
    metrics = Result(federation.folder / "runs" / "fedavg-1").metrics
    ours = {way: float(metrics.loc[metrics["metric"] == f"bytes_{way}", "value"].sum()) for way in ("up", "down")}
    assert ours == {"up": ROUNDS * 4 * PARAMETERS, "down": ROUNDS * 4 * PARAMETERS}
    # What is evaluated after the last round goes down once more.
    overhead = {"up": up / ours["up"] - 1, "down": down / (ours["down"] + 4 * PARAMETERS) - 1}
    print("overhead on the network:", {way: f"{value:.2%}" for way, value in overhead.items()})
    assert all(0 < value < 0.05 for value in overhead.values()), overhead
