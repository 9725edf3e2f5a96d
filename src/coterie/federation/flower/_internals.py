"""Everything of Flower's that is not its public face (``flwr.app``, ``flwr.clientapp``, ``flwr.serverapp``).

Flower has no public way to answer a SuperNode's messages from a process that stays, to start the process of a run, or
to submit runs and list nodes from Python. Its own programs do so with the parts that are imported here and in the
modules beside it whose names end alike. No other module of Coterie imports them, and
``tests/federation/test_flower_internals.py`` says of each what Coterie relies on: to try another version of Flower, run
that test first.

A call to a SuperLink or a SuperNode that fails raises ``httpx.HTTPError``.
"""

from __future__ import annotations

import base64
import copy
import inspect
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Generic, Self, TypeVar

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Context, Message, Metadata
from flwr.app.message import make_message
from flwr.common.constant import (
    HEARTBEAT_MIN_INTERVAL,
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
    ErrorCode,
    SubStatus,
)
from flwr.common.serde import context_from_proto
from flwr.common.serde_utils import metadata_from_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TaskType
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectUnavailableError,
    pull_and_inflate_object_from_tree,
    pull_objects,
)
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.primitives.asymmetric import (
    public_key_to_bytes,
    sign_message,
    uses_nist_ec_curve,
    verify_signature,
)
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from flwr.supernode.runtime.run_clientapp import push_message

NODE_RAISED: int = ErrorCode.CLIENT_APP_RAISED_EXCEPTION
"""The code of a reply in which a node says that it could not answer."""

NODE_AWAY: tuple[int, ...] = (
    ErrorCode.MESSAGE_UNAVAILABLE,
    ErrorCode.REPLY_MESSAGE_UNAVAILABLE,
    ErrorCode.NODE_UNAVAILABLE,
)
"""The codes of the replies that Flower makes up for a message, a reply or a node that is not available."""

_CLAIM = "/flwr.proto.Runtime/AcquireTask"

NODES_PATH = "/v1/fleet/"
"""What the paths of the calls begin with that a SuperNode makes to a SuperLink."""

PULL_PATH, HEARTBEAT_PATH = f"{NODES_PATH}pull-messages", f"{NODES_PATH}send-node-heartbeat"
"""The paths with which it asks for a message and says that it is there."""

RUN_PATHS = frozenset(
    f"/v1/runtime/{call}"
    for call in (
        *("acquire-task", "send-task-heartbeat", "pull-task-input", "push-task-output", "push-logs", "get-nodes"),
        *("push-messages", "pull-messages", "push-object", "pull-object", "confirm-message-received"),
    )
)
"""The paths of the calls about a run: who claims it tells a secret, and then its process the token of its task."""


class FlowerTask:
    """A task that this process has claimed: the server's half of a run at a SuperLink, a message at a SuperNode.

    Whoever has the token may make calls about the task.
    """

    def __init__(self, run: int, token: str, client: RuntimeHttpClient) -> None:
        self.run, self.token, self._client = run, token, client

    def heartbeat(self) -> None:
        """Say that the task is still worked on; without this for a minute, it is offered to others again."""
        self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest())

    def complete(self) -> None:
        self._client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.COMPLETED))

    def fail(self, reason: str) -> None:
        self._client.PushTaskOutput(PushTaskOutputRequest(sub_status=SubStatus.FAILED, details=reason))

    def close(self) -> None:
        """Close the connection; the task itself stays as it is."""
        self._client.close()


class MessageTask(FlowerTask):
    """A message that a SuperNode received and that is to be answered."""

    def __init__(self, run: int, token: str, client: RuntimeHttpClient) -> None:
        super().__init__(run, token, client)
        self._context: Context | None = None
        self._head: tuple[Metadata, ObjectTree] | None = None

    def message(self) -> Message | None:
        """Give the message, or None while the SuperNode does not have all of it yet."""
        if self._context is None:  # asked for once: this call starts the task, and a task is started once
            self._context = context_from_proto(self._client.PullTaskInput(PullTaskInputRequest()).context)
        if self._head is None:
            found = self._client.PullMessages(PullAppMessagesRequest())
            if not found.messages_list:
                return None
            # A SuperNode gives a message once, without its content, which it keeps under the ids in the object tree.
            self._head = metadata_from_proto(found.messages_list[0].metadata), found.message_object_trees[0]
        metadata, tree = self._head
        node, run = Node(node_id=self._context.node_id), self._context.run_id
        pull = make_pull_object_fn_protobuf(self._client.PullObject, node, run)
        confirm = make_confirm_message_received_fn_protobuf(self._client.ConfirmMessageReceived, node, run)

        def pull_at_once(name: str) -> bytes:
            try:
                return pull(name)
            except ObjectUnavailableError as error:
                raise _Incomplete from error

        try:
            whole = pull_and_inflate_object_from_tree(tree, pull_at_once, confirm, return_type=Message)
        except _Incomplete:
            return None
        # The message made of objects lacks its own id, which a reply must name; the metadata beside it have it.
        return make_message(metadata, whole.content)

    def reply(self, reply: Message) -> None:
        """Send the reply; the message must have been there before."""
        assert self._context is not None
        push_message(self._client, reply, self._context)

    def close(self) -> None:
        """Leave the connections to the next message."""


class _Incomplete(Exception):
    """An object of a message is not there yet; where Flower's own exception says so, Flower waits until it is."""


TaskKind = TypeVar("TaskKind", bound=FlowerTask)


class TaskQueue(Generic[TaskKind]):
    """The tasks of one type that a SuperLink or a SuperNode offers.

    Parameters
    ----------
    connect
        Connects to it, for a task's token or, without one, to ask for tasks.
    type_
        Flower's name of the type.
    task
        What a claimed task is made of.
    """

    def __init__(self, connect: Callable[[str | None], RuntimeHttpClient], type_: str, task: type[TaskKind]) -> None:
        self._connect, self._type, self._task = connect, type_, task
        self._client = connect(None)

    def claim(self) -> TaskKind | None:
        """Claim a task, if one is offered."""
        found = self._client.AcquireTask(AcquireTaskRequest(supported_task_types=[self._type]))
        return self._task(int(found.task.run_id), found.token, self._connect(found.token)) if found.token else None

    def close(self) -> None:
        self._client.close()


def messages_of(address: str, ca: bytes, secret: bytes) -> TaskQueue[MessageTask]:
    """Give the messages of the SuperNode that offers them at an address of this machine to whoever has its secret."""
    asking = _runtime_client(address, ca, secret, "flwr-clientapp", None)

    def connect(token: str | None) -> RuntimeHttpClient:
        if token is None:
            return asking
        # Over the same connections: of those for a message alone, most of the time went into beginning them.
        found = copy.copy(asking)
        found._interceptors = (asking._interceptors[0], RuntimeTokenHttpInterceptor(token))
        return found

    return TaskQueue(connect, TaskType.CLIENT_APP, MessageTask)


def runs_of(address: str, ca: bytes, secret: bytes) -> TaskQueue[FlowerTask]:
    """Give the runs that wait for the server's half of them at a SuperLink, to whoever has its secret."""

    def connect(token: str | None) -> RuntimeHttpClient:
        return _runtime_client(address, ca, secret, "SuperExec" if token is None else "flwr-serverapp", token)

    return TaskQueue(connect, TaskType.SERVER_APP, FlowerTask)


def _runtime_client(address: str, ca: bytes, secret: bytes, component: str, token: str | None) -> RuntimeHttpClient:
    # A task is claimed with the secret; all other calls name its token, which only who claimed it has.
    known = (
        SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=[_CLAIM])
        if token is None
        else RuntimeTokenHttpInterceptor(token)
    )
    # Without a retry invoker: Flower's ends the process where the other side refuses, and ours must go on.
    return RuntimeHttpClient.from_server_address(address, False, ca, (RuntimeVersionHttpInterceptor(component), known))


class NodeCalls:
    """The calls that a SuperNode makes to a SuperLink, signed with the node's key.

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
        signed = NodeAuthHttpInterceptor(key, key.public_key())
        interceptors = (RuntimeVersionHttpInterceptor("SuperNode"), signed)
        self._client = FleetHttpClient.from_server_address(address, False, ca, interceptors)

    def activate(self) -> int:
        """Make the node count as running, for twenty seconds; give its id. Refused where it counts as running."""
        request = ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT_MIN_INTERVAL)
        return int(self._client.ActivateNode(request).node_id)

    def deactivate(self, node_id: int) -> None:
        """Make the node count as not running. Refused where it does already."""
        self._client.DeactivateNode(DeactivateNodeRequest(node_id=node_id))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()


class NodeSignatures:
    """Tells calls of members from those of strangers by their headers alone, as a SuperLink does after reading a call.

    A SuperNode signs the time with its key and sends both. ``keys`` are public keys in OpenSSH's form.
    """

    def __init__(self, keys: Collection[str]) -> None:
        loaded = [serialization.load_ssh_public_key(key.encode()) for key in keys]
        self._keys = {public_key_to_bytes(key): key for key in loaded if isinstance(key, ec.EllipticCurvePublicKey)}

    def signer(self, headers: Mapping[bytes, bytes]) -> bytes | None:
        """Give the key of the member who signed headers, not long ago, if one did; their names are in lower case."""
        try:
            key, signature = (
                base64.b64decode(headers[name.encode()], validate=True)
                for name in (FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER)
            )
            signed = headers[TIMESTAMP_HEADER.encode()]
            age = (datetime.now(UTC) - datetime.fromisoformat(signed.decode("ascii"))).total_seconds()
            recent = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
            return key if recent and verify_signature(self._keys[key], signed, signature) else None
        except (KeyError, ValueError, TypeError, OverflowError):
            return None


def node_headers(key: ec.EllipticCurvePrivateKey) -> dict[str, str]:
    """Sign the time with a node's key: the headers that :class:`NodeSignatures` looks at."""
    now = datetime.now(UTC).isoformat()
    signed = {
        FLEET_HTTP_PUBLIC_KEY_HEADER: public_key_to_bytes(key.public_key()),
        FLEET_HTTP_SIGNATURE_HEADER: sign_message(key, now.encode()),
    }
    return {name: base64.b64encode(value).decode() for name, value in signed.items()} | {TIMESTAMP_HEADER: now}


def keep_connections(seconds: float = 60.0) -> None:
    """Have clients of Flower's that this process makes keep a connection for the next call; httpx does for five."""
    inspect.signature(httpx.Client).parameters["limits"].default.keepalive_expiry = seconds


def hasten_objects(first: float = 0.05, longest: float = 1.0) -> None:
    """Have this process ask sooner for a part of a message that is still on its way; Flower waits a second first."""
    defaults = pull_objects.__kwdefaults__
    assert defaults is not None
    defaults["initial_backoff"], defaults["backoff_cap"] = first, longest
    # As many tries as fit into the time that Flower gives all of them.
    defaults["max_tries_per_object"] = None


def stored_key(key: ec.EllipticCurvePublicKey) -> bytes:
    """Give a node's public key in the form in which a SuperLink stores it."""
    return public_key_to_bytes(key)


def is_usable_key(key: ec.EllipticCurvePublicKey) -> bool:
    """Say whether nodes may have such a public key."""
    return uses_nist_ec_curve(key)


def reason_of_exit(log: str) -> str:
    """Give the reason that a program of Flower's wrote to its log when it ended itself, in one line; empty if none.

    All errors of Flower's programs end them with status 1. What tells them apart is their last words: ``Exit Code: N``,
    the reason in a few lines, and where to find more information.
    """
    _, found, rest = log.rpartition("Exit Code:")
    lines = rest.partition("For more information")[0].splitlines()[1:] if found else []
    return " ".join(" ".join(lines).split())
