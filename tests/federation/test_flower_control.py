"""The SuperLink lets in the roster's keys and no others, against Flower's own handlers and state."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID, Status
from flwr.proto.control_pb2 import ListRunsResponse
from flwr.proto.run_pb2 import Run, RunStatus
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.auth.typing import AccountInfo
from flwr.supercore.error import FlowerError
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.servicer.control import control_handlers

from coterie.errors import ConfigError
from coterie.federation.flower import _control_internals, certificates
from coterie.federation.flower.control import Control

pytestmark = pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")  # of Flower's migrations

OWNER = AccountInfo(flwr_aid=NOOP_FLWR_AID, account_name=NOOP_ACCOUNT_NAME)


class SuperLink:
    """Flower's own handlers on a state of its own, without the network."""

    def __init__(self, folder: Path) -> None:
        factory = LinkStateFactory(str(folder / "superlink.db"), NoOpFederationManager(), ObjectStoreFactory())
        self._state = factory.state()
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        handler = {
            "ListNodes": control_handlers.list_nodes,
            "RegisterNode": control_handlers.register_node,
            "UnregisterNode": control_handlers.unregister_node,
        }[name]

        def call(request: Any) -> Any:
            self.calls.append(name)
            try:
                return handler(request, OWNER, self._state)
            except FlowerError as error:
                answer = httpx.Response(409, text=str(error), request=httpx.Request("POST", "https://superlink"))
                raise httpx.HTTPStatusError("refused", request=answer.request, response=answer) from error

        return call

    def close(self) -> None:
        pass


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SuperLink:
    found = SuperLink(tmp_path)
    monkeypatch.setattr(_control_internals.ControlHttpClient, "from_server_address", lambda *given: found)
    certificates.make_inside(tmp_path / "inside")
    return found


def keys(tmp_path: Path, *names: str) -> dict[str, str]:
    found = {}
    for name in names:
        (tmp_path / name).mkdir()
        found[name] = certificates.make_node_key(tmp_path / name, name)
    return found


def test_who_left_the_roster_is_let_in_no_more(link: SuperLink, tmp_path: Path) -> None:
    roster, there = keys(tmp_path, "north", "south", "west"), Control(tmp_path, 9093)
    there.enrol({name: roster[name] for name in ("north", "south")})
    assert sorted(there.statuses().values()) == ["registered"] * 2
    there.enrol({name: roster[name] for name in ("south", "west")})
    bare = {" ".join(roster[name].split()[:2]) for name in ("south", "west")}
    assert there.statuses().keys() == bare


def test_a_roster_that_is_as_before_changes_nothing(link: SuperLink, tmp_path: Path) -> None:
    roster, there = keys(tmp_path, "north", "south"), Control(tmp_path, 9093)
    there.enrol(roster)
    link.calls.clear()
    there.enrol(roster)
    assert link.calls == ["ListNodes"]


def test_a_key_that_was_taken_out_is_not_taken_again(link: SuperLink, tmp_path: Path) -> None:
    roster, there = keys(tmp_path, "north", "south"), Control(tmp_path, 9093)
    there.enrol(roster)
    there.enrol({"north": roster["north"]})
    with pytest.raises(ConfigError, match="the key of 'south' was taken out of the roster before: give the member a"):
        there.enrol(roster)


def test_a_key_that_flower_cannot_use_is_named(link: SuperLink, tmp_path: Path) -> None:
    other = ed25519.Ed25519PrivateKey.generate().public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    there = Control(tmp_path, 9093)
    with pytest.raises(ConfigError, match="the key of 'north' is not one of a NIST curve"):
        there.enrol({"north": other.decode()})
    with pytest.raises(ConfigError, match="the key of 'north' is not a public key of OpenSSH's: make one with ssh-key"):
        there.enrol({"north": "ecdsa-sha2-nistp384 nonsense"})
    assert link.calls == []


def test_what_an_earlier_server_left_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    there = {1: Status.FINISHED, 2: Status.RUNNING, 3: Status.PENDING, 4: Status.STARTING}
    runs = {number: Run(run_id=number, status=RunStatus(status=status)) for number, status in there.items()}
    stopped: list[int] = []
    client = SimpleNamespace(
        ListRuns=lambda request: ListRunsResponse(run_dict=runs),
        StopRun=lambda request: stopped.append(request.run_id),
        close=lambda: None,
    )
    monkeypatch.setattr(_control_internals.ControlHttpClient, "from_server_address", lambda *given: client)
    certificates.make_inside(tmp_path / "inside")
    Control(tmp_path, 9093).stop_unfinished()
    assert sorted(stopped) == [2, 3, 4]
    assert not Control(tmp_path, 9093).is_over(2)


def test_a_server_that_is_not_running_is_said_to_be(tmp_path: Path) -> None:
    certificates.make_inside(tmp_path / "inside")
    with pytest.raises(ConfigError, match=r"the SuperLink at 127.0.0.1:1 does not answer: is the server running\?"):
        Control(tmp_path, 1).statuses()
