"""A node that was killed can be started again at once.

Flower counts a node as running until it has missed its heartbeats for a minute, and meanwhile refuses another one with
the same key. Whoever has the key may deactivate the dead one, but must name it by the id that the SuperLink gave it,
which a node writes to a file.
"""

from __future__ import annotations

from pathlib import Path

import httpx

from coterie.federation.flower._node_internals import NodeCalls
from coterie.runs.storage.atomic_files import write_text


def activate(calls: NodeCalls, id_file: Path) -> int:
    """Make the node count as running, and give its id; none with this key may be running any more.

    If the node's first start was killed before its id was written, the next is refused until a minute has passed.
    """
    try:
        node_id = calls.activate()
    except httpx.HTTPStatusError as error:  # it counts as running
        known = id_file.read_text(encoding="utf-8", errors="replace").strip() if id_file.exists() else ""
        if error.response.status_code >= 500 or not known.isascii() or not known.isdigit():
            raise
        calls.deactivate(int(known))
        node_id = calls.activate()
    write_text(id_file, f"{node_id}\n")
    return node_id
