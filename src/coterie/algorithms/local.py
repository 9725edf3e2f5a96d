"""Local: every client trains alone.

::

    v_i ← E epochs of SGD on f_i, starting from its own v_i

Also called Separate. Nothing is sent. Under partial participation only the clients of the cohort train, so that every
method has the same budget of local work.
"""

from __future__ import annotations

from typing import ClassVar

from coterie.algorithms.base import Ask, Cohort, Round, Start, State, Task
from coterie.algorithms.local_training import LocalTraining, ProximalTraining
from coterie.rows import Rows


class Local(LocalTraining):
    """Every client trains alone, and nothing is sent."""

    name: ClassVar[str] = "local"
    title: ClassVar[str] = "Local"
    citation: ClassVar[str] = "the baseline without federation"
    federates: ClassVar[bool] = False

    def init(self, start: Start) -> tuple[State, Rows]:
        """Start every client at the initial model."""
        return {}, {"w": start.rows()}

    def tasks(self) -> dict[str, Task]:
        """Return plain training from the client's own model."""
        return {"train": ProximalTraining(self.stepper, self.minibatches, from_own=True, reply=False)}

    def round(self, server: State, cohort: Cohort) -> Round:
        """Ask for training, with an empty message."""
        yield Ask("train")
        return server, {}
