"""How many CPU threads compute: as many as a piece of work pays for.

Other threads must be woken for every operation. With those that sleep in between, as the command line has them, a step
of a small model took nearly twice as long with two threads as with one. The number follows from the sizes alone, never
from a clock, so that the same run is computed in the same way every time.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextvars import ContextVar

import torch

_SLEEPING, _SPINNING = 16 * 10**6, 3 * 10**6  # multiplications, where other threads sleep meanwhile or wait busily

_most: ContextVar[int | None] = ContextVar("most", default=None)


def available() -> int:
    """Give how many threads there are for larger work: what decides how something is computed, unlike those in use."""
    return _most.get() or torch.get_num_threads()


def worth_waking() -> int:
    """Give how many multiplications a thread must have to be worth its waking."""
    return _SLEEPING if os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE" else _SPINNING


@contextlib.contextmanager
def paid_by(multiplications: int) -> Iterator[None]:
    """Compute with as many threads as so many multiplications pay for, and no more than there are."""
    most = available()
    paid = max(1, min(most, multiplications // worth_waking()))
    before, token = torch.get_num_threads(), _most.set(most)
    torch.set_num_threads(paid)
    try:
        yield
    finally:
        torch.set_num_threads(before)
        _most.reset(token)
