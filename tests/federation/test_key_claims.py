"""One node at a time for a key: a copy of a node's folder is told to stop, and what stands in its way is said."""

from __future__ import annotations

import shutil
import ssl
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

import httpx

from coterie.errors import ConfigError
from coterie.federation.flower import key_claims
from coterie.federation.flower.key_claims import KeyClaim, holder_of
from tests.federation.test_gate import MEMBER, STRANGER, Called


class World:
    """A gate, a clock of ours, and what nodes say."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.said, self.folder = 1000.0, [], folder
        self.called = Called(folder)
        self.fails: Exception | None = None
        self.status: int | None = None
        monkeypatch.setattr(key_claims, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep))
        monkeypatch.setattr(httpx, "Client", lambda **how: self)
        monkeypatch.setattr(ssl, "create_default_context", lambda **how: None)

    said: list[str]

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __enter__(self) -> World:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def post(self, url: str, content: str, headers: dict[str, str]) -> httpx.Response:
        assert url == "https://gate:1" + key_claims.PATH
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        if self.status is not None:
            return httpx.Response(self.status)
        sent = [(name.encode(), value.encode()) for name, value in headers.items()]
        return httpx.Response(self.called.post(sent, [content.encode()], key_claims.PATH))

    def claim(self, folder: Path, key: Any = MEMBER) -> KeyClaim:
        folder.mkdir(exist_ok=True)
        return KeyClaim("gate:1", self.folder / "ca.crt", key, folder, self.said.append)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    return World(tmp_path, monkeypatch)


def test_a_copy_of_a_nodes_folder_ends_with_a_sentence_and_the_node_goes_on(world: World, tmp_path: Path) -> None:
    node = world.claim(tmp_path / "node")
    node.wait()
    shutil.copytree(tmp_path / "node", tmp_path / "copy")
    copy = world.claim(tmp_path / "copy")
    sleep = world.sleep

    def renewing(seconds: float) -> None:  # the node's own thread, on our clock
        sleep(seconds)
        node.wait()

    world.sleep = renewing  # type: ignore[method-assign]
    key_claims.time.sleep = renewing  # type: ignore[assignment]
    with pytest.raises(ConfigError, match=r"another node runs with the key of this one.*: stop one of them"):
        copy.wait()
    assert world.said == ["another node runs with the key of this one, as the server at gate:1 sees it; trying again"]


def test_a_node_that_was_killed_starts_again_at_once_and_one_that_was_moved_after_a_while(
    world: World, tmp_path: Path
) -> None:
    world.claim(tmp_path / "node").wait()
    began = world.now
    world.claim(tmp_path / "node").wait()  # the same folder
    assert world.now == began and world.said == []
    world.claim(tmp_path / "elsewhere").wait()  # nobody renews the first one's
    assert 45 <= world.now - began <= 60
    assert world.said[-1] == "the server at gate:1 lets the node in"


def test_who_lost_the_key_to_another_learns_it(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, other = world.claim(tmp_path / "node"), world.claim(tmp_path / "other")
    node.wait()
    world.now += 100.0  # the machine slept
    other.wait()
    monkeypatch.setattr(key_claims, "_RENEW", 0.0)
    node._renew(threading.Event())
    assert node.lost == "another node runs with the key of this one, as the server at gate:1 sees it"


def test_a_claim_is_let_go_of_at_the_end(world: World, tmp_path: Path) -> None:
    node = world.claim(tmp_path / "node")
    node.wait()
    with node.renewed():
        pass
    began = world.now
    world.claim(tmp_path / "other").wait()
    assert world.now == began


def test_a_key_that_is_not_in_the_roster_is_refused_at_once(world: World, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not let this node in: its key is not in the roster there"):
        world.claim(tmp_path / "node", STRANGER).wait()


@pytest.mark.parametrize(
    ("trouble", "words"),
    [
        (httpx.ConnectError("[Errno 111] Connection refused"), "does not answer"),
        (httpx.ReadTimeout("slow"), "does not answer"),
        (
            httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: certificate has expired"),
            "does not have a valid certificate",
        ),
        (503, "answers with an error (503)"),
    ],
)
def test_what_may_pass_is_said_and_waited_for(
    world: World, tmp_path: Path, trouble: Exception | int, words: str
) -> None:
    if isinstance(trouble, int):
        world.status = trouble

        def sleep(seconds: float) -> None:
            world.status = None

        key_claims.time.sleep = sleep  # type: ignore[assignment]
    else:
        world.fails = trouble
    world.claim(tmp_path / "node").wait()
    first, last = world.said
    assert first.startswith("the server at gate:1 ") and first.endswith("; trying again")
    assert words in first
    assert last == "the server at gate:1 lets the node in"


def test_another_authority_is_refused_unless_the_server_was_trusted_before(world: World, tmp_path: Path) -> None:
    foreign = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: unable to get local issuer certificate"
    node = world.claim(tmp_path / "node")
    world.fails = httpx.ConnectError(foreign)
    with pytest.raises(ConfigError, match=r"is not the one that the node's ca.crt vouches for .*local issuer"):
        node.wait()
    node.wait()
    world.fails = httpx.ConnectError(foreign)  # ca.crt is about to be replaced
    node.wait()
    assert len(world.said) == 2


def test_a_server_that_knows_no_claims_is_taken_as_it_is(world: World, tmp_path: Path) -> None:
    world.status = 403
    world.claim(tmp_path / "node").wait()
    assert world.said == []


def test_a_folder_keeps_its_name_where_it_is_moved_and_a_copy_has_another(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    name = holder_of(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    assert holder_of(tmp_path / "b") != name
    (tmp_path / "a").rename(tmp_path / "c")
    assert holder_of(tmp_path / "c") == name
