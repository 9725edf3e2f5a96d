"""Passes the measurements of a run to its trackers, so that none of them can harm it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from coterie.runs.storage import RunFolder
from coterie.tracking._measurements import measured
from coterie.tracking.base import TrackedRun, Tracker, TrackerWarning


class TrackerObserver:
    """Passes the measurements of one run to some trackers; use it as a context, which begins and ends the run.

    A tracker that raises is reported by a :class:`TrackerWarning` and receives nothing more.

    Parameters
    ----------
    trackers
        The trackers.
    folder
        The run's folder, open for writing.
    after
        The last round that is done.
    honest
        The clients that count.
    primary
        The primary metric.
    stored
        The last round that a process which was stopped had recorded, if trackers are to receive it again.
    """

    def __init__(
        self,
        trackers: Sequence[Tracker],
        folder: RunFolder,
        after: int,
        honest: Collection[int],
        primary: str,
        stored: int = 0,
    ) -> None:
        self._trackers, self._stored = list(trackers), stored
        self._folder, self._honest, self._primary = folder, honest, primary
        self._run = TrackedRun(folder.path, folder.config, after)

    def __enter__(self) -> Self:
        self._each("at the beginning", lambda tracker: tracker.begin(self._run))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(None)

    def round(self, number: int, mean: float | None = None) -> None:
        """Pass on the round that was recorded last; called by the experiment.

        Parameters
        ----------
        number
            The round.
        mean
            Not used.
        """
        if self._trackers:
            found = measured(self._folder, number, self._honest, self._primary, number <= self._stored)
            self._each(f"in round {number}", lambda tracker: tracker.round(number, found))

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """End the run; only the first call has an effect.

        Parameters
        ----------
        summary
            The result in short, ``None`` if the run was stopped.
        """
        # A tracker may take long to end (an upload), and the run is on the disk already: Ctrl-C only ends the wait.
        self._each("at the end", lambda tracker: tracker.end(summary), (Exception, KeyboardInterrupt))
        self._trackers = []

    def _each(
        self, when: str, tell: Callable[[Tracker], None], caught: tuple[type[BaseException], ...] = (Exception,)
    ) -> None:
        for tracker in list(self._trackers):
            try:
                tell(tracker)
            except caught as error:
                self._trackers.remove(tracker)
                reason = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
                warnings.warn(
                    f"{type(tracker).__name__} failed {when} and is told nothing more of {self._run.path} ({reason})",
                    TrackerWarning,
                    stacklevel=2,
                )
