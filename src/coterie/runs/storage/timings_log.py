"""Seconds of every round, apart from the metrics because no two runs agree on them.

One JSON object a line, for instance ``{"round": 3, "training": 0.21, "evaluation": 0.04}``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from coterie.runs.storage.atomic_files import write_text


class TimingsLog:
    """The timings of one run.

    Parameters
    ----------
    path
        The file, ``timings.jsonl`` in the run's folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lines: list[str] = []
        self._latest: dict[str, float] = {}

    @property
    def latest(self) -> dict[str, float]:
        """Seconds of the last round that this object was given, by what they were spent on."""
        return dict(self._latest)

    def append(self, round_number: int, **seconds: float) -> None:
        """Record the seconds of one round by what they were spent on, as in ``training=0.2, evaluation=0.1``."""
        self._latest = {stage: float(spent) for stage, spent in seconds.items()}
        entry = {"round": int(round_number), **self._latest}
        self._lines.append(json.dumps(entry) + "\n")

    def flush(self) -> None:
        """Put what was appended so far on the disk."""
        if not self._lines:
            return
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(self._lines)
            file.flush()
            os.fsync(file.fileno())
        self._lines = []

    def cut(self, round_number: int) -> None:
        """Forget the timings after a round, and a last line that a kill cut short."""
        kept = [line for line in (*self._whole_lines(), *self._lines) if json.loads(line)["round"] <= round_number]
        self._lines = []
        if self._path.exists() or kept:
            write_text(self._path, "".join(kept))

    def read(self) -> pd.DataFrame:
        """Read the timings recorded so far: a row a round, ``round`` and a column for each stage, 0 if left out."""
        rows = [json.loads(line) for line in (*self._whole_lines(), *self._lines)]
        frame = pd.DataFrame(rows, columns=list(dict.fromkeys(("round", *(key for row in rows for key in row)))))
        return frame.fillna(0.0).astype({key: "int64" if key == "round" else "float64" for key in frame.columns})

    def total(self) -> float:
        """Give the seconds of all rounds together; a round that was redone after a kill counts once."""
        return float(self.read().drop(columns="round").to_numpy().sum())

    def _whole_lines(self) -> Iterator[str]:
        if self._path.exists():
            with self._path.open(encoding="utf-8") as file:
                yield from (line for line in file if line.endswith("\n"))
