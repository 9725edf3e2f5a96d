"""Bells between processes of one machine: a file that is touched when there is something to look for.

Flower's programs ask again and again whether there is something new; each time costs both sides some milliseconds of
processor time, and each pause between costs as much waiting. A bell costs neither: who waits looks at the time of a
file. It carries nothing, and one that is missed costs a pause of Flower's own.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

LOOK = 0.02
"""Seconds between looks at the file."""


class Bell:
    """A bell that hangs at a path.

    Parameters
    ----------
    path
        The file; its folder must be there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def ring(self) -> None:
        """Ring it; where the file cannot be written, who waits for it waits longer."""
        with contextlib.suppress(OSError):
            self._path.touch(mode=0o600)

    def last(self) -> int:
        """Give a number that another ring changes."""
        try:
            return self._path.stat().st_mtime_ns
        except OSError:
            return 0

    def wait(self, since: int, seconds: float) -> bool:
        """Wait until it has rung since :meth:`last` gave ``since``, so many seconds at most; say whether it has."""
        until = time.monotonic() + seconds
        while self.last() == since:
            left = until - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(LOOK, left))
        return True


def of_messages(folder: Path) -> Bell:
    """Give the bell in a server's folder that a run rings when it has sent a message."""
    return Bell(folder / "messages.bell")


def of_replies(folder: Path) -> Bell:
    """Give the bell in a server's folder that the gate rings when a node has sent something."""
    return Bell(folder / "replies.bell")
