"""A node's messages are answered one by one, and none of them can hold up the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

from flwr.app import Context, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.constant import SubStatus
from flwr.common.serde import context_to_proto, message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.runtime_pb2 import (
    AcquireTaskResponse,
    PullAppMessagesResponse,
    PullTaskInputResponse,
    PushAppMessagesResponse,
    SendTaskHeartbeatResponse,
)
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.task_identity import TaskIdentity

from coterie.federation.flower import _internals, executor
from coterie.federation.flower.executor import Executor
from coterie.federation.flower.messages import content_of


class Offer:
    """One message as a SuperNode offers it: its task first, then the message, then what it consists of."""

    def __init__(self, block: bytes) -> None:
        message = Message(content_of(block), dst_node_id=1, message_type="query", ttl=600.0)
        self.tree = get_object_tree(message)
        self.proto = message_to_proto(remove_content_from_message(message))  # a SuperNode keeps it as objects
        self.proto.metadata.message_id = self.tree.object_id
        self.objects = {name: each.deflate() for name, each in get_all_nested_objects(message).items()}
        self.is_stored, self.is_complete, self.is_started = True, True, False
        self.replied, self.error, self.status, self.answers = False, "", "", ""


class SuperNode:
    """Stands for the SuperNode's tasks, by token."""

    def __init__(self) -> None:
        self.offers: dict[str, Offer] = {}
        self.claimed: set[str] = set()

    def client(self, address: str, insecure: bool, ca: bytes, interceptors: tuple[Any, ...]) -> Any:
        return Client(self, interceptors)


class Client:
    def __init__(self, node: SuperNode, interceptors: tuple[Any, ...]) -> None:
        self._node, self._interceptors = node, interceptors

    @property
    def _offer(self) -> Offer:
        return self._node.offers[self._interceptors[1]._token]

    def AcquireTask(self, request: Any) -> AcquireTaskResponse:
        free = [token for token in self._node.offers if token not in self._node.claimed]
        self._node.claimed.update(free[:1])
        return AcquireTaskResponse(token=free[0] if free else "")

    def SendTaskHeartbeat(self, request: Any) -> SendTaskHeartbeatResponse:
        return SendTaskHeartbeatResponse(success=True)

    def PullTaskInput(self, request: Any) -> PullTaskInputResponse:
        assert not self._offer.is_started, "a task is started once"
        self._offer.is_started = True
        context = Context(run_id=1, node_id=1, node_config={}, state=RecordDict(), run_config={})
        return PullTaskInputResponse(context=context_to_proto(context))

    def PullMessages(self, request: Any) -> PullAppMessagesResponse:
        if not self._offer.is_stored:
            return PullAppMessagesResponse()
        return PullAppMessagesResponse(messages_list=[self._offer.proto], message_object_trees=[self._offer.tree])

    def PullObject(self, request: Any) -> PullObjectResponse:
        if not self._offer.is_complete:
            return PullObjectResponse(object_found=True, object_available=False)
        content = self._offer.objects[request.object_id]
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:
        pass

    def PushMessages(self, request: Any) -> PushAppMessagesResponse:
        assert not self._offer.replied
        (reply,) = request.messages_list
        self._offer.replied, self._offer.error = True, reply.error.reason
        self._offer.answers = reply.metadata.reply_to_message_id
        return PushAppMessagesResponse()

    def PushObject(self, request: Any) -> None:
        raise AssertionError("nothing was asked for")

    def PushTaskOutput(self, request: Any) -> None:
        self._offer.status = request.sub_status

    def close(self) -> None:
        pass


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> SuperNode:
    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
    found = SuperNode()
    monkeypatch.setattr(_internals, "RuntimeHttpClient", SimpleNamespace(from_server_address=found.client))
    monkeypatch.setattr(executor, "_PAUSE", 0.0)
    monkeypatch.setattr(executor, "_LONGEST_PAUSE", 0.0)
    return found


@pytest.mark.parametrize("lacks", ["is_stored", "is_complete"])
def test_a_message_that_is_not_complete_waits_and_the_next_is_answered(node: SuperNode, lacks: str) -> None:
    node.offers = {"first": Offer(b"1"), "second": Offer(b"2")}
    setattr(node.offers["first"], lacks, False)
    heard: list[bytes] = []
    running = Executor("", b"", b"secret", lambda block: heard.append(block) or b"answer")  # type: ignore[func-returns-value]
    assert not running.once()
    assert running.once()
    assert not running.once()
    assert heard == [b"2"]
    assert (node.offers["second"].replied, node.offers["second"].status) == (True, SubStatus.COMPLETED)
    assert node.offers["second"].answers == node.offers["second"].tree.object_id
    assert not node.offers["first"].replied
    setattr(node.offers["first"], lacks, True)
    assert running.once()
    assert heard == [b"2", b"1"]
    assert node.offers["first"].status == SubStatus.COMPLETED
    running.close()


def test_a_message_that_is_never_complete_is_given_up(node: SuperNode, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_PATIENCE", 0.0)
    node.offers = {"first": Offer(b"1")}
    node.offers["first"].is_complete = False
    running = Executor("", b"", b"secret", lambda block: b"answer")
    assert running.once()
    assert (node.offers["first"].replied, node.offers["first"].status) == (False, SubStatus.FAILED)
    running.close()


def test_a_message_that_cannot_be_answered_gets_an_error_that_quotes_nothing(node: SuperNode) -> None:
    """A SuperNode that has handed a message on waits for a reply, and for ever."""
    node.offers = {"first": Offer(b"1"), "second": Offer(b"2")}

    def handle(block: bytes) -> bytes:
        if block == b"1":
            raise ValueError("patient 17")
        return b"answer"

    running = Executor("", b"", b"secret", handle)
    assert running.once()
    assert running.once()
    assert [offer.replied for offer in node.offers.values()] == [True, True]
    assert [offer.error for offer in node.offers.values()] == ["a ValueError was raised", ""]
    assert [offer.status for offer in node.offers.values()] == [SubStatus.COMPLETED, SubStatus.COMPLETED]
    running.close()


def test_a_supernode_that_refuses_the_reply_does_not_end_the_node(
    node: SuperNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Client, request: Any) -> None:
        raise httpx.HTTPError("403: the run is not running")

    node.offers = {"first": Offer(b"1")}
    monkeypatch.setattr(Client, "PushMessages", refuse)
    running = Executor("", b"", b"secret", lambda block: b"answer")
    assert running.once()
    assert not running.once()
    assert node.offers["first"].status == SubStatus.FAILED
    running.close()


def test_what_is_still_waited_for_is_let_go_of_at_the_end(node: SuperNode) -> None:
    node.offers = {"first": Offer(b"1")}
    node.offers["first"].is_stored = False
    running = Executor("", b"", b"secret", lambda block: b"answer")
    running.once()
    running.close()
    assert node.offers["first"].status == SubStatus.FAILED
