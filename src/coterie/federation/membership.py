"""Who is there: which of the transport's nodes is which member of the roster."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from coterie.federation.agreement import Agreement, same_key
from coterie.federation.node import HELLO
from coterie.federation.transport import Failure, Transport
from coterie.federation.wire import Rejected, check, check_header, pack, unpack
from coterie.runs.storage.events import Event, Listener

_AGAIN = 10  # roll calls after which a node that was refused is asked again


class RollCall:
    """The members that are there.

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
    """

    def __init__(
        self, agreement: Agreement, transport: Transport, header: Mapping[str, Any], report: Listener, deadline: float
    ) -> None:
        self._agreement, self._transport, self._header = agreement, transport, dict(header)
        self._report, self._deadline = report, deadline
        self._node_of: dict[int, int] = {}
        self._refused: dict[int, int] = {}
        self._calls = 0
        self._present: dict[int, str] = {}
        self._missing: set[int] = set()
        self.sizes: dict[int, dict[str, int]] = {}

    @property
    def present(self) -> dict[int, int]:
        """The members that answered and are still connected, with the transport's numbers, in order."""
        return {client: node for client, node in sorted(self._node_of.items()) if node in self._present}

    def miss(self, client: int) -> None:
        """Take note of a member that did not reply.

        Parameters
        ----------
        client
            The member.
        """
        self._missing.add(client)

    def heard(self, client: int, round_number: int) -> None:
        """Take note of a member that replied; one that did not before is back.

        Parameters
        ----------
        client
            The member.
        round_number
            The round, for the record.
        """
        if client in self._missing:
            self._missing.discard(client)
            name = self._agreement.members[client].name
            self._report(Event(round_number, "returned", client, f"{name} replies again"))

    def call(self, round_number: int) -> None:
        """Ask nodes that are new who they are.

        Parameters
        ----------
        round_number
            The round, for the record.
        """
        self._calls += 1
        self._present = self._transport.nodes()
        known = set(self._node_of.values())
        waiting = {node for node, call in self._refused.items() if self._calls - call < _AGAIN}
        new = [node for node in self._present if node not in known | waiting]
        if not new:
            return
        message = pack({**self._header, "kind": HELLO, "round": round_number, "token": f"hello-{self._calls}"}, {})
        replies = self._transport.exchange(dict.fromkeys(new, message), self._deadline, frozenset(new))
        for node in new:
            try:
                self._admit(node, replies.get(node), round_number)
                self._refused.pop(node, None)
            except Rejected as reason:
                self._refused[node] = self._calls
                self._report(Event(round_number, "refused", None, f"node {node}: {reason}"))

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
        check_header(header, {"run": self._header["run"], "token": f"hello-{self._calls}"})
        client, sizes = header.get("client"), header.get("sizes")
        members = self._agreement.members
        if not isinstance(client, int) or isinstance(client, bool) or not 0 <= client < len(members):
            raise Rejected(f"it says that it is client {client!r}, but the roster has 0 to {len(members) - 1}")
        key, wanted = self._present[node], members[client].key
        if wanted is not None and not same_key(key, wanted):
            raise Rejected(f"it says that it is {members[client].name!r}, but it does not have that member's key")
        other = self._node_of.get(client)
        if other is not None and other in self._present and other != node:
            raise Rejected(f"it says that it is {members[client].name!r}, but another node is that already")
        self.sizes[client] = _sizes(sizes)
        self._node_of[client] = node
        self._missing.discard(client)
        self._report(Event(round_number, "joined" if other is None else "returned", client, members[client].name))


def _sizes(found: object) -> dict[str, int]:
    splits = ("train", "validation", "test")
    if not isinstance(found, dict) or set(found) != set(splits):
        raise Rejected(f"it says that its samples are {found!r}, but must count those of {', '.join(splits)}")
    for split, count in found.items():
        least = 1 if split == "train" else 0
        if not isinstance(count, int) or isinstance(count, bool) or not least <= count < 2**40:
            raise Rejected(f"it says that it has {count!r} samples in {split}, but must have at least {least}")
    return {split: int(found[split]) for split in splits}
