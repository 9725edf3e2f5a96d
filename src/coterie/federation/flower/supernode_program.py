"""Flower's SuperNode as a program that ends where it can do nothing any more.

A SuperNode takes its messages in its main thread, tells in another that it is there, and offers what it took in a
third. An answer of the server's that it does not expect (a 500, a certificate that has run out) ends the first or the
second, and the third goes on for ever: a process that runs and does nothing. Here the end of one is the end of all,
with an exit status by which whoever started the program knows that it may try again.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
import threading
import traceback
from pathlib import Path

from coterie.federation.flower.bells import of_node
from coterie.federation.flower.pauses import NodePauses
from coterie.federation.flower.returned_memory import return_large_blocks

CUT_OFF = 75
"""The exit status; EX_TEMPFAIL of the system's own list."""
FOLDER = "COTERIE_NODE"
"""The environment's name for the node's folder."""


def main() -> None:
    """Run ``flower-supernode`` with the arguments of this program."""
    (program,) = importlib.metadata.entry_points(group="console_scripts", name="flower-supernode")
    sys.argv[0] = "flower-supernode"  # by which Flower names itself

    def end(failed: threading.ExceptHookArgs) -> None:
        if failed.exc_value is not None and not isinstance(failed.exc_value, SystemExit):
            traceback.print_exception(failed.exc_value)
            _cut_off()

    threading.excepthook = end
    return_large_blocks()
    folder = os.environ.get(FOLDER)
    if folder:
        from coterie.federation.flower._internals import hasten_objects, keep_connections
        from coterie.federation.flower._supernode_internals import take_pauses

        hasten_objects()
        keep_connections()
        take_pauses(NodePauses(of_node(Path(folder))))
    try:
        program.load()()
    except Exception:
        traceback.print_exc()
    # Where it ended itself on purpose, it raised SystemExit.
    _cut_off()


def _cut_off() -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(CUT_OFF)


if __name__ == "__main__":
    main()
