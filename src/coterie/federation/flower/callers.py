"""Who is connected to the gate: a stranger that holds a connection keeps none from a member.

A process has so many files that it can open. Connections that say nothing would use them up, and then no node could
connect. So a connection on which no call of a member has come is closed after a while, and the oldest of them at once
where there are too many; nor does a member need many of its own.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections import Counter
from dataclasses import dataclass

from coterie.errors import ConfigError

_STRANGERS = 256  # connections at a time on which no member's call has come yet
_SECONDS = 30.0  # until one must have come; a TLS handshake on a bad line is done in a few
_OF_A_MEMBER = 64  # a node has a handful

Peer = tuple[str, int]


@dataclass
class _Caller:
    connection: socket.socket
    since: float
    member: bytes | None = None


class Callers:
    """The connections that are open.

    Parameters
    ----------
    strangers
        How many may be open on which no call of a member has come.
    seconds
        How long each of these may be.
    of_a_member
        How many may be open on which one member's calls have come.
    """

    def __init__(self, strangers: int = _STRANGERS, seconds: float = _SECONDS, of_a_member: int = _OF_A_MEMBER) -> None:
        self._strangers, self._seconds, self._of_a_member = strangers, seconds, of_a_member
        self._open: dict[Peer, _Caller] = {}  # in the order in which they came

    def came(self, connection: socket.socket, peer: Peer) -> None:
        """Note a new connection."""
        self._open.pop(peer, None)
        self._open[peer] = _Caller(connection, time.monotonic())
        if len(self._open) > self._strangers:
            self._forget_closed()
            unknown = [peer for peer, caller in self._open.items() if caller.member is None]
            if len(unknown) > self._strangers:
                # From where most come: a stranger drives itself away first.
                (crowded, _), *_ = Counter(host for host, _ in unknown).most_common(1)
                self._close(next(peer for peer in unknown if peer[0] == crowded))

    def is_member(self, peer: Peer | None, member: bytes) -> None:
        """Note that a member's call came on a connection."""
        caller = self._open.get(peer) if peer is not None else None
        if caller is None or caller.member == member:
            return
        caller.member = member
        self._forget_closed()
        own = [peer for peer, caller in self._open.items() if caller.member == member]
        if len(own) > self._of_a_member:
            self._close(own[0])

    def sweep(self) -> None:
        """Close the connections on which nothing of a member came in time."""
        self._forget_closed()
        before = time.monotonic() - self._seconds
        for peer, caller in list(self._open.items()):
            if caller.member is None and caller.since < before:
                self._close(peer)

    def _forget_closed(self) -> None:
        self._open = {peer: caller for peer, caller in self._open.items() if caller.connection.fileno() >= 0}

    def _close(self, peer: Peer) -> None:
        with contextlib.suppress(OSError):  # it has gone by itself
            self._open.pop(peer).connection.shutdown(socket.SHUT_RDWR)


class FrontDoor(socket.socket):
    """A listening socket that tells of every connection that it accepts."""

    callers: Callers

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        """Accept a connection and note it."""
        connection, peer = super().accept()
        self.callers.came(connection, peer[:2])
        return connection, peer


def listen(host: str, port: int, callers: Callers) -> list[FrontDoor]:
    """Listen on a port at all addresses of a host."""
    doors: list[FrontDoor] = []
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        ):
            door = FrontDoor(family, kind, protocol)
            doors.append(door)
            door.callers = callers
            door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            door.bind(address)
    except OSError as error:
        for door in doors:
            door.close()
        why = error.strerror or error
        raise ConfigError(f"the gate cannot listen on {host}:{port} ({why}): is another server running?") from error
    return doors
