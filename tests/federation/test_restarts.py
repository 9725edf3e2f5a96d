"""What a server and a node do when their programs of Flower's end: start them again, or end with a sentence."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

from coterie.errors import ConfigError
from coterie.federation.flower import certificates, node_runner, processes, superlink
from coterie.federation.flower.node_runner import NodePlace, run_node
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


class FakeClaim:
    """A claim that the server grants, until it is lost."""

    def __init__(self, lives: int) -> None:
        self.waits, self.lives, self.lost, self.server_certificate_ends = 0, lives, "", None

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


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    certificates.make_node_key(tmp_path, "node")
    certificates.make_authority(tmp_path)
    said: list[str] = []
    found = SimpleNamespace(said=said, place=NodePlace(tmp_path, "gate:1", tmp_path / "ca.crt", tmp_path / "node.key"))

    def make(code: str, lives: int) -> Callable[[], None]:
        program = f"{code}\n{LISTEN}"
        claim = FakeClaim(lives)

        def command(server: str, ca: Path, key: Path, port: int, folder: Path) -> list[str]:
            return [sys.executable, "-S", "-c", program, str(port)]

        monkeypatch.setattr(processes, "supernode", command)
        monkeypatch.setattr(node_runner, "KeyClaim", lambda *given: claim)
        monkeypatch.setattr(node_runner, "deactivate_previous", lambda *given: None)
        pauses = SimpleNamespace(monotonic=time.monotonic, sleep=lambda seconds: time.sleep(min(seconds, 0.05)))
        monkeypatch.setattr(node_runner, "time", pauses)
        return lambda: run_node(found.place, {}, lambda block: block, said.append)

    found.make = make
    return found


def test_a_supernode_that_was_cut_off_is_started_again_until_the_key_is_anothers(node: Any) -> None:
    with pytest.raises(ConfigError, match="another node runs with the key of this one"):
        node.make("raise SystemExit(75)", lives=3)()
    log = node.place.log
    assert node.said == [
        f"the SuperNode was cut off from the server: see {log}; starting it again in {pause} s" for pause in (2, 4, 8)
    ]


def test_a_supernode_that_never_comes_to_life_ends_the_node_with_its_reason(
    node: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_runner, "_TRIES", 1)
    code = r"print('Exit Code: 305\nNo link.\n\nFor more information: x', flush=True); raise SystemExit(1)"
    with pytest.raises(ConfigError, match=r"the SuperNode ended with code 1 \(No link.\): see"):
        node.make(code, lives=9)()
    assert len(node.said) == 1


def test_a_supernode_that_runs_while_the_claim_is_lost_is_stopped(node: Any) -> None:
    with pytest.raises(ConfigError, match="another node runs with the key of this one"):
        node.make("", lives=0)()
    assert node.said == []
