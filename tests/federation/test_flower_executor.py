"""A node's messages are answered one by one, and none of them can hold up the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: these tests need coterie[federation]")

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeResponse, PullMessagesRequest, PullMessagesResponse, PushMessagesResponse
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatResponse
from flwr.proto.message_pb2 import PullObjectResponse, PushObjectResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree, iterate_object_tree
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.protobuf.client import ProtobufRequestContext
from flwr.supercore.task_identity import TaskIdentity

from coterie.federation.flower import _node_internals, executor, persistent_calls
from coterie.federation.flower._internals import NodeSignatures
from coterie.federation.flower._node_internals import NodeCalls
from coterie.federation.flower.certificates import to_openssh
from coterie.federation.flower.executor import Executor
from coterie.federation.flower.messages import content_of, take_block
from coterie.federation.flower.persistent_calls import CutOff

NODE = 5


class Offer:
    """One message as a SuperLink offers it: its head first, then what it consists of."""

    def __init__(self, block: bytes) -> None:
        message = Message(content_of(block), dst_node_id=NODE, message_type="query", ttl=600.0)
        self.tree = get_object_tree(message)
        self.proto = message_to_proto(remove_content_from_message(message))  # a SuperLink keeps it as objects
        self.proto.metadata.message_id = self.tree.object_id
        self.objects = {name: each.deflate() for name, each in get_all_nested_objects(message).items()}
        self.is_there, self.is_complete, self.is_confirmed = True, True, False


class SuperLink:
    """Stands for a SuperLink's calls for nodes; what a call ``fails`` with is raised so often."""

    def __init__(self) -> None:
        self.offers: list[Offer] = []
        self.given: list[Offer] = []
        self.replies: dict[str, Any] = {}
        self.parts: dict[str, bytes] = {}
        self.fails: dict[str, list[httpx.HTTPError]] = {}
        self.is_known = True
        self.activations: list[str] = []

    def block(self, offer: Offer) -> bytes:
        """Put the reply to a message together."""
        tree = self.replies[offer.tree.object_id][1]
        contents = {each.object_id: self.parts[each.object_id] for each in iterate_object_tree(tree)}
        found = inflate_object_from_contents(tree.object_id, contents)
        assert isinstance(found, Message)
        block = take_block(found)
        assert isinstance(block, bytes)
        return block

    def error(self, offer: Offer) -> str:
        return str(self.replies[offer.tree.object_id][0].error.reason)

    def _reach(self, call: str) -> None:
        if self.fails.get(call):
            raise self.fails[call].pop(0)

    def ActivateNode(self, request: Any) -> ActivateNodeResponse:
        self.activations.append("in")
        return ActivateNodeResponse(node_id=NODE)

    def DeactivateNode(self, request: Any) -> None:
        self.activations.append("out")
        if self.activations.count("out") > 1:
            raise answer(409)

    def SendNodeHeartbeat(self, request: Any) -> SendNodeHeartbeatResponse:
        self._reach("SendNodeHeartbeat")
        return SendNodeHeartbeatResponse(success=self.is_known)

    def PullMessages(self, request: PullMessagesRequest) -> PullMessagesResponse:
        self._reach("PullMessages")
        assert request.node.node_id == NODE
        if not self.offers:
            return PullMessagesResponse()
        self.given.append(self.offers.pop(0))
        return PullMessagesResponse(messages_list=[self.given[-1].proto], message_object_trees=[self.given[-1].tree])

    def PullObject(self, request: Any) -> PullObjectResponse:
        self._reach("PullObject")
        (offer,) = [each for each in self.given if request.object_id in each.objects]
        if not offer.is_there or offer.is_confirmed:
            return PullObjectResponse(object_found=False)
        if not offer.is_complete:
            return PullObjectResponse(object_found=True, object_available=False)
        content = offer.objects[request.object_id]
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:
        (offer,) = [each for each in self.given if each.tree.object_id == request.message_object_id]
        offer.is_confirmed = True
        self._reach("ConfirmMessageReceived")  # after it has taken effect

    def PushMessages(self, request: Any) -> PushMessagesResponse:
        self._reach("PushMessages")
        (reply,), (tree,) = request.messages_list, request.message_object_trees
        self.replies[reply.metadata.reply_to_message_id] = reply, tree
        wanted = [each.object_id for each in iterate_object_tree(tree)]
        return PushMessagesResponse(objects_to_push=wanted, session_id="session")

    def PushObject(self, request: Any) -> PushObjectResponse:
        self._reach("PushObject")
        assert request.session_id == "session"
        self.parts[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)

    def close(self) -> None:
        pass


def answer(status: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://server")
    return httpx.HTTPStatusError("", request=request, response=httpx.Response(status, request=request))


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> SuperLink:
    for name in ("run_id", "node_id", "task_id"):
        monkeypatch.setattr(TaskIdentity, f"_{name}", 1)
    found = SuperLink()
    client = SimpleNamespace(from_server_address=lambda *given: found)
    monkeypatch.setattr(_node_internals, "FleetHttpClient", client)
    monkeypatch.setattr(executor, "_PAUSE", 0.0)
    monkeypatch.setattr(executor, "_LONGEST_PAUSE", 0.0)
    monkeypatch.setattr(persistent_calls, "_PAUSE", 0.0)
    return found


@contextlib.contextmanager
def running(handle: Callable[[bytes], bytes] = lambda block: block + b"!") -> Iterator[Executor]:
    calls = NodeCalls("", b"", ec.generate_private_key(ec.SECP256R1()))
    with contextlib.closing(Executor(calls, NODE, handle)) as found:
        yield found


@pytest.mark.parametrize("size", [1, 2**20 + 1])
def test_the_reply_names_its_message_and_has_all_its_parts(link: SuperLink, size: int) -> None:
    link.offers = [offer := Offer(b"a" * size)]
    with running() as found:
        assert found.once()
        assert not found.once()
    assert link.block(offer) == b"a" * size + b"!"
    assert offer.is_confirmed


def test_a_message_that_is_not_complete_waits_and_the_next_is_answered(link: SuperLink) -> None:
    first, second = Offer(b"1"), Offer(b"2")
    link.offers, first.is_complete = [first, second], False
    with running() as found:
        assert not found.once()
        assert found.once()
        assert not found.once()
        assert link.block(second) == b"2!" and first.tree.object_id not in link.replies
        first.is_complete = True
        assert found.once()
    assert link.block(first) == b"1!"


def test_a_message_that_is_never_complete_is_given_up(link: SuperLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_PATIENCE", 0.0)
    link.offers = [offer := Offer(b"1")]
    offer.is_complete = False
    with running() as found:
        assert found.once()
        assert not found.once()
    assert not link.replies


def test_a_message_whose_run_is_over_does_not_end_the_node(link: SuperLink) -> None:
    first, second, third = Offer(b"1"), Offer(b"2"), Offer(b"3")
    link.offers, first.is_there = [first, second, third], False
    link.fails["PushMessages"] = [answer(403)]
    with running() as found:
        assert [found.once() for _ in range(3)] == [True] * 3
    assert link.replies.keys() == {third.tree.object_id}


def test_a_message_that_cannot_be_answered_gets_an_error_that_quotes_nothing(link: SuperLink) -> None:
    first, second = Offer(b"1"), Offer(b"2")
    link.offers = [first, second]

    def handle(block: bytes) -> bytes:
        if block == b"1":
            raise ValueError("patient 17")
        return b"answer"

    with running(handle) as found:
        assert found.once() and found.once()
    assert link.error(first) == "a ValueError was raised" and link.block(second) == b"answer"


@pytest.mark.parametrize("call", ["PullMessages", "PullObject", "ConfirmMessageReceived", "PushMessages", "PushObject"])
def test_a_call_that_the_server_does_not_answer_is_made_again(link: SuperLink, call: str) -> None:
    link.offers = [offer := Offer(b"1")]
    link.fails[call] = [httpx.ConnectError("nobody is there"), answer(503), answer(500)]
    with running() as found:
        assert found.once()
    assert link.block(offer) == b"1!" and not link.fails[call]


def test_a_node_whose_call_was_cut_begins_anew_as_its_message_may_be_lost(link: SuperLink) -> None:
    with running() as found:
        link.fails["PullMessages"] = [httpx.ConnectError("nobody is there"), answer(503)]
        assert not found.once() and link.activations == []  # the SuperLink was not asked
        for times in (1, 2):  # the second time it counts as gone already
            link.fails["PullMessages"] = [httpx.ReadError("cut"), httpx.ConnectError("nobody is there")]
            assert not found.once() and link.activations == ["out", "in"] * times
        link.offers, link.fails["PullMessages"] = [offer := Offer(b"1")], [httpx.RemoteProtocolError("cut")]
        assert found.once() and link.activations == ["out", "in"] * 2  # there it is
    assert link.block(offer) == b"1!"


@pytest.mark.parametrize(
    ("error", "words"), [(answer(503), "it answered with 503"), (httpx.ReadError("cut\noff"), "cut off")]
)
def test_a_server_that_stays_away_cuts_the_node_off(
    link: SuperLink, monkeypatch: pytest.MonkeyPatch, error: httpx.HTTPError, words: str
) -> None:
    monkeypatch.setattr(persistent_calls, "_PERSISTENCE", -1.0)
    link.fails["PullMessages"] = [error]
    with running() as found, pytest.raises(CutOff, match=f"^{words}$"):
        found.once()


def test_a_superlink_that_does_not_know_the_node_cuts_it_off_at_once(link: SuperLink) -> None:
    link.fails["PullMessages"] = [answer(401)]
    with running() as found, pytest.raises(CutOff, match=r"^it answered with 401$"):
        found.once()


@pytest.mark.parametrize("how", ["refused", "unknown"])
def test_a_heartbeat_that_is_not_taken_cuts_the_node_off(
    link: SuperLink, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(executor, "_HEARTBEAT", 0.01)
    # What is not answered tells nothing; the next may come through.
    refused = [answer(404)] if how == "refused" else []
    link.fails["SendNodeHeartbeat"] = [httpx.ConnectError("nobody is there"), answer(503), *refused]
    link.is_known = how == "refused"
    with running() as found:
        found._heart.join(timeout=60)
        assert not link.fails["SendNodeHeartbeat"]
        with pytest.raises(CutOff, match="404" if how == "refused" else "it does not know the node any more"):
            found.once()


def test_one_signature_serves_for_some_seconds_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    key, clock, sent = ec.generate_private_key(ec.SECP384R1()), [1000.0], []
    monkeypatch.setattr(_node_internals.time, "monotonic", lambda: clock[0])
    signed = _node_internals._Signed(key)
    for later in (0.0, 19.0, 1.0):
        clock[0] += later
        request = httpx.Request("POST", "https://server")
        context = ProtobufRequestContext(rpc_method="", message=PullMessagesRequest(), request=request)
        signed.intercept(context, lambda context: httpx.Response(200))
        sent.append(dict(request.headers.raw))
    assert sent[0] == sent[1] != sent[2]
    members = NodeSignatures([to_openssh(_node_internals.public_key_to_bytes(key.public_key()))])
    for headers in sent:
        lower = {name.lower(): value for name, value in headers.items()}
        assert members.signer(lower) is not None
        assert members.signer(lower) is not None  # as it was checked before
        assert members.signer({**lower, **{each: b"AAAA" for each in lower if b"signature" in each}}) is None
