"""A node that was killed is let in again at once, against Flower's own handlers and state."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

from flwr.common.constant import NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.server.superlink.linkstate import LinkStateFactory
from flwr.supercore.constant import NodeStatus
from flwr.supercore.error import FlowerError
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.superlink.federation import NoOpFederationManager
from flwr.superlink.servicer.fleet import fleet_handlers

from coterie.federation.flower import _internals, _node_internals, certificates
from coterie.federation.flower._node_internals import NodeCalls
from coterie.federation.flower.activation import activate

pytestmark = pytest.mark.filterwarnings("ignore:No path_separator found:DeprecationWarning")  # of Flower's migrations


class SuperLink:
    """Flower's book of nodes, with one node that is registered."""

    def __init__(self, folder: Path) -> None:
        self.key, self.id_file = folder / "node.key", folder / "supernode.id"
        certificates.make_node_key(folder, "node")
        self.public = _internals.stored_key(certificates.read_node_key(self.key).public_key())
        factory = LinkStateFactory(str(folder / "superlink.db"), NoOpFederationManager(), ObjectStoreFactory())
        self._state = factory.state()
        self.node_id = self._state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, self.public, 0)
        self.answers = True

    def ActivateNode(self, request: Any) -> Any:
        return self._call(lambda: fleet_handlers.activate_node(request, self._state))

    def DeactivateNode(self, request: Any) -> Any:
        return self._call(lambda: fleet_handlers.deactivate_node(request, self._state))

    def close(self) -> None:
        pass

    def _call(self, handler: Any) -> Any:
        if not self.answers:
            raise httpx.ConnectError("nobody is there")
        try:
            return handler()
        except FlowerError as error:
            answer = httpx.Response(409, text=str(error), request=httpx.Request("POST", "https://superlink"))
            raise httpx.HTTPStatusError("refused", request=answer.request, response=answer) from error

    def start(self) -> bool:
        """Start a node as far as its activation; say whether it is let in."""
        try:
            return (
                activate(NodeCalls("gate:1", b"", certificates.read_node_key(self.key)), self.id_file) == self.node_id
            )
        except httpx.HTTPError:
            return False

    def status(self) -> str:
        (found,) = self._state.get_node_info(node_ids=[self.node_id])
        return str(found.status)


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SuperLink:
    found = SuperLink(tmp_path)
    client = SimpleNamespace(from_server_address=lambda *given: found)
    monkeypatch.setattr(_node_internals, "FleetHttpClient", client)
    return found


def test_a_node_that_was_killed_is_let_in_again(link: SuperLink) -> None:
    assert link.start()
    assert int(link.id_file.read_text()) == link.node_id
    assert link.status() == NodeStatus.ONLINE  # as after a kill: nobody said goodbye
    assert not link._state.activate_node(link.node_id, 30)  # Flower's own rule, on which this rests
    assert link.start()


def test_a_node_that_another_superlink_knew_by_another_id_learns_its_new_one(link: SuperLink) -> None:
    link.id_file.write_text("17\n")
    assert link.start()
    assert int(link.id_file.read_text()) == link.node_id


def test_a_server_that_is_not_there_lets_nobody_in(link: SuperLink) -> None:
    link.answers = False
    assert not link.start()
    assert not link.id_file.exists()


def test_an_id_that_is_none_is_as_good_as_no_id(link: SuperLink) -> None:
    assert link.start()
    link.id_file.write_text("\0\0\0")
    assert not link.start()
    assert link.status() == NodeStatus.ONLINE


def test_without_an_id_the_node_that_counts_as_running_stays(link: SuperLink) -> None:
    assert link._state.activate_node(link.node_id, 30)
    assert not link.start()
