"""What a tracker that keeps runs elsewhere must remember to go on with one: which it was, and how far it was told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coterie.errors import RunFolderError
from coterie.runs.storage.atomic import read_json, write_json

FILE = "tracking.json"
"""The file in the run's folder, with an entry for each such tracker."""


class ReportedRounds:
    """One tracker's entry.

    What was told cannot be taken back, and a resumed run repeats its rounds bit for bit: rounds that were told before
    are passed over.

    Parameters
    ----------
    run
        The run's folder.
    tracker
        The tracker's name.
    """

    def __init__(self, run: Path, tracker: str) -> None:
        self._path, self._tracker = run / FILE, tracker
        entry = self._read().get(tracker, {})
        self.run: str | None = entry.get("run")
        self._round = int(entry.get("round", 0))

    def begin(self, run: str) -> None:
        """Remember a run."""
        self.run = run
        self._write()

    def is_new(self, round_number: int) -> bool:
        """Return whether a round has not been told yet."""
        return round_number > self._round

    def told(self, round_number: int) -> None:
        """Remember that a round has been told."""
        self._round = round_number
        self._write()

    def _read(self) -> dict[str, Any]:
        try:
            return read_json(self._path) if self._path.exists() else {}
        except RunFolderError:
            return {}

    def _write(self) -> None:
        write_json(self._path, self._read() | {self._tracker: {"run": self.run, "round": self._round}})
