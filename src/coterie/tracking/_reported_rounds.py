"""What a tracker with runs on a server must remember to continue one: its id there, and the last round it received."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from coterie.errors import RunFolderError
from coterie.runs.storage.atomic_files import read_json, write_json

FILE = "tracking.json"
"""The file in the run's folder, with an entry for each such tracker."""


class ReportedRounds:
    """The id of a run at a tracker's server, and the last round that was reported to it.

    What was reported cannot be taken back, and a resumed run repeats its rounds bit for bit, so rounds that were
    reported before are skipped.

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
        """Store the id of a run that begins."""
        self.run = run
        self._write()

    def is_new(self, round_number: int) -> bool:
        """Return whether a round has not been reported yet."""
        return round_number > self._round

    def store(self, round_number: int) -> None:
        """Store that a round has been reported."""
        self._round = round_number
        self._write()

    def _read(self) -> dict[str, Any]:
        try:
            return read_json(self._path) if self._path.exists() else {}
        except RunFolderError:
            return {}

    def _write(self) -> None:
        write_json(self._path, self._read() | {self._tracker: {"run": self.run, "round": self._round}})
