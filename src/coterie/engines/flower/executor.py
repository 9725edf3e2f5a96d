"""What answers a node's messages: one process that stays, in the place of Flower's executor.

Flower's own executor installs the app that came with a run and starts a new process of it for every message: more than
a second of work each time, and whoever can submit an app to the server has it run at every node. A SuperNode in its
isolation mode ``process`` leaves that to somebody else, and here that is Coterie: the message's block goes to a
function, the reply's block goes back, and nothing that was sent is ever executed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx
from flwr.app import Context, Error, Message
from flwr.common.constant import ErrorCode, SubStatus
from flwr.proto.runtime_pb2 import AcquireTaskRequest, SendTaskHeartbeatRequest
from flwr.supercore.constant import TaskType
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

from coterie.engines.flower import processes
from coterie.engines.flower.blocks import block_of, content_of
from coterie.engines.transport import Failure
from coterie.errors import ConfigError

_log = logging.getLogger(__name__)
_PAUSE = 0.2  # seconds between looks for a message; the SuperNode itself looks every three


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

    def once(self) -> bool:
        """Answer one message, if there is one.

        Returns
        -------
        bool
            Whether there was.
        """
        try:
            found = self._client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
            if not found.token:
                return False
            self._answer(found.token)
        except httpx.HTTPError as error:  # the SuperNode is starting or ending, or gave the task up
            _log.debug("the SuperNode does not answer: %s", error)
            return False
        return True

    def close(self) -> None:
        """Let go of the SuperNode."""
        self._client.close()

    def _connect(self, token: str | None = None) -> RuntimeHttpClient:
        # Without a retry invoker: Flower's ends the process where the SuperNode refuses, and this process stays.
        version = RuntimeVersionHttpInterceptor("flwr-clientapp")
        interceptors = (version,) if token is None else (version, RuntimeTokenHttpInterceptor(token))
        return RuntimeHttpClient.from_server_address(self._address, True, None, interceptors)

    def _answer(self, token: str) -> None:
        client = self._connect(token)
        heart = HeartbeatSender(lambda: _beat(client))
        context: Context | None = None
        status, details = SubStatus.FAILED, "the message could not be answered"
        try:
            heart.start()
            message, context, _, _ = pull_task_input(client)
            push_message(client, self._reply(message), context)
            status, details = SubStatus.COMPLETED, ""
        finally:
            push_task_output(client, context, status, details)
            heart.stop()
            client.close()

    def _reply(self, message: Message) -> Message:
        block = block_of(message)
        if isinstance(block, Failure):
            return Message(Error(code=ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason=block.reason), reply_to=message)
        return Message(content_of(self._handle(block)), reply_to=message)


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
        os.environ["NO_PROXY"] = env["NO_PROXY"]
        with contextlib.closing(Executor(f"127.0.0.1:{port}", handle)) as executor:
            while process.poll() is None:
                if not executor.once():
                    time.sleep(_PAUSE)
    finally:
        processes.stop(process)
    raise ConfigError(processes.how_it_ended("SuperNode", process, log))
