"""What a server and a node do when their programs of Flower's end: start them again, or end with a sentence."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

from flwr.supercore.error import ApiErrorCode, FlowerError

from coterie.cli import federate
from coterie.errors import ConfigError
from coterie.federation import project
from coterie.federation.flower import certificates, node_runner, processes, superlink
from coterie.federation.flower._node_internals import said_by
from coterie.federation.flower.node_runner import NodePlace, run_node
from coterie.federation.flower.persistent_calls import CutOff
from coterie.federation.flower.superlink import SuperLink

LISTEN = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[1]))) as server:
    while True:
        server.accept()[0].close()
"""


def eventually(condition: Callable[[], object], what: str) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.02)


class FakeControl:
    """Stands for the calls to a SuperLink; notes which process they went to."""

    enrolled: list[int]

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder

    def stop_unfinished(self) -> None:
        pass

    def enrol(self, keys: Mapping[str, str]) -> None:
        if keys.get("north") == "wrong":
            raise ConfigError("the key of 'north' is wrong")
        type(self).enrolled.append(int((self._folder / "pid").read_text()))


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    code = f"import os, sys; open(sys.argv[2] + '/pid', 'w').write(str(os.getpid()))\n{LISTEN}"

    def command(port: int, folder: Path) -> list[str]:
        return [sys.executable, "-S", "-c", code, str(port), str(folder)]

    FakeControl.enrolled = []
    monkeypatch.setattr(superlink, "Control", FakeControl)
    monkeypatch.setattr(processes, "superlink", command)
    said: list[str] = []
    make = lambda **keys: SuperLink(tmp_path, processes.free_port(), keys, said.append)  # noqa: E731
    return SimpleNamespace(make=make, said=said, folder=tmp_path)


def test_a_superlink_that_was_killed_is_started_again_with_the_same_roster(link: Any) -> None:
    (link.folder / "superlink.db").touch(0o644)
    found = link.make(north="key")
    found.start()
    try:
        assert (link.folder / "superlink.db").stat().st_mode & 0o077 == 0
        (first,) = FakeControl.enrolled
        os.kill(first, signal.SIGKILL)
        eventually(lambda: len(FakeControl.enrolled) == 2, "it is back")
        assert FakeControl.enrolled[1] != first and found.failure is None
        assert link.said == [
            f"the SuperLink ended with code -9: see {link.folder / 'superlink.log'}; starting it again; a run that was "
            "under way goes on with --out of that run"
        ]
    finally:
        found.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(FakeControl.enrolled[1], 0)


def test_a_superlink_that_ends_again_and_again_is_given_up(link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(superlink, "_TRIES", 0)
    found = link.make()
    found.start()
    os.kill(FakeControl.enrolled[0], signal.SIGKILL)
    eventually(lambda: found.failure is not None, "it is given up")
    assert str(found.failure) == f"the SuperLink ended with code -9: see {link.folder / 'superlink.log'}"
    found.stop()


def test_what_is_wrong_at_the_start_is_raised_there(link: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="the key of 'north' is wrong"):
        link.make(north="wrong").start()
    monkeypatch.setattr(processes, "superlink", lambda *given: [sys.executable, "-S", "-c", "raise SystemExit(7)"])
    with pytest.raises(ConfigError, match="the SuperLink ended with code 7"):
        link.make().start()


def test_a_server_whose_superlink_is_given_up_ends_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project.init(tmp_path / "demo", ["north"], port=processes.free_port())

    @contextlib.contextmanager
    def given_up(folder: Path, *given: object) -> Iterator[object]:
        certificates.make_inside(processes.internal_certificates(folder))
        yield SimpleNamespace(failure=ConfigError("the SuperLink ended with code -9"))

    monkeypatch.setattr(superlink, "superlink", given_up)
    late = threading.Timer(60.0, os.kill, (os.getpid(), signal.SIGTERM))  # by which a server ends, too
    late.start()
    with pytest.raises(ConfigError, match=r"^the SuperLink ended with code -9$"):
        federate.server(tmp_path / "demo")  # not by Typer's runner, whose closed output uvicorn's log would keep
    assert late.is_alive(), "it ended only when it was told to"
    late.cancel()


class FakeClaim:
    """A claim that the server grants, until it is lost."""

    def __init__(self, lives: int) -> None:
        self.waits, self.lives, self.lost = 0, lives, ""
        self.server_certificate_ends: datetime | None = None

    def wait(self) -> None:
        self.waits += 1
        if self.waits > self.lives:
            self.lost = "another node runs with the key of this one"

    def renewed(self) -> FakeClaim:
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *error: object) -> None:
        pass


class FakeCalls:
    """Stands for a node's calls; of which the server refuses to let it in while it is ``closed``."""

    closed = False
    left: list[int]

    def __init__(self, server: str, ca: bytes, key: object) -> None:
        assert (server, ca[:10]) == ("gate:1", b"-----BEGIN")

    def __enter__(self) -> FakeCalls:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def activate(self) -> int:
        if self.closed:
            request = httpx.Request("POST", "https://server")
            answer = httpx.Response(409, text="no", request=request)
            raise httpx.HTTPStatusError("", request=request, response=answer)
        return 17

    def deactivate(self, node_id: int) -> None:
        self.left.append(node_id)


class FakeExecutor:
    """Ends at the first look for a message, as one does that was cut off, or never."""

    ends = True

    def __init__(self, calls: FakeCalls, node_id: int, handle: object) -> None:
        assert node_id == 17

    def once(self) -> bool:
        if self.ends:
            raise CutOff("it answered with 401")
        return False

    def close(self) -> None:
        pass


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    certificates.make_node_key(tmp_path, "node")
    certificates.make_authority(tmp_path)
    said: list[str] = []
    place = NodePlace(tmp_path, "gate:1", tmp_path / "ca.crt", tmp_path / "node.key")
    FakeCalls.left = []
    monkeypatch.setattr(node_runner, "NodeCalls", FakeCalls)
    monkeypatch.setattr(node_runner, "Executor", FakeExecutor)
    pauses = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: None)
    monkeypatch.setattr(node_runner, "time", pauses)

    def run(claim: FakeClaim) -> None:
        monkeypatch.setattr(node_runner, "KeyClaim", lambda *given: claim)
        run_node(place, lambda block: block, said.append)

    return SimpleNamespace(said=said, run=run, folder=tmp_path)


def test_a_node_that_was_cut_off_connects_again_until_the_key_is_anothers(node: Any) -> None:
    with pytest.raises(ConfigError, match="another node runs with the key of this one"):
        node.run(FakeClaim(lives=3))
    assert node.said == [
        f"the node was cut off from the server (it answered with 401); connecting again in {pause} s"
        for pause in (2, 4, 8)
    ]
    assert FakeCalls.left == [17] * 4
    assert (node.folder / "supernode.id").read_text() == "17\n"


def test_a_node_that_is_never_let_in_ends_with_the_reason(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_runner, "_TRIES", 1)
    monkeypatch.setattr(FakeCalls, "closed", True)
    with pytest.raises(ConfigError, match=r"^the server does not let the node in \(it answered with 409\)$"):
        node.run(FakeClaim(lives=9))
    assert len(node.said) == 1 and FakeCalls.left == []


def test_a_node_whose_claim_is_lost_stops(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeExecutor, "ends", False)
    claim = FakeClaim(lives=9)
    looks = iter(range(3))

    def once(self: FakeExecutor) -> bool:
        claim.lost = "another node runs with the key of this one" if next(looks, None) is None else ""
        return False

    monkeypatch.setattr(FakeExecutor, "once", once)
    with pytest.raises(ConfigError, match="another node runs with the key of this one"):
        node.run(claim)
    assert node.said == [] and FakeCalls.left == [17]


def test_a_node_warns_of_certificates_that_end(node: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (node.folder / "ca.key").unlink()
    certificates.make_authority(node.folder, days=20)
    claim = FakeClaim(lives=1)
    claim.server_certificate_ends = datetime.now(UTC) + timedelta(days=3.5)
    with pytest.raises(ConfigError):
        node.run(claim)
    first, second = node.said[:2]
    assert first.startswith(f"{node.folder / 'ca.crt'} ends in 19 days")
    assert second.startswith("the certificate of the server at gate:1 ends in 3 days")


def test_what_flower_says_of_a_refusal_is_told() -> None:
    request = httpx.Request("POST", "https://server")
    error = FlowerError(ApiErrorCode.FLEET_NODE_ACTIVATION_FAILED, "inside")
    text = json.dumps(error.to_json("Failed to activate SuperNode."))
    refused = httpx.HTTPStatusError("", request=request, response=httpx.Response(409, text=text, request=request))
    assert said_by(refused) == "Failed to activate SuperNode."
    assert said_by(httpx.ConnectError("nobody\nis there")) == "nobody is there"
