"""Signals that are handled in another way for a while."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

Handler = Callable[[int, FrameType | None], None]


@contextlib.contextmanager
def handled(handler: Handler, *numbers: signal.Signals) -> Iterator[None]:
    """Have a handler called for some signals while the context is open.

    Only the main thread may; in another one whoever handles them already goes on to.

    Parameters
    ----------
    handler
        What is called.
    *numbers
        For which signals.
    """
    with contextlib.ExitStack() as restore:
        with contextlib.suppress(ValueError):
            for number in numbers:
                restore.callback(signal.signal, number, signal.signal(number, handler))
        yield
