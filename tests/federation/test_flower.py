"""The real thing: a SuperLink behind its gate and three SuperNodes as processes, with TLS and authenticated nodes."""

from __future__ import annotations

import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import yaml

from coterie.federation import agreement
from coterie.federation.worlds import load_own
from tests.federation.grid import Local, LocalGrid, compare

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

from coterie.engines.flower import apps, pki, processes
from coterie.federation import project

ALGORITHMS = ("fedavg", "fedacs", "flame", "fedpg")
ROUNDS = 3
MEMBERS = ["silo-0", "silo-1", "silo-2"]
SAMPLES = 90
PATIENCE = 240.0  # seconds: the machine may be busy with other tests


@dataclass
class Running:
    folder: Path
    port: int
    superlink_port: int

    @property
    def env(self) -> dict[str, str]:
        return processes.environment(self.folder / "server" / "flower")


class Flower(Local):
    def node_folder(self, client: int) -> Path:
        return self.folder / "nodes" / MEMBERS[client]


def coterie(*arguments: str) -> list[str]:
    return [sys.executable, "-c", "from coterie.cli import main; main()", *arguments]


def wait_until(condition: object, process: subprocess.Popen[bytes], what: str) -> None:
    assert callable(condition)
    until = time.monotonic() + PATIENCE
    while not condition():
        assert process.poll() is None, f"ended with {process.returncode} before {what}"
        assert time.monotonic() < until, what
        time.sleep(0.1)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("federation") / "project"
    port, inner = processes.free_port(), processes.free_port()
    project.init(folder, MEMBERS, port=port)
    (folder / "server" / "server.yaml").write_text(f"host: 127.0.0.1\nport: {port}\nsuperlink_port: {inner}\n")
    for name in MEMBERS:
        file = folder / "nodes" / name / "data.npz"
        with np.load(file) as arrays:
            fewer = {key: arrays[key][:SAMPLES] for key in ("x", "y")}
        np.savez(file, **fewer)
    logs, env = folder / "logs", {**os.environ, "OMP_NUM_THREADS": "1"}
    started = [processes.start(coterie("federate", "server", str(folder)), env, logs / "server")]
    try:
        nodes = [coterie("federate", "node", str(folder / "nodes" / name)) for name in MEMBERS]
        wait_until(lambda: b"ready" in (logs / "server").read_bytes(), started[0], "the server is ready")
        started += [processes.start(command, env, logs / name) for command, name in zip(nodes, MEMBERS, strict=True)]
        yield Running(folder, port, inner)
    finally:
        for process in reversed(started):
            processes.stop(process)


def test_the_models_are_those_of_the_loop_engine(running: Running, tmp_path: Path) -> None:
    """All four at once: nodes serve several runs beside each other, each with its own state."""
    folder = running.folder
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = ("--rounds", str(ROUNDS), "--deadline", str(PATIENCE), "--wait", str(PATIENCE), "--minimum", "3")
    runs = {
        name: processes.start(coterie("federate", "run", str(folder), name, *options), env, folder / "logs" / name)
        for name in ALGORITHMS
    }
    try:
        for name, process in runs.items():
            code = process.wait(timeout=PATIENCE)
            assert code == 0, (folder / "logs" / name).read_text()
    finally:
        for process in runs.values():
            processes.stop(process)
    agreed = agreement.read(folder / agreement.FILE)
    datasets = [load_own("data.npz", folder / "nodes" / name, agreed) for name in MEMBERS]
    local = Flower(agreed, LocalGrid({}), folder, datasets)
    for name in ALGORITHMS:
        compare(local, name, ROUNDS, folder / "runs" / f"{name}-1", tmp_path / name)
        events = (folder / "runs" / f"{name}-1" / "events.jsonl").read_text()
        assert sorted(json.loads(line)["what"] for line in events.splitlines()) == ["began", *["joined"] * 3]
    for member in MEMBERS:
        assert len(project.read_models(folder / "nodes" / member)) == len(ALGORITHMS)
    shown = subprocess.run(
        coterie("federate", "status", str(folder)), env=env, capture_output=True, text=True, check=True
    ).stdout
    assert shown.count("online") == 3
    assert shown.count("round 3 of 3, finished") == len(ALGORITHMS)


def test_only_nodes_with_a_registered_key_and_tls_come_in(running: Running, tmp_path: Path) -> None:
    ca = running.folder / "server" / "ca.crt"
    address = f"127.0.0.1:{running.port}"
    pki.make_node_key(tmp_path, "stranger")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    pki.make_authority(foreign)
    own = running.folder / "nodes" / "silo-0" / "node.key"
    attempts = {
        "unregistered": processes.supernode(address, ca, tmp_path / "node.key", processes.free_port(), {}),
        "keyless": processes.supernode(address, ca, None, processes.free_port(), {}),
        "another authority": processes.supernode(address, foreign / "ca.crt", own, processes.free_port(), {}),
    }
    plain = [part for part in attempts["keyless"] if part not in ("--root-certificates", str(ca))]
    attempts["plain text"] = [plain[0], "--insecure", *plain[1:]]
    reasons = {
        "unregistered": "Failed to activate SuperNode",
        "keyless": "SuperNode authentication is enabled",
        "another authority": "CERTIFICATE_VERIFY_FAILED",
        "plain text": "Exit Code: 305",  # the connection could not be established
    }
    before = online(running)
    for name, command in attempts.items():
        said = refusal(command, tmp_path / name.replace(" ", "-"))
        assert reasons[name] in said, said
    assert online(running) == before
    with socket.create_connection(("127.0.0.1", running.port), timeout=60) as raw:
        raw.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        assert b"HTTP" not in raw.recv(2**16)


def refusal(command: list[str], folder: Path) -> str:
    """Start a SuperNode that must not come in, and give what it says when it ends."""
    limits = [command[0], "--max-retries", "1", "--max-wait-time", "5", *command[1:]]
    process = processes.start(limits, processes.environment(folder), folder / "log")
    try:
        assert process.wait(timeout=PATIENCE) != 0
    finally:
        processes.stop(process)
    return (folder / "log").read_text()


def online(running: Running) -> set[str]:
    answer = processes.flwr(["supernode", "list", processes.CONNECTION], running.env)
    return {str(node["node-id"]) for node in answer["nodes"]}


def test_a_strangers_submission_is_refused(running: Running, tmp_path: Path) -> None:
    """Whoever reaches the port of the nodes, with the right certificate, can neither submit nor look."""
    processes.write_connection(tmp_path, f"127.0.0.1:{running.port}", running.folder / "server" / "ca.crt")
    stranger = processes.environment(tmp_path)
    before = runs(running.env)
    for command in (["run", str(running.folder / "app"), processes.CONNECTION], ["list", processes.CONNECTION]):
        with pytest.raises(Exception, match="failed"):
            processes.flwr(command, stranger)
    assert runs(running.env) == before
    for path in (
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/..%2fcontrol%2fstart-run",
        "//v1/control/start-run",
        "/v1/fleet//v1/control/start-run",
        "/v1/fleet/pull-messages?x=/v1/control",
        "/docs",
    ):
        assert status(running, "POST", path) == 403, path
    assert status(running, "GET", "/v1/fleet/pull-messages") == 403
    # The gate itself is open for what nodes call, and Flower asks those for their key.
    assert status(running, "POST", "/v1/fleet/pull-messages") in (400, 401)


def runs(env: dict[str, str]) -> list[str]:
    return sorted(str(run["run-id"]) for run in processes.flwr(["list", processes.CONNECTION], env)["runs"])


def status(running: Running, method: str, path: str) -> int:
    """Speak HTTP by hand: a client library would tidy the path up."""
    context = ssl.create_default_context(cafile=str(running.folder / "server" / "ca.crt"))
    request = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/protobuf\r\n"
    with (
        socket.create_connection(("127.0.0.1", running.port), timeout=60) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as connection,
    ):
        connection.sendall(f"{request}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())
        return int(connection.recv(2**16).split()[1])


def test_nobody_but_this_machine_reaches_the_superlink(running: Running) -> None:
    command = processes.superlink(running.superlink_port, running.folder / "server")
    assert command[command.index("--host") + 1] == "127.0.0.1"


def test_flower_adds_little_to_a_block() -> None:
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    block = os.urandom(2**20)
    sent = sum(len(each.deflate()) for each in get_all_nested_objects(apps._content(block)).values())
    assert len(block) < sent < 1.05 * len(block)


def test_what_is_started_neither_phones_home_nor_installs(tmp_path: Path) -> None:
    env = processes.environment(tmp_path)
    assert env["FLWR_TELEMETRY_ENABLED"] == "0"
    assert env["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert env["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] == "1"
    assert "--disable-runtime-dependency-installation" in processes.superlink(1, tmp_path)


def test_a_project_says_what_to_replace(tmp_path: Path) -> None:
    project.init(tmp_path / "p", ["a", "b"], host="example.org", port=443)
    assert yaml.safe_load((tmp_path / "p" / "server" / "server.yaml").read_text())["host"] == "0.0.0.0"
    for file in ("federation.yaml", "server/server.yaml", "nodes/a/node.yaml"):
        text = (tmp_path / "p" / file).read_text().lower()
        assert "replace" in text or "in production" in text
    for secret in ("server/server.key", "authority/ca.key", "nodes/a/node.key"):
        assert (tmp_path / "p" / secret).stat().st_mode & 0o077 == 0
    assert project.open_node(tmp_path / "p" / "nodes" / "b").client == 1
