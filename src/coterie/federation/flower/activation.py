"""A node that was killed can be started again at once.

Flower counts a SuperNode as running until it has missed its heartbeats for a minute, and meanwhile refuses another one
with the same key. Whoever has the key may deactivate the dead one, but must name it by the id that the SuperLink gave
it. A node learns its id by a short activation of its own before its SuperNode starts, and writes it to a file.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import httpx

from coterie.federation.flower._internals import NodeCalls
from coterie.federation.flower.certificates import read_node_key
from coterie.runs.storage.atomic_files import write_text


def deactivate_previous(address: str, ca: Path, key: Path, id_file: Path) -> None:
    """Make the SuperLink forget that a SuperNode with this key is running; none may be running any more.

    Where the server is not there, nothing happens: the SuperNode waits for it. If that was the node's first start and
    the SuperNode is killed, its id is not known, and the next one is refused until the minute has passed.
    """
    private = read_node_key(key)
    # What the SuperLink refuses here, it refuses the SuperNode too, which then says why.
    with contextlib.suppress(httpx.HTTPError), NodeCalls(address, ca.read_bytes(), private) as calls:
        try:
            node_id = calls.activate()
            write_text(id_file, f"{node_id}\n")
        except httpx.HTTPStatusError:  # it counts as running
            known = id_file.read_text(encoding="utf-8", errors="replace").strip() if id_file.exists() else ""
            if not known.isascii() or not known.isdigit():
                return
            node_id = int(known)
        calls.deactivate(node_id)
