"""The face of whatever carries messages between machines: small, so that another transport can be put behind it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Failure:
    """Why a node's reply is not there.

    Parameters
    ----------
    reason
        One sentence.
    gone
        Whether the node seems to be away, rather than to have failed.
    """

    reason: str
    gone: bool = False


class Transport(Protocol):
    """Carries blocks of bytes to nodes and back."""

    def nodes(self) -> dict[int, str]:
        """List the nodes that are connected.

        Returns
        -------
        dict of int to str
            The transport's own number of each, with its public key in OpenSSH's form, nothing if it has none.
        """
        ...

    def exchange(
        self, messages: Mapping[int, bytes], deadline: float, patience: frozenset[int]
    ) -> dict[int, bytes | Failure]:
        """Send each node its message and wait for the replies.

        Parameters
        ----------
        messages
            By the transport's number of the node.
        deadline
            Seconds to wait at most.
        patience
            Nodes that are worth waiting for; for others, not much longer than these take.

        Returns
        -------
        dict of int to bytes or Failure
            What came; a node that did not reply in time is not in it.
        """
        ...
