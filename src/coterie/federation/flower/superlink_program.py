"""Flower's SuperLink as a program that lets in only who knows the server's secret, and costs less to call."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import uvicorn

from coterie.federation.flower._superlink_internals import check_signatures_once, shorten_calls, take_server
from coterie.federation.flower.superlink_door import Door
from coterie.federation.returned_memory import return_large_blocks

KEEP_ALIVE = 75
"""Seconds that a connection stays open between two calls: a new one costs both sides more than a call does."""
SECRET = "--superexec-auth-secret-file"


def main() -> None:
    """Run ``flower-superlink`` with the arguments of this program."""
    (program,) = importlib.metadata.entry_points(group="console_scripts", name="flower-superlink")
    secret = Path(sys.argv[sys.argv.index(SECRET) + 1]).read_bytes()
    sys.argv[0] = "flower-superlink"  # by which Flower names itself

    def serve(app: Any, **options: Any) -> None:
        # No line for every call: a federation makes some twenty for each message, and nobody trims that file.
        uvicorn.run(Door(app, secret), **options | {"access_log": False, "timeout_keep_alive": KEEP_ALIVE})

    return_large_blocks()
    take_server(serve)
    shorten_calls()
    check_signatures_once()
    program.load()()


if __name__ == "__main__":
    main()
