"""What carries messages between machines: two methods, so that another transport can take Flower's place."""

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
            The public key of each in OpenSSH's form, empty if it has none, by the transport's own number of the node.
        """
        ...

    def exchange(
        self, messages: Mapping[int, bytes], deadline: float, patience: frozenset[int]
    ) -> dict[int, bytes | Failure]:
        """Send each node its message and wait for the replies.

        Parameters
        ----------
        messages
            Blocks by the transport's number of the node. Each may be as large as a model, and is made anew whenever it
            is asked for: whoever sends them one after another holds one at a time.
        deadline
            Seconds to wait at most.
        patience
            Nodes to wait for until the deadline. Once these have replied, the others get little more time.

        Returns
        -------
        dict of int to bytes or Failure
            The replies by node; a node that did not reply in time is left out.
        """
        ...
