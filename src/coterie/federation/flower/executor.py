"""Answers a node's messages, in the place of Flower's SuperNode and the processes that it starts.

Flower's own program installs the app that came with a run and starts a new process of it for every message. That costs
more than a second each time, and whoever can submit an app to the server has it run at every node. Here the node takes
its messages from the SuperLink itself: a message's block goes to a function, the reply's block goes back, and nothing
that was sent is ever executed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

import httpx
from flwr.app import Error, Message

from coterie.federation.flower._internals import NODE_RAISED
from coterie.federation.flower._node_internals import NodeCalls, NotThere, ReceivedMessage
from coterie.federation.flower.messages import content_of, empty, take_block
from coterie.federation.flower.persistent_calls import CutOff, is_refusal, words_of
from coterie.federation.returned_memory import return_free_memory
from coterie.federation.transport import Failure

_log = logging.getLogger(__name__)
_PAUSE, _LONGEST_PAUSE = 0.2, 5.0  # seconds between looks for the rest of a message, growing where it stays incomplete
_PATIENCE = 7200.0  # seconds after which an incomplete message is given up
_HEARTBEAT = 10.0  # seconds between heartbeats; without one for a minute the node counts as gone


class Executor:
    """Answers the messages of a node that counts as running at a SuperLink.

    Parameters
    ----------
    calls
        The node's calls to it.
    node_id
        Flower's number of the node.
    handle
        From a message's block to the reply's.
    """

    def __init__(self, calls: NodeCalls, node_id: int, handle: Callable[[bytes], bytes]) -> None:
        self._calls, self._id, self._handle = calls, node_id, handle
        self._waiting: list[_Incomplete] = []
        self._lost = ""
        self._ended = threading.Event()
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._heart.start()

    def once(self) -> bool:
        """Answer the messages that are there; say whether there was one. :class:`CutOff` where that has an end."""
        if self._lost:
            raise CutOff(self._lost)
        received = self._calls.take(self._id)
        if received is not None:
            self._waiting.append(_Incomplete(received))
        # A SuperLink offers a message before it has all of it, and never gets the rest where its run ended meanwhile.
        # Such a message must not hold up the others.
        done = [each for each in self._waiting if each.is_due and self._attempt(each)]
        self._waiting = [each for each in self._waiting if each not in done]
        if done:
            return_free_memory()
        return bool(done)

    def close(self) -> None:
        """Stop the heartbeats."""
        self._ended.set()
        self._heart.join()

    def _attempt(self, waiting: _Incomplete) -> bool:
        """Answer a message if it is complete; say whether there is nothing left to do."""
        try:
            message = self._calls.complete(self._id, waiting.received)
            if message is None:
                return waiting.later()
            answer = self._reply(message)
            del message
            self._calls.reply(self._id, answer)
            empty(answer)
        except (httpx.HTTPStatusError, NotThere) as error:  # its run is over, or the reply is not taken
            _log.warning("a message could not be answered: %s", error)
        return True

    def _reply(self, message: Message) -> Message:
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

    def _beat(self) -> None:
        while not self._ended.wait(_HEARTBEAT) and not self._lost:
            try:
                if not self._calls.heartbeat(self._id):
                    self._lost = "it does not know the node any more"
            except httpx.HTTPError as error:
                if is_refusal(error):  # otherwise the next may come through
                    self._lost = words_of(error)


class _Incomplete:
    """A message of which not all may be there."""

    def __init__(self, received: ReceivedMessage) -> None:
        self.received = received
        self._began = self._next = time.monotonic()

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._next

    def later(self) -> bool:
        """Say whether it is to be given up; if not, it is due some time later."""
        waited = time.monotonic() - self._began
        self._next = time.monotonic() + min(max(_PAUSE, waited / 2), _LONGEST_PAUSE)
        return waited >= _PATIENCE
