"""Flower's private parts that the process of a SuperNode alone uses; see :mod:`coterie.federation.flower._internals`.

Apart from the others, because importing them costs 30 MB, which a node's own process would hold for nothing.
"""

from __future__ import annotations

from flwr.supernode import start_client_internal


def take_pauses(pauses: object) -> None:
    """Have a SuperNode of this process pause by an object that stands in the place of the module ``time``."""
    # Its loop sleeps for 3 seconds where there is no message, and for 0.5 where the reply to one is not there yet.
    vars(start_client_internal)["time"] = pauses
