"""A node that was killed can be started again at once.

Flower counts a SuperNode as running until it has missed its heartbeats for a minute, and meanwhile refuses another one
with the same key. Whoever has the key may deactivate the dead one, but must name it by the id that the SuperLink gave
it. A node learns its id by a short activation of its own before its SuperNode starts, and writes it to a file.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import httpx
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from coterie.federation.flower._internals import NodeCalls
from coterie.runs.storage.atomic_files import write_text


def deactivate_previous(address: str, ca: Path, key: Path, id_file: Path) -> None:
    """Make the SuperLink forget that a SuperNode with this key is running; none may be running any more.

    Where the server is not there, nothing happens: the SuperNode waits for it. If that was the node's first start and
    the SuperNode is killed, its id is not known, and the next one is refused until the minute has passed.
    """
    private = _private_key(key)
    if private is None:
        return
    # What the SuperLink refuses here, it refuses the SuperNode too, which then says why.
    with contextlib.suppress(httpx.HTTPError), NodeCalls(address, ca.read_bytes(), private) as calls:
        try:
            node_id = calls.activate()
            write_text(id_file, f"{node_id}\n")
        except httpx.HTTPStatusError:  # it counts as running
            if not id_file.exists():
                return
            node_id = int(id_file.read_text(encoding="utf-8"))
        calls.deactivate(node_id)


def _private_key(path: Path) -> ec.EllipticCurvePrivateKey | None:
    """Load a node's key; one that Flower cannot use is left to the SuperNode, which says so."""
    if not path.exists():
        return None
    found = serialization.load_ssh_private_key(path.read_bytes(), password=None)
    return found if isinstance(found, ec.EllipticCurvePrivateKey) else None
