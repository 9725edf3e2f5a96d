"""Everything of Flower's that is not its public face (``flwr.app``, ``flwr.clientapp``, ``flwr.serverapp``).

Flower has no public way to answer a node's messages from a process that stays, to start the process of a run, or to
submit runs and list nodes from Python. Its own programs do so with the parts that are imported here and in the
modules beside it whose names end alike. No other module of Coterie imports them, and
``tests/federation/test_flower_internals.py`` says of each what Coterie relies on: to try another version of Flower, run
that test first.

A call to a SuperLink that fails raises ``httpx.HTTPError``.
"""

from __future__ import annotations

import base64
import inspect
from collections.abc import Callable, Collection, Mapping
from datetime import UTC, datetime

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.common.constant import (
    SYSTEM_TIME_TOLERANCE,
    TIMESTAMP_HEADER,
    TIMESTAMP_TOLERANCE,
    ErrorCode,
    SubStatus,
)
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER, TaskType
from flwr.supercore.inflatable.inflatable_utils import pull_objects
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

PUSH_PATHS = frozenset({f"{NODES_PATH}push-messages", f"{NODES_PATH}push-object"})
"""The paths with which it sends a reply, and each of the parts of one."""

RUN_PATHS = frozenset(
    f"/v1/runtime/{call}"
    for call in (
        *("acquire-task", "send-task-heartbeat", "pull-task-input", "push-task-output", "push-logs", "get-nodes"),
        *("push-messages", "pull-messages", "push-object", "pull-object", "confirm-message-received"),
    )
)
"""The paths of the calls about a run: who claims it tells a secret, and then its process the token of its task."""


class FlowerTask:
    """A task that this process has claimed: the server's half of a run at a SuperLink.

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


class TaskQueue:
    """The runs that a SuperLink offers.

    Parameters
    ----------
    connect
        Connects to it, for a task's token or, without one, to ask for tasks.
    """

    def __init__(self, connect: Callable[[str | None], RuntimeHttpClient]) -> None:
        self._connect, self._client = connect, connect(None)

    def claim(self) -> FlowerTask | None:
        """Claim a task, if one is offered."""
        found = self._client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
        return FlowerTask(int(found.task.run_id), found.token, self._connect(found.token)) if found.token else None

    def close(self) -> None:
        self._client.close()


def runs_of(address: str, ca: bytes, secret: bytes) -> TaskQueue:
    """Give the runs that wait for the server's half of them at a SuperLink, to whoever has its secret."""

    def connect(token: str | None) -> RuntimeHttpClient:
        return _runtime_client(address, ca, secret, "SuperExec" if token is None else "flwr-serverapp", token)

    return TaskQueue(connect)


def _runtime_client(address: str, ca: bytes, secret: bytes, component: str, token: str | None) -> RuntimeHttpClient:
    # A task is claimed with the secret; all other calls name its token, which only who claimed it has.
    known = (
        SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=[_CLAIM])
        if token is None
        else RuntimeTokenHttpInterceptor(token)
    )
    # Without a retry invoker: Flower's ends the process where the other side refuses, and ours must go on.
    return RuntimeHttpClient.from_server_address(address, False, ca, (RuntimeVersionHttpInterceptor(component), known))


class NodeSignatures:
    """Tells calls of members from those of strangers by their headers alone, as a SuperLink does after reading a call.

    A SuperNode signs the time with its key and sends both. ``keys`` are public keys in OpenSSH's form.
    """

    def __init__(self, keys: Collection[str]) -> None:
        loaded = [serialization.load_ssh_public_key(key.encode()) for key in keys]
        self._keys = {public_key_to_bytes(key): key for key in loaded if isinstance(key, ec.EllipticCurvePublicKey)}
        self._last: dict[bytes, tuple[bytes, bytes]] = {}  # of each member the signature that was checked last

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
            if recent and self._last.get(key) == (signed, signature):  # nodes use one for some seconds
                return key
            if not recent or not verify_signature(self._keys[key], signed, signature):
                return None
            self._last[key] = signed, signature
            return key
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


def limit_objects(seconds: float) -> None:
    """Have this process wait no longer for the parts of a message; Flower waits for two hours, and for all in turn."""
    defaults = pull_objects.__kwdefaults__
    assert defaults is not None
    defaults["max_time"] = seconds


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
