"""The pauses of a SuperNode: short where something is about to happen.

Flower's own are fixed in its program: three seconds after a call that brought no message, half a second between looks
for the reply of a message that it has. This takes the place of ``time`` there.
"""

from __future__ import annotations

import time

from coterie.federation.flower.bells import Bell

_LEAST, _REPLY = 0.05, 0.02
_BUSY = 2.0  # times what the last call took: a server that is slow to answer is not asked more often for it


class NodePauses:
    """Stands in the place of the module ``time`` in a SuperNode's loop.

    Parameters
    ----------
    bell
        Rung where the SuperNode has a message, and waits for the reply to it.
    """

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self._went_on = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Pause for as long as there is reason to; ``seconds`` are what Flower would."""
        if seconds >= 1.0:  # no message: the gate has held the call for a while, or will hold the next one
            took = time.monotonic() - self._went_on
            # A gate that holds calls makes them long too, and then no pause is needed.
            pause = min(seconds, max(_LEAST, _BUSY * took if took < _LEAST * 10 else _LEAST))
        else:
            self._bell.ring()
            pause = min(seconds, _REPLY)
        time.sleep(pause)
        self._went_on = time.monotonic()
