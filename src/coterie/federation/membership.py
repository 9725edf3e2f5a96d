"""Which members of the roster are connected, and under which of the transport's node numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coterie.federation.agreement import Agreement, same_key
from coterie.federation.node import HELLO
from coterie.federation.transport import Failure, Transport
from coterie.federation.wire import Rejected, check, check_header, pack, unpack
from coterie.runs.storage.events import Event, Listener

_ASK_AGAIN = 10  # refreshes after which a node that was refused is asked again


class Membership:
    """The members that have said who they are.

    Parameters
    ----------
    agreement
        The roster.
    transport
        What carries messages.
    header
        What every message of the run says.
    report
        Told of who joins and who is refused.
    deadline
        Seconds to wait for an answer.
    max_samples
        How many samples a member may say that it has.
    """

    def __init__(
        self,
        agreement: Agreement,
        transport: Transport,
        header: Mapping[str, Any],
        report: Listener,
        deadline: float,
        max_samples: int = 10_000_000,
    ) -> None:
        self._agreement, self._transport, self._header = agreement, transport, dict(header)
        self._report, self._deadline, self._max_samples = report, deadline, max_samples
        self._node_of: dict[int, int] = {}  # by client number
        self._refused: dict[int, int] = {}  # by node number: the refresh at which it was refused
        self._refreshes = 0
        self._connected: dict[int, str] = {}
        self._missing: set[int] = set()
        self.sizes: dict[int, dict[str, int]] = {}

    @property
    def present(self) -> dict[int, int]:
        """The node number of each member that has answered and is still connected, in the roster's order."""
        return {client: node for client, node in sorted(self._node_of.items()) if node in self._connected}

    def mark_missing(self, client: int) -> None:
        """Note that a member did not reply."""
        self._missing.add(client)

    def mark_replied(self, client: int, round_number: int) -> None:
        """Note that a member replied; one that was missing is reported as returned."""
        if client in self._missing:
            self._missing.discard(client)
            self._report(Event(round_number, "returned", client, "it replies again"))

    def refresh(self, round_number: int) -> None:
        """See which nodes are connected, and ask those that are new who they are."""
        self._refreshes += 1
        self._connected = self._transport.nodes()
        known = set(self._node_of.values())
        refused_lately = {node for node, when in self._refused.items() if self._refreshes - when < _ASK_AGAIN}
        new = [node for node in self._connected if node not in known | refused_lately]
        if not new:
            return
        message = pack({**self._header, "kind": HELLO, "round": round_number, "token": self._token()}, {})
        replies = self._transport.exchange(dict.fromkeys(new, message), self._deadline, frozenset(new))
        for node in new:
            try:
                self._admit(node, replies.get(node), round_number)
                self._refused.pop(node, None)
            except Rejected as reason:
                self._refuse(node, str(reason), round_number)
            except (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError) as error:
                self._refuse(node, f"what it says cannot be read ({type(error).__name__})", round_number)

    def _refuse(self, node: int, reason: str, round_number: int) -> None:
        self._refused[node] = self._refreshes
        key = self._connected.get(node, "")
        names = [each.name for each in self._agreement.members if each.key is not None and same_key(key, each.key)]
        whose = f", with the key of {names[0]}" if names else ""
        self._report(Event(round_number, "refused", None, f"node {node}{whose}: {reason}"))

    def _token(self) -> str:
        return f"hello-{self._refreshes}"

    def _admit(self, node: int, reply: bytes | Failure | None, round_number: int) -> None:
        if reply is None:
            raise Rejected("it did not say who it is in time")
        if isinstance(reply, Failure):
            raise Rejected(reply.reason)
        envelope = unpack(reply, self._agreement.limit)
        header = envelope.header
        if header.get("error"):
            raise Rejected(str(header["error"]))
        check(envelope.tensors, {})
        check_header(header, {"run": self._header["run"], "token": self._token()})
        client, sizes = header.get("client"), header.get("sizes")
        members = self._agreement.members
        if not isinstance(client, int) or isinstance(client, bool) or not 0 <= client < len(members):
            raise Rejected(f"it says that it is client {client!r}, but the roster has 0 to {len(members) - 1}")
        key, agreed_key = self._connected[node], members[client].key
        if agreed_key is not None and not same_key(key, agreed_key):
            raise Rejected(f"it says that it is {members[client].name!r}, but it does not have that member's key")
        other = self._node_of.get(client)
        if other is not None and other in self._connected and other != node:
            raise Rejected(f"it says that it is {members[client].name!r}, but another node is that already")
        self.sizes[client] = _checked_sizes(sizes, self._max_samples)
        self._node_of[client] = node
        self._missing.discard(client)
        self._report(Event(round_number, "joined" if other is None else "returned", client, members[client].name))


def _checked_sizes(found: object, most: int) -> dict[str, int]:
    splits = ("train", "validation", "test")
    if not isinstance(found, dict) or set(found) != set(splits):
        raise Rejected(f"it says that its samples are {found!r}, but must count those of {', '.join(splits)}")
    for split, count in found.items():
        least = 1 if split == "train" else 0
        if not isinstance(count, int) or isinstance(count, bool) or not least <= count <= most:
            raise Rejected(f"it says that it has {count!r} samples in {split}, but must have {least} to {most}")
    return {split: int(found[split]) for split in splits}
