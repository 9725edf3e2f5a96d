"""Flower's private parts that a node uses to be a SuperNode itself; see :mod:`coterie.federation.flower._internals`."""

from __future__ import annotations

import contextlib
import functools
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message, Metadata
from flwr.app.message import make_message, remove_content_from_message
from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL
from flwr.common.serde import message_to_proto
from flwr.common.serde_utils import metadata_from_proto
from flwr.proto.fleet_pb2 import (
    ActivateNodeRequest,
    DeactivateNodeRequest,
    PullMessagesRequest,
    PullMessagesResponse,
    PushMessagesRequest,
)
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree, PullObjectRequest, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.error import FlowerError
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supernode.fleet_http_client import FleetHttpClient

from coterie.federation.flower._internals import node_headers
from coterie.federation.flower.persistent_calls import persist, words_of

_SIGNED_FOR = 20.0  # seconds for which one signature serves; Flower takes one for minutes


class NotThere(Exception):
    """A message, or a part of it, is not at the SuperLink any more: its run is over."""


@dataclass
class ReceivedMessage:
    """A message that a SuperLink has given to a node: what is known of it before its parts are there.

    Parameters
    ----------
    metadata
        Flower's, with the id that a reply must name.
    tree
        The ids of the objects that it consists of.
    """

    metadata: Metadata
    tree: ObjectTree


class NodeCalls:
    """The calls that a SuperNode makes to a SuperLink, signed with the node's key.

    Those about messages are made again where the server does not answer; the others raise ``httpx.HTTPError`` at once.

    Parameters
    ----------
    address
        Where nodes reach the SuperLink, as ``host:port``.
    ca
        The certificate of the authority that signed the server's.
    key
        The node's private key.
    """

    def __init__(self, address: str, ca: bytes, key: ec.EllipticCurvePrivateKey) -> None:
        self._public = public_key_to_bytes(key.public_key())
        interceptors = (RuntimeVersionHttpInterceptor("SuperNode"), _Signed(key))
        self._client = FleetHttpClient.from_server_address(address, False, ca, interceptors)

    def activate(self) -> int:
        """Make the node count as running, for a minute; give its id. Refused where it counts as running."""
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        return int(self._client.ActivateNode(request).node_id)

    def deactivate(self, node_id: int) -> None:
        """Make the node count as not running. Refused where it does already."""
        self._client.DeactivateNode(DeactivateNodeRequest(node_id=node_id))

    def heartbeat(self, node_id: int) -> bool:
        """Make the node count as running for another minute; say whether it is known."""
        request = SendNodeHeartbeatRequest(node=Node(node_id=node_id), heartbeat_interval=HEARTBEAT_DEFAULT_INTERVAL)
        return bool(self._client.SendNodeHeartbeat(request).success)

    def take(self, node_id: int) -> ReceivedMessage | None:
        """Take the next message, if there is one; a SuperLink gives each once."""
        request, was_cut = PullMessagesRequest(node=Node(node_id=node_id)), False

        def pull() -> PullMessagesResponse:
            nonlocal was_cut
            try:
                return self._client.PullMessages(request)
            except httpx.TransportError as error:
                was_cut = was_cut or not isinstance(error, httpx.ConnectError)  # before which nothing was asked
                raise

        found = persist(pull)
        if not found.messages_list:
            if was_cut:
                self._begin_anew(node_id)
            return None
        return ReceivedMessage(metadata_from_proto(found.messages_list[0].metadata), found.message_object_trees[0])

    def _begin_anew(self, node_id: int) -> None:
        """Have a run send its message again: it may have been given to a call whose answer never came."""
        for call in (lambda: self.deactivate(node_id), self.activate):
            with contextlib.suppress(httpx.HTTPStatusError):  # it counts as gone, or as running, already
                persist(call)

    def complete(self, node_id: int, received: ReceivedMessage) -> Message | None:
        """Fetch what a message consists of, or give ``None`` while not all of that is at the SuperLink."""
        node, run = Node(node_id=node_id), received.metadata.run_id
        contents: dict[str, bytes] = {}
        for name in dict.fromkeys(each.object_id for each in iterate_object_tree(received.tree)):
            part = PullObjectRequest(node=node, run_id=run, object_id=name)
            found = persist(functools.partial(self._client.PullObject, part))
            if not found.object_found:
                raise NotThere(f"a part of the message {received.metadata.message_id} is not there any more")
            if not found.object_available:
                return None
            contents[name] = found.object_content
        confirm = ConfirmMessageReceivedRequest(node=node, run_id=run, message_object_id=received.tree.object_id)
        persist(lambda: self._client.ConfirmMessageReceived(confirm))
        whole = inflate_object_from_contents(received.tree.object_id, contents)
        if not isinstance(whole, Message):
            raise NotThere(f"{received.metadata.message_id} is no message")
        # The message made of objects lacks its own id, which a reply must name; the metadata beside it have it.
        return make_message(received.metadata, whole.content)

    def reply(self, node_id: int, reply: Message) -> None:
        """Send a reply with all that it consists of."""
        node, run = Node(node_id=node_id), reply.metadata.run_id
        with no_object_id_recompute():  # each of them costs a copy of what it is the id of
            tree = get_object_tree(reply)
            reply.metadata.__dict__["_message_id"] = tree.object_id
            head = message_to_proto(remove_content_from_message(reply))
            request = PushMessagesRequest(node=node, messages_list=[head], message_object_trees=[tree])
            answer = persist(lambda: self._client.PushMessages(request))
            wanted = set(answer.objects_to_push)
            for name, each in get_all_nested_objects(reply).items():
                if name in wanted:
                    part = PushObjectRequest(
                        node=node,
                        run_id=run,
                        session_id=answer.session_id,
                        object_id=name,
                        object_content=each.deflate(),
                    )
                    if not persist(functools.partial(self._client.PushObject, part)).stored:
                        raise NotThere(f"the SuperLink does not take a part of the reply {tree.object_id}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()


class _Signed:
    """Signs calls: one signature for some seconds, as making and checking one costs more than the rest of a call."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key
        self._made, self._headers = -_SIGNED_FOR, dict[str, str]()

    def intercept(self, context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        if time.monotonic() - self._made >= _SIGNED_FOR:
            self._made, self._headers = time.monotonic(), node_headers(self._key)
        context.request.headers.update(self._headers)
        return call_next(context)


def said_by(error: httpx.HTTPError) -> str:
    """Give what a SuperLink said where it refused a call, or else what went wrong."""
    found = FlowerError.from_json(error.response.text) if isinstance(error, httpx.HTTPStatusError) else None
    return words_of(error) if found is None else " ".join(f"{found.message} {found.public_details or ''}".split())
