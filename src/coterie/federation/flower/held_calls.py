"""Calls for messages that the gate holds until there may be one.

A node asks for a message, and where there is none asks again. The gate answers the first such call at once. It
holds each that follows directly on another, until a run has sent something or some seconds have passed: a message
reaches its node as soon as it is there, and nobody asks in vain meanwhile.
"""

from __future__ import annotations

import asyncio

from coterie.federation.flower._internals import HEARTBEAT_PATH, PULL_PATH
from coterie.federation.flower.bells import LOOK, Bell


class HeldCalls:
    """The nodes' calls for messages.

    Parameters
    ----------
    bell
        Rings when messages were sent.
    replied
        Rung when a node has sent all of a reply: then it asks for the next message.
    seconds
        How long to hold a call at most.
    """

    def __init__(self, bell: Bell, replied: Bell, seconds: float = 3.0) -> None:
        self._bell, self._replied, self._seconds = bell, replied, seconds
        self._watch: asyncio.Task[None] | None = None  # one for all calls: each look is at a file
        self._asked: dict[bytes, int] = {}  # of each member whose last call was one for messages, the bell's number

    async def hold(self, member: bytes, path: str) -> None:
        """Hold a call of a member's, if it is one that would be in vain."""
        if path == HEARTBEAT_PATH:
            return
        if path != PULL_PATH:
            self._asked.pop(member, None)
            return
        since = self._asked.get(member)
        if since is None:
            self._replied.ring()
        if since is not None and self._bell.last() == since:
            if self._watch is None or self._watch.done():
                self._watch = asyncio.create_task(self._rung(since))
            await asyncio.wait([self._watch], timeout=self._seconds)
        # Taken before the call is passed on: what is sent from here on rings again.
        self._asked[member] = self._bell.last()

    def forget(self, member: bytes) -> None:
        """Take a member's last call as not made."""
        self._asked.pop(member, None)

    async def _rung(self, since: int) -> None:
        while self._bell.last() == since:
            await asyncio.sleep(LOOK)
