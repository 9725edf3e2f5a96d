"""The real thing: the tutorial followed, four methods between processes, and strangers at the gate."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import threading
from pathlib import Path

import pandas as pd
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

from flwr.proto.control_pb2 import ListRunsRequest

import coterie
from coterie.algorithms import registry
from coterie.federation import project
from coterie.federation.flower import certificates, processes
from coterie.federation.flower._control_internals import SuperLinkControl
from coterie.federation.flower.control import Control
from coterie.federation.flower.superlink_door import HEADER, pass_of
from coterie.runs.storage import events
from tests.federation.conftest import OTHERS, ROUNDS, TUTORIALS, Followed, local_view
from tests.federation.grid import compare
from tests.federation.running import PATIENCE, flwr

pytestmark = pytest.mark.processes


def test_the_tutorial_shows_what_it_says(followed: Followed, printed: dict[str, str]) -> None:
    run, status, models, show = printed
    assert run == f"coterie federate run demo {TUTORIALS} --rounds {ROUNDS}"
    assert f"{TUTORIALS}-1" in printed[run]
    assert [re.search(rf"{member}\W+online\b", printed[status]) is not None for member in followed.members] == [
        True
    ] * 3
    assert printed[status].count(f"round {ROUNDS} of {ROUNDS}, finished") == 1 + len(OTHERS)
    assert registry.title(TUTORIALS) in printed[models] and "accuracy" in printed[models]
    assert registry.title(TUTORIALS) in printed[show]
    for member in followed.members:
        assert len(project.read_models(followed.federation.folder / "nodes" / member)) == 1 + len(OTHERS)


@pytest.mark.parametrize("name", [TUTORIALS, *OTHERS])
def test_the_models_are_those_of_the_loop_engine(
    followed: Followed, printed: dict[str, str], tmp_path: Path, name: str
) -> None:
    run = followed.federation.folder / "runs" / f"{name}-1"
    compare(local_view(followed), name, ROUNDS, run, tmp_path)
    assert sorted(event.what for event in events.read(run)) == ["began", *["joined"] * 3]


def test_the_run_folder_reads_like_a_simulations(followed: Followed, printed: dict[str, str]) -> None:
    result = coterie.load(followed.federation.folder / "runs" / f"{TUTORIALS}-1")
    assert result.finished
    assert result.summary["personal"]["final"]["mean"] > 0.5
    assert result.timings["round"].tolist() == [1, 2, 3]
    assert result.weight_rounds == [1, 2, 3]
    local = local_view(followed)
    held = result.shares.set_index("client")
    assert held.index.tolist() == [0, 1, 2]
    assert (held[["train", "validation", "test"]].sum(axis=1) == [len(each) for each in local.datasets]).all()
    up = result.metrics.query("metric == 'bytes_up'")
    assert up["round"].tolist() == [1, 2, 3]
    assert isinstance(result.metrics, pd.DataFrame)


def test_only_nodes_with_a_registered_key_and_tls_come_in(
    followed: Followed, printed: dict[str, str], tmp_path: Path
) -> None:
    folder = followed.federation.folder
    ca, address = folder / "server" / "ca.crt", f"127.0.0.1:{followed.port}"
    certificates.make_node_key(tmp_path, "stranger")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    certificates.make_authority(foreign)
    own = folder / "nodes" / followed.members[0] / "node.key"

    def supernode(authority: Path, key: Path | None) -> list[str]:
        """Give the command line of Flower's own program."""
        return [
            *(processes._program("flower-supernode"), "--superlink", address, "--root-certificates", str(authority)),
            *(() if key is None else ("--auth-supernode-private-key", str(key))),
            *("--isolation", "process", "--host", "127.0.0.1", "--port", str(processes.free_port())),
        ]

    attempts = {
        "unregistered": supernode(ca, tmp_path / "node.key"),
        "keyless": supernode(ca, None),
        "another authority": supernode(foreign / "ca.crt", own),
    }
    plain = [part for part in supernode(ca, None) if part not in ("--root-certificates", str(ca))]
    attempts["plain text"] = [*plain, "--insecure"]
    reasons = {
        "unregistered": "Failed to activate SuperNode",
        "keyless": "SuperNode authentication is enabled",
        "another authority": "CERTIFICATE_VERIFY_FAILED",
        "plain text": "Exit Code: 305",  # the connection could not be established
    }
    before = online(followed)
    said: dict[str, str] = {}

    def attempt(name: str) -> None:
        said[name] = refusal(attempts[name], tmp_path / name.replace(" ", "-"))

    threads = [threading.Thread(target=attempt, args=(name,)) for name in attempts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, reason in reasons.items():
        assert reason in said[name], f"{name}: {said[name]}"
    assert online(followed) == before
    with socket.create_connection(("127.0.0.1", followed.port), timeout=60) as raw:
        raw.sendall(b"POST /v1/fleet/pull-messages HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n")
        assert b"HTTP" not in raw.recv(2**16)


def refusal(command: list[str], folder: Path) -> str:
    """Start a SuperNode that must not come in, and give what it says when it ends."""
    limits = [*command, "--max-retries", "1", "--max-wait-time", "5"]
    process = processes.start(limits, processes.environment(folder), folder / "log")
    try:
        assert process.wait(timeout=PATIENCE) != 0
    finally:
        processes.stop(process)
    return (folder / "log").read_text()


def online(followed: Followed) -> dict[str, str]:
    found = control(followed).statuses()
    assert list(found.values()) == ["online"] * 3
    return found


def control(followed: Followed) -> Control:
    return Control(followed.federation.folder / "server", followed.port + 1)


def test_a_strangers_submission_is_refused(followed: Followed, printed: dict[str, str], tmp_path: Path) -> None:
    """Whoever reaches a port of the server's, with the right certificate, can neither submit nor look."""
    folder = followed.federation.folder
    gate = (f"127.0.0.1:{followed.port}", folder / "server" / "ca.crt")
    inside = (f"127.0.0.1:{followed.port + 1}", folder / "server" / "inside" / "ca.crt")
    before = runs(followed)
    assert len(before) == 1 + len(OTHERS)
    for command in (["run", str(folder / "app")], ["list"]):
        assert not flwr(tmp_path / "stranger", *gate, *command)["success"]
        assert not flwr(tmp_path / "account", *inside, *command)["success"]
    assert runs(followed) == before
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
        assert status(followed, "POST", path) == 403, path
    assert status(followed, "GET", "/v1/fleet/pull-messages") == 403
    # The gate itself is open for what nodes call, and Flower asks those for their key.
    assert status(followed, "POST", "/v1/fleet/pull-messages") in (400, 401)


def runs(followed: Followed) -> list[int]:
    """List all runs, as the server's user can."""
    inside = followed.federation.folder / "server" / "inside"
    headers = {HEADER: pass_of((inside / "secret").read_bytes())}
    superlink = SuperLinkControl(f"127.0.0.1:{followed.port + 1}", (inside / "ca.crt").read_bytes(), headers)
    with contextlib.closing(superlink):
        return sorted(superlink._client.ListRuns(ListRunsRequest(limit=100)).run_dict)


def status(followed: Followed, method: str, path: str) -> int:
    """Speak HTTP by hand: a client library would tidy the path up."""
    context = ssl.create_default_context(cafile=str(followed.federation.folder / "server" / "ca.crt"))
    request = f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/protobuf\r\n"
    with (
        socket.create_connection(("127.0.0.1", followed.port), timeout=60) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as connection,
    ):
        connection.sendall(f"{request}Content-Length: 0\r\nConnection: close\r\n\r\n".encode())
        return int(connection.recv(2**16).split()[1])
