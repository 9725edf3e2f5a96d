"""Connections at the gate: strangers that hold many keep no member out."""

from __future__ import annotations

import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

from coterie.errors import ConfigError
from coterie.federation.flower import certificates, key_claims, processes
from coterie.federation.flower.callers import Callers, listen
from coterie.federation.flower.expiry import read_certificate
from coterie.federation.flower.gate_server import GateServer
from coterie.federation.flower.key_claims import KeyClaim
from tests.federation.test_gate import MEMBER, STRANGER, openssh, signed

HOST = "127.0.0.1"


@contextmanager
def gate(folder: Path, callers: Callers) -> Iterator[int]:
    """Serve a gate without a SuperLink, which is reached by nobody here."""
    certificates.make_authority(folder)
    certificates.make_server_certificate(folder, folder, [HOST])
    certificates.make_inside(processes.internal_certificates(folder))
    port, ready, over = processes.free_port(), threading.Event(), threading.Event()
    server = GateServer(folder, (HOST, port), 1, [openssh(MEMBER)], 1000, lambda line: None, callers)
    # Signals reach the main thread alone, and this is another.
    serving = threading.Thread(target=lambda: server._server.run(list(listen(HOST, port, callers))), daemon=True)
    watching = threading.Thread(target=server._watch, args=(ready.set, over.is_set), daemon=True)
    serving.start()
    watching.start()
    try:
        assert ready.wait(60)
        yield port
    finally:
        over.set()
        serving.join(60)
        watching.join(60)
    assert not serving.is_alive()


def connect(port: int) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=60)


def in_tls(port: int, ca: Path) -> ssl.SSLSocket:
    return ssl.create_default_context(cafile=str(ca)).wrap_socket(connect(port), server_hostname=HOST)


def claims(tls: socket.socket, key: object = MEMBER, holder: str = "a" * 32) -> bytes:
    """Make a signed call that the gate answers by itself, and give the answer's first line."""
    body = f'{{"holder": "{holder}"}}'.encode()
    lines = [b"POST " + key_claims.PATH.encode() + b" HTTP/1.1", b"host: gate", b"content-length: %d" % len(body)]
    lines += [name + b": " + value for name, value in signed(key)]  # type: ignore[arg-type]
    tls.sendall(b"\r\n".join([*lines, b"", body]))
    answer = b""
    while b"\r\n\r\n" not in answer and (piece := tls.recv(4096)):
        answer += piece
    return answer.split(b"\r\n", 1)[0]


def is_closed(connection: socket.socket, within: float = 60.0) -> bool:
    connection.settimeout(within)
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_of_many_silent_connections_the_oldest_are_closed_and_a_member_gets_through(tmp_path: Path) -> None:
    with gate(tmp_path, Callers(strangers=5, seconds=3600.0)) as port, ExitStack() as stack:
        member = stack.enter_context(in_tls(port, tmp_path / "ca.crt"))
        assert b" 200 " in claims(member)
        silent = [stack.enter_context(connect(port)) for _ in range(6)]
        silent += [stack.enter_context(in_tls(port, tmp_path / "ca.crt")) for _ in range(6)]
        assert all(is_closed(each) for each in silent[:7])
        assert not any(is_closed(each, 0.2) for each in silent[-4:])
        assert b" 200 " in claims(member)  # whose connection is older than theirs
        assert b" 200 " in claims(stack.enter_context(in_tls(port, tmp_path / "ca.crt")))


def test_a_connection_without_a_members_call_is_closed_in_time(tmp_path: Path) -> None:
    with gate(tmp_path, Callers(seconds=1.0)) as port, ExitStack() as stack:
        silent, shaking = stack.enter_context(in_tls(port, tmp_path / "ca.crt")), stack.enter_context(connect(port))
        refused, member = [stack.enter_context(in_tls(port, tmp_path / "ca.crt")) for _ in range(2)]
        assert b" 401 " in claims(refused, STRANGER)
        assert b" 200 " in claims(member)
        assert is_closed(silent) and is_closed(shaking)
        while refused.recv(4096):  # what the answer said
            pass
        time.sleep(1.5)
        assert b" 200 " in claims(member)


def test_a_member_holds_so_many_connections_and_no_more(tmp_path: Path) -> None:
    with gate(tmp_path, Callers(of_a_member=3)) as port, ExitStack() as stack:
        own = [stack.enter_context(in_tls(port, tmp_path / "ca.crt")) for _ in range(5)]
        for each in own:
            assert b" 200 " in claims(each)
        for each in own[:2]:
            each.settimeout(60)
            while each.recv(4096):
                pass
        assert all(b" 200 " in claims(each) for each in own[2:])


def test_a_node_learns_from_its_claim_when_the_servers_certificate_ends(tmp_path: Path) -> None:
    with gate(tmp_path, Callers()) as port:
        claim = KeyClaim(f"{HOST}:{port}", tmp_path / "ca.crt", MEMBER, tmp_path, lambda line: None)
        claim.wait()
    assert claim.server_certificate_ends == read_certificate(tmp_path / "server.crt").not_valid_after_utc


def test_from_where_most_come_one_goes() -> None:
    callers = Callers(strangers=3)
    pairs = [socket.socketpair() for _ in range(5)]
    try:
        for (near, _), peer in zip(pairs, [("x", 1), ("y", 1), ("y", 2), ("y", 3), ("y", 4)], strict=True):
            callers.came(near, peer)
        assert [is_closed(far, 0.1) for _, far in pairs] == [False, True, True, False, False]
    finally:
        for pair in pairs:
            for each in pair:
                each.close()


def test_a_port_that_is_taken_is_one_sentence() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"cannot listen on {HOST}:{port} \(.*\): is another server running\?"):
            listen(HOST, port, Callers())
