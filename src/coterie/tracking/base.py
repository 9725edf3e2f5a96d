"""What a tracker is: something outside of the run folder that is told how a run goes.

A tracker decides nothing: it is no part of an experiment's configuration, and a run has the same results with it and
without it. One that fails is reported once and then left alone; the run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from coterie.errors import CoterieWarning

Vector = npt.NDArray[np.float64]


class TrackerWarning(CoterieWarning):
    """A tracker failed and is told nothing more; the run goes on."""


@dataclass(frozen=True)
class TrackedRun:
    """The run that is tracked.

    Parameters
    ----------
    path
        Its folder.
    config
        Its configuration, complete, of plain types.
    after
        The last round that is done: 0 for a run that begins, the checkpoint's for one that goes on. What a tracker was
        told of later rounds before the run was stopped, it will be told again.
    """

    path: Path
    config: Mapping[str, Any]
    after: int = 0

    @property
    def name(self) -> str:
        """What the run is called."""
        return self.path.resolve().name

    def settings(self) -> dict[str, bool | int | float | str]:
        """Give the configuration as a flat table, as trackers want it.

        Returns
        -------
        dict
            Values by name; the method's own parameters are called ``settings.NAME``; what is not set is left out.
        """
        return {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in flat(self.config).items()
            if value not in (None, [], ())
        }


@dataclass(frozen=True)
class Measured:
    """What there is to tell of one round.

    Parameters
    ----------
    scalars
        Numbers by name, such as ``personal/test/accuracy/mean``, ``bytes/up`` or ``seconds/training``.
    clients
        Of the models that were evaluated, the metrics of every client that counts, by name, such as
        ``personal/test/accuracy``. Values that are not finite are left out.
    weights
        Who listened to whom, a matrix of clients against clients, where the method weighs them.
    """

    scalars: dict[str, float]
    clients: dict[str, Vector] = field(default_factory=dict)
    weights: Vector | None = None


@runtime_checkable
class Tracker(Protocol):
    """Something that is told how a run goes; any class with these three methods will do."""

    def begin(self, run: TrackedRun) -> None:
        """Be told that a run begins, or goes on.

        Parameters
        ----------
        run
            The run.
        """

    def round(self, number: int, measured: Measured) -> None:
        """Be told of a round, before the checkpoint that closes it.

        Parameters
        ----------
        number
            The round, counted from 1.
        measured
            What was measured in it.
        """

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """Be told that it is over.

        Parameters
        ----------
        summary
            The result in short, as in ``summary.json``; ``None`` for a run that was stopped and may go on later.
        """


def flat(values: Mapping[str, Any], joint: str = ".", prefix: str = "") -> dict[str, Any]:
    """Flatten nested tables.

    Parameters
    ----------
    values
        Values by name, some of which are tables themselves.
    joint
        What is put between the names of a table and of its entry.
    prefix
        What is put before every name.

    Returns
    -------
    dict
        Values by their whole names.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(value, joint, f"{prefix}{name}{joint}")
        else:
            found[f"{prefix}{name}"] = value
    return found


def results(summary: Mapping[str, Any]) -> dict[str, float]:
    """Give the numbers of a summary as a flat table.

    Parameters
    ----------
    summary
        The result in short, as in ``summary.json``.

    Returns
    -------
    dict
        Numbers by name, such as ``result/personal/final/mean``.
    """
    found = flat(summary, "/", "result/")
    return {
        name: float(value)
        for name, value in found.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
