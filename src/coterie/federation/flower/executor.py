"""What answers a node's messages: one process that stays, in the place of Flower's executor.

Flower's own executor installs the app that came with a run and starts a new process of it for every message: more than
a second of work each time, and whoever can submit an app to the server has it run at every node. A SuperNode in its
isolation mode ``process`` leaves that to somebody else, and here that is Coterie: the message's block goes to a
function, the reply's block goes back, and nothing that was sent is ever executed.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx
from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import context_from_proto
from flwr.proto.message_pb2 import ObjectTree
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullAppMessagesRequest,
    PullTaskInputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.inflatable.inflatable_protobuf_utils import (
    make_confirm_message_received_fn_protobuf,
    make_pull_object_fn_protobuf,
)
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError, pull_and_inflate_object_from_tree
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import push_message, push_task_output

from coterie.errors import ConfigError
from coterie.federation.flower import processes
from coterie.federation.flower.messages import block_of, content_of
from coterie.federation.transport import Failure

_log = logging.getLogger(__name__)
_PAUSE, _SELDOM = 0.2, 5.0  # seconds between looks for a message, and for one that stays incomplete
_PATIENCE = 7200.0  # seconds to look for what is missing of a message


class Executor:
    """Answers the messages that a SuperNode received.

    Parameters
    ----------
    address
        Where the SuperNode offers its tasks, on this machine, as ``127.0.0.1:9094``.
    handle
        From a message's block to the reply's.
    """

    def __init__(self, address: str, handle: Callable[[bytes], bytes]) -> None:
        self._address, self._handle = address, handle
        self._client = self._connect()
        self._waiting: list[_Task] = []

    def once(self) -> bool:
        """Answer the messages that are there.

        Returns
        -------
        bool
            Whether there was one.
        """
        try:
            found = self._client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
            if found.token:
                self._waiting.append(_Task(self._connect(found.token)))
        except httpx.HTTPError as error:  # the SuperNode is starting or ending
            _log.debug("the SuperNode does not answer: %s", error)
        # A SuperNode offers a message before it has all of it, and may never have where its run ended meanwhile. Such a
        # one must not hold up the others.
        done = [task for task in self._waiting if task.due and task.attempt(self._reply)]
        self._waiting = [task for task in self._waiting if task not in done]
        return bool(done)

    def close(self) -> None:
        """Let go of the SuperNode."""
        for task in self._waiting:
            task.end(SubStatus.FAILED, "the node ended")
        self._client.close()

    def _connect(self, token: str | None = None) -> RuntimeHttpClient:
        # Without a retry invoker: Flower's ends the process where the SuperNode refuses, and this process stays.
        version = RuntimeVersionHttpInterceptor("flwr-clientapp")
        interceptors = (version,) if token is None else (version, RuntimeTokenHttpInterceptor(token))
        return RuntimeHttpClient.from_server_address(self._address, True, None, interceptors)

    def _reply(self, message: Message) -> Message:
        """Reply in any case: a SuperNode that has handed a message on does nothing else until it has the reply."""
        block = block_of(message)
        try:
            if not isinstance(block, Failure):
                return Message(content_of(self._handle(block)), reply_to=message)
            reason = block.reason
        except Exception as error:  # only the kind: its text might quote data
            _log.exception("a message could not be answered")
            reason = f"a {type(error).__name__} was raised"
        return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=reason), reply_to=message)


class _Task:
    """A message that is to be answered, from its claim to its end."""

    def __init__(self, client: RuntimeHttpClient) -> None:
        self._client = client
        self._heart = HeartbeatSender(lambda: _beat(client))
        self._heart.start()
        self._began = self._next = time.monotonic()
        self._context: Context | None = None
        self._tree: ObjectTree | None = None

    @property
    def due(self) -> bool:
        return time.monotonic() >= self._next

    def attempt(self, reply: Callable[[Message], Message]) -> bool:
        """Answer the message if it is complete; say whether there is nothing left to do."""
        try:
            message = self._message()
            if message is None and time.monotonic() - self._began < _PATIENCE:
                waited = time.monotonic() - self._began
                self._next = time.monotonic() + min(max(_PAUSE, waited / 2), _SELDOM)
                return False
            if message is None or self._context is None:
                self.end(SubStatus.FAILED, "the message was never complete")
                return True
            push_message(self._client, reply(message), self._context)
            self.end(SubStatus.COMPLETED, "")
        except Exception as error:  # the SuperNode is ending, or gave the message up; there may be others
            _log.warning("a message could not be answered: %s", error)
            self.end(SubStatus.FAILED, "the message could not be answered")
        return True

    def end(self, status: str, details: str) -> None:
        try:
            push_task_output(self._client, self._context, status, details)
        finally:
            self._heart.stop()
            self._client.close()

    def _message(self) -> Message | None:
        if self._context is None:
            self._context = context_from_proto(self._client.PullTaskInput(PullTaskInputRequest()).context)
        if self._tree is None:
            found = self._client.PullMessages(PullAppMessagesRequest())
            if not found.messages_list:
                return None
            self._tree = found.message_object_trees[0]
        node, run = Node(node_id=self._context.node_id), self._context.run_id
        pull = make_pull_object_fn_protobuf(self._client.PullObject, node, run)
        confirm = make_confirm_message_received_fn_protobuf(self._client.ConfirmMessageReceived, node, run)

        def pull_now(name: str) -> bytes:
            try:
                return pull(name)
            except ObjectUnavailableError as error:
                raise _Incomplete from error

        try:
            message = pull_and_inflate_object_from_tree(self._tree, pull_now, confirm, return_type=Message)
        except _Incomplete:
            return None
        message.metadata.__dict__["_message_id"] = self._tree.object_id  # which a message does not know itself
        return message


class _Incomplete(Exception):
    """Not all of the message is there: otherwise than Flower's own exception, of which it would wait for the end."""


def _beat(client: RuntimeHttpClient) -> bool:
    """Say that the task is still worked on. Flower's own beat interrupts this process where nobody waits any more."""
    try:
        client.SendTaskHeartbeat(SendTaskHeartbeatRequest())
    except httpx.HTTPError:
        return False
    return True


def run_node(
    command: Sequence[str], env: Mapping[str, str], log: Path, port: int, handle: Callable[[bytes], bytes]
) -> None:
    """Run a SuperNode and answer its messages, until it ends or this process is interrupted.

    Parameters
    ----------
    command
        The SuperNode's command line.
    env
        Its environment.
    log
        The file for its output.
    port
        The port at which it offers messages.
    handle
        From a message's block to the reply's.

    Raises
    ------
    ConfigError
        If the SuperNode ends by itself.
    """
    process = processes.start(command, env, log)
    try:
        processes.wait_for_port(port, process, "SuperNode", log)
        processes.avoid_proxies()
        with contextlib.closing(Executor(f"127.0.0.1:{port}", handle)) as executor:
            while process.poll() is None:
                if not executor.once():
                    time.sleep(_PAUSE)
    finally:
        processes.stop(process)
    raise ConfigError(processes.how_it_ended("SuperNode", process, log))
