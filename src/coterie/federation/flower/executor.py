"""Answers a node's messages: one process that stays, in the place of Flower's executor.

Flower's own executor installs the app that came with a run and starts a new process of it for every message. That costs
more than a second each time, and whoever can submit an app to the server has it run at every node. A SuperNode in its
isolation mode ``process`` leaves this to another program, and here that is Coterie: the message's block goes to a
function, the reply's block goes back, and nothing that was sent is ever executed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

import httpx
from flwr.app import Error, Message

from coterie.federation.flower._internals import NODE_RAISED, MessageTask, keep_connections, messages_of
from coterie.federation.flower.messages import content_of, empty, take_block
from coterie.federation.flower.returned_memory import return_free_memory
from coterie.federation.transport import Failure

_log = logging.getLogger(__name__)
_PAUSE, _LONGEST_PAUSE = 0.2, 5.0  # seconds between looks for a message, growing where one stays incomplete
_PATIENCE = 7200.0  # seconds after which an incomplete message is given up
_HEARTBEAT = 10.0  # seconds between heartbeats; a task without one for a minute counts as abandoned


class Executor:
    """Answers the messages that a SuperNode received.

    Parameters
    ----------
    address
        Where the SuperNode offers its messages, on this machine, as ``127.0.0.1:9094``.
    ca
        The certificate of the authority that signed the SuperNode's.
    secret
        What the SuperNode knows this process by.
    handle
        From a message's block to the reply's.
    """

    def __init__(self, address: str, ca: bytes, secret: bytes, handle: Callable[[bytes], bytes]) -> None:
        self._handle = handle
        keep_connections()
        self._messages = messages_of(address, ca, secret)
        self._claimed: list[_Claimed] = []

    def once(self) -> bool:
        """Answer the messages that are there; say whether there was one."""
        try:
            task = self._messages.claim()
            if task is not None:
                self._claimed.append(_Claimed(task))
        except httpx.HTTPError as error:  # the SuperNode is starting or ending
            _log.debug("the SuperNode does not answer: %s", error)
        # A SuperNode offers a message before it has all of it, and never gets the rest where its run ended meanwhile.
        # Such a message must not hold up the others.
        done = [each for each in self._claimed if each.is_due and each.attempt(self._reply)]
        self._claimed = [each for each in self._claimed if each not in done]
        if done:
            return_free_memory()
        return bool(done)

    def close(self) -> None:
        """Give up what is incomplete, and disconnect from the SuperNode."""
        for each in self._claimed:
            each.give_up("the node ended")
        self._messages.close()

    def _reply(self, message: Message) -> Message:
        """Reply in any case: a SuperNode that has handed a message on does nothing else until it has the reply."""
        block = take_block(message)
        try:
            if not isinstance(block, Failure):
                held = [block]
                del block  # handed over: it may be a large model, and who handles it lets go of it early
                return_free_memory()
                return Message(content_of(self._handle(held.pop())), reply_to=message)
            reason = block.reason
        except Exception as error:  # only the error's type: its text might quote data
            _log.exception("a message could not be answered")
            reason = f"a {type(error).__name__} was raised"
        return Message(Error(code=NODE_RAISED, reason=reason), reply_to=message)


class _Claimed:
    """A message that this process has claimed, with heartbeats from the claim to the end."""

    def __init__(self, task: MessageTask) -> None:
        self._task = task
        self._began = self._next = time.monotonic()
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._heart.start()

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def attempt(self, reply: Callable[[Message], Message]) -> bool:
        """Answer the message if it is complete; say whether there is nothing left to do."""
        try:
            message = self._task.message()
            if message is None:
                waited = time.monotonic() - self._began
                if waited < _PATIENCE:
                    self._next = time.monotonic() + min(max(_PAUSE, waited / 2), _LONGEST_PAUSE)
                    return False
                self.give_up("the message was never complete")
                return True
            answer = reply(message)
            self._task.reply(answer)
            empty(answer)
            self._end(self._task.complete)
        except Exception as error:  # the SuperNode is ending, or gave the message up; there may be others
            _log.warning("a message could not be answered: %s", error)
            self.give_up("the message could not be answered")
        return True

    def give_up(self, reason: str) -> None:
        self._end(lambda: self._task.fail(reason))

    def _end(self, report: Callable[[], None]) -> None:
        try:
            report()
        except Exception as error:  # it finds out by the heartbeats that stop
            _log.debug("the SuperNode could not be told how a message ended: %s", error)
        finally:
            self._ended.set()
            self._heart.join()
            self._task.close()

    def _beat(self) -> None:
        while not self._ended.wait(_HEARTBEAT):  # a claim is good for three times that
            with contextlib.suppress(httpx.HTTPError):  # the next may come through
                self._task.heartbeat()
