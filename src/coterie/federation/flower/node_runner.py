"""Runs a node: keeps it in touch with the server, and answers its messages.

Whatever the server goes through (an error, an expired certificate, a SuperLink that was killed), the node begins anew
until it is back in touch. What waiting does not mend ends it with a sentence.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from coterie.errors import ConfigError
from coterie.federation.flower import certificates, processes
from coterie.federation.flower._internals import keep_connections
from coterie.federation.flower._node_internals import NodeCalls, said_by
from coterie.federation.flower.activation import activate
from coterie.federation.flower.executor import Executor
from coterie.federation.flower.expiry import warnings_of
from coterie.federation.flower.key_claims import KeyClaim
from coterie.federation.flower.persistent_calls import CutOff
from coterie.federation.returned_memory import return_large_blocks, share_free_memory

_LEAST = 0.05  # seconds between calls for a message, at least
_BUSY = 2.0  # times what the last call took: a server that is slow to answer is not asked more often for it
_HELD = 0.5  # seconds: a call that took longer was held at the gate, and the next may follow at once
_DAY = 86400.0
_SHORT = 60.0  # a life that ends sooner than that has not been of use
_TRIES = 6  # short lives in a row; with their pauses, longer than Flower counts a dead node as running


@dataclass(frozen=True)
class NodePlace:
    """Where a node is.

    Parameters
    ----------
    folder
        The node's folder.
    server
        Where the server's gate is, as ``host:port``.
    ca
        File with the certificate of the authority that signed the server's.
    key
        File with the node's private key.
    """

    folder: Path
    server: str
    ca: Path
    key: Path


def run_node(place: NodePlace, handle: Callable[[bytes], bytes], say: Callable[[str], None]) -> None:
    """Run a node until this process is interrupted; ``handle`` makes replies of messages, ``say`` is told what happens.

    What waiting does not mend is a :class:`~coterie.errors.ConfigError`.
    """
    share_free_memory()
    return_large_blocks()
    keep_connections()
    claim = KeyClaim(place.server, place.ca, certificates.read_node_key(place.key), place.folder, say)
    claim.wait()
    processes.avoid_proxies()
    with claim.renewed():
        short_lives = 0
        while True:
            began = time.monotonic()
            how = _live(place, handle, claim, say)
            if claim.lost:
                raise ConfigError(claim.lost)
            short_lives = short_lives + 1 if time.monotonic() - began < _SHORT else 0
            if short_lives > _TRIES:
                raise ConfigError(how)
            pause = min(2.0**short_lives, 32.0)
            say(f"{how}; connecting again in {pause:g} s")
            time.sleep(pause)
            claim.wait()


def _live(place: NodePlace, handle: Callable[[bytes], bytes], claim: KeyClaim, say: Callable[[str], None]) -> str:
    """Answer messages until there is no way to any more, and say why."""
    with contextlib.ExitStack() as stack:
        # Read anew each time: certificates are renewed.
        calls = stack.enter_context(
            NodeCalls(place.server, place.ca.read_bytes(), certificates.read_node_key(place.key))
        )
        try:
            # The claim is ours, so whoever counts as running with this key is dead.
            node_id = activate(calls, place.folder / "supernode.id")
        except httpx.HTTPError as error:
            return f"the server does not let the node in ({said_by(error)})"
        stack.callback(_leave, calls, node_id)
        executor = stack.enter_context(contextlib.closing(Executor(calls, node_id, handle)))
        warned = -_DAY
        try:
            while not claim.lost:
                if time.monotonic() - warned >= _DAY:
                    warned = time.monotonic()
                    ends = {f"the server at {place.server}": claim.server_certificate_ends}
                    for warning in warnings_of({str(place.ca): place.ca}, ends):
                        say(warning)
                asked = time.monotonic()
                if not executor.once():
                    took = time.monotonic() - asked
                    time.sleep(max(_LEAST, _BUSY * took if took < _HELD else _LEAST))
        except CutOff as error:
            return f"the node was cut off from the server ({error})"
    return claim.lost


def _leave(calls: NodeCalls, node_id: int) -> None:
    with contextlib.suppress(httpx.HTTPError):  # then it counts as running for another minute
        calls.deactivate(node_id)
