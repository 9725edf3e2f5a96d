"""How much each member has sent since a run last asked for something.

A call is no larger than a message may be. But a reply is sent in parts, each of which is a call, and Flower keeps
all of them in memory until the run fetches the reply: one of a thousand parts would fill any machine.
"""

from __future__ import annotations

from coterie.federation.flower._internals import PUSH_PATHS
from coterie.federation.flower.bells import Bell


class PushedBytes:
    """Counts what members send as replies.

    Parameters
    ----------
    bell
        Rings when messages were sent, each of which may be answered.
    most
        Bytes that a member may send between two rings.
    """

    def __init__(self, bell: Bell, most: int) -> None:
        self._bell, self._most = bell, most
        self._sent: dict[bytes, tuple[int, int]] = {}  # of each member, the bell's number and the bytes since

    def take(self, member: bytes, path: str, count: int) -> bool:
        """Count some bytes of a member's call; say whether they may be passed on."""
        if path not in PUSH_PATHS:
            return True
        now = self._bell.last()
        since, before = self._sent.get(member, (now, 0))
        self._sent[member] = now, count + (before if since == now else 0)
        return self._sent[member][1] <= self._most
