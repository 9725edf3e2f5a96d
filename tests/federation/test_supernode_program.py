"""A SuperNode that can do nothing any more ends, where Flower's own goes on and does nothing."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

import httpx
from flwr.proto.fleet_pb2 import ActivateNodeResponse, PullMessagesResponse, RegisterNodeFleetResponse
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse
from flwr.proto.runtime_pb2 import PullAppMessagesRequest

from coterie.federation.flower import _internals, certificates, processes, supernode_program
from coterie.federation.flower._internals import messages_of

ANSWERS = {
    "register-node": RegisterNodeFleetResponse(node_id=1),
    "activate-node": ActivateNodeResponse(node_id=1),
    "send-node-heartbeat": SendNodeHeartbeatResponse(success=True),
    "pull-messages": PullMessagesResponse(),
}


class Server(ThreadingHTTPServer):
    """Answers a SuperNode's calls, but for those that fail."""

    fails: str = ""


class Calls(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        assert isinstance(self.server, Server)
        self.rfile.read(int(self.headers.get("content-length", 0)))
        name = self.path.rpartition("/")[2]
        found = ANSWERS.get(name)
        body = b"" if found is None else found.SerializeToString()
        self.send_response(500 if found is None or name == self.server.fails else 200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *more: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Calls) as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def start(server: Server, folder: Path, port: int) -> subprocess.Popen[bytes]:
    """Start a SuperNode that reaches a server without TLS."""
    certificates.make_inside(processes.internal_certificates(folder))
    command = processes.supernode(f"127.0.0.1:{server.server_port}", Path("none"), None, port, folder)
    at = command.index("--root-certificates")
    command[at : at + 2] = ["--insecure"]
    return processes.start(command, processes.environment(folder / "home"), folder / "log", private=True)


def test_another_user_of_the_machine_can_neither_take_a_message_nor_pose_as_the_supernode(
    server: Server, tmp_path: Path
) -> None:
    port = processes.free_port()
    process = start(server, tmp_path, port)
    try:
        processes.wait_for_port(port, process, "SuperNode", tmp_path / "log")
        inside = processes.internal_certificates(tmp_path)
        ca, secret = (inside / "ca.crt").read_bytes(), (inside / "secret").read_bytes()

        def claim(ca: bytes, secret: bytes) -> None:
            with contextlib.closing(messages_of(f"127.0.0.1:{port}", ca, secret)) as found:
                assert found.claim() is None

        claim(ca, secret)
        with pytest.raises(httpx.HTTPStatusError, match="401 Unauthorized"):
            claim(ca, b"guessed")
        certificates.make_inside(tmp_path / "anothers")
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            claim((tmp_path / "anothers" / "ca.crt").read_bytes(), secret)
        forged = _internals._runtime_client(f"127.0.0.1:{port}", ca, b"", "flwr-clientapp", "token")
        with contextlib.closing(forged), pytest.raises(httpx.HTTPStatusError, match="401 Unauthorized"):
            forged.PullMessages(PullAppMessagesRequest())
    finally:
        processes.stop(process)


@pytest.mark.parametrize("call", ["pull-messages", "send-node-heartbeat"])
def test_a_500_ends_a_supernode(server: Server, tmp_path: Path, call: str) -> None:
    server.fails = call
    process = start(server, tmp_path, processes.free_port())
    try:
        assert process.wait(timeout=120) == supernode_program.CUT_OFF, (tmp_path / "log").read_text()
    finally:
        processes.stop(process)
    said = processes.how_it_ended("SuperNode", process, tmp_path / "log")
    assert said == f"the SuperNode was cut off from the server: see {tmp_path / 'log'}"
    assert (tmp_path / "log").stat().st_mode & 0o077 == 0


def test_a_reason_that_another_process_wrote_before_is_not_this_ones(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("Exit Code: 305\nNo link.\n\nFor more information: x\n")
    process = processes.start([sys.executable, "-S", "-c", "raise SystemExit(3)"], {}, log)
    process.wait()
    said = processes.how_it_ended("SuperNode", process, log, begin=log.stat().st_size)
    assert said == f"the SuperNode ended with code 3: see {log}"
