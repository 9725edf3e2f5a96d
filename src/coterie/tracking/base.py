"""What a tracker is: something outside of the run folder that receives the measurements of a run.

A tracker has no influence on a run: it is not part of the configuration, and the results are the same with and without
it. A tracker that fails is reported once and receives nothing more; the run continues.
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
    """A tracker failed and receives nothing more; the run continues."""


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
        The last round that is done: 0 for a new run, the checkpoint's for a resumed one. Rounds after it that a tracker
        received before the run was stopped come again.
    """

    path: Path
    config: Mapping[str, Any]
    after: int = 0

    @property
    def name(self) -> str:
        """What the run is called."""
        return self.path.resolve().name

    def settings(self) -> dict[str, bool | int | float | str]:
        """Return the configuration as a flat table, as trackers want it.

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
    """The measurements of one round.

    Parameters
    ----------
    scalars
        Numbers by name, such as ``personal/test/accuracy/mean``, ``bytes/up`` or ``seconds/training``.
    clients
        Of the models that were evaluated, the metrics of every client that counts, by name, such as
        ``personal/test/accuracy``. Values that are not finite are left out.
    weights
        Collaboration weights, a matrix of clients against clients, where the method has them.
    """

    scalars: dict[str, float]
    clients: dict[str, Vector] = field(default_factory=dict)
    weights: Vector | None = None


@runtime_checkable
class Tracker(Protocol):
    """Receives the measurements of a run; any class with these three methods is one."""

    def begin(self, run: TrackedRun) -> None:
        """Begin a run, or continue one that was stopped.

        Parameters
        ----------
        run
            The run.
        """

    def round(self, number: int, measured: Measured) -> None:
        """Receive the measurements of a round, before the checkpoint that closes it.

        Parameters
        ----------
        number
            The round, counted from 1.
        measured
            What was measured in it.
        """

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """End the run.

        Parameters
        ----------
        summary
            The result in short, as in ``summary.json``; ``None`` for a run that was stopped and may be resumed.
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
    """Return the numbers of a summary as a flat table.

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
