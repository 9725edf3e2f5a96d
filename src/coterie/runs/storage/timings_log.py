"""Seconds of every round, apart from the metrics because no two runs agree on them.

One JSON object a line, for instance ``{"round": 3, "training": 0.21, "evaluation": 0.04}``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from coterie.errors import RunFolderError
from coterie.runs.storage.atomic_files import append_lines, write_text


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
        # As JSON has it, in a fifth of the time: there is one for every run and round of a study.
        entries = [f'"round": {int(round_number)}', *(f'"{name}": {spent!r}' for name, spent in self._latest.items())]
        self._lines.append("{" + ", ".join(entries) + "}\n")

    def flush(self) -> None:
        """Put what was appended so far on the disk."""
        if not self._lines:
            return
        append_lines(self._path, self._lines)
        self._lines = []

    def cut(self, round_number: int) -> None:
        """Forget the timings after a round, and a last line that a kill cut short."""
        lines = (*self._whole_lines(), *self._lines)
        kept = [line for line in lines if self._parsed(line)["round"] <= round_number]
        self._lines = []
        if self._path.exists() or kept:
            write_text(self._path, "".join(kept))

    def read(self) -> pd.DataFrame:
        """Read the timings recorded so far: a row a round, ``round`` and a column for each stage, 0 if left out."""
        rows = [self._parsed(line) for line in (*self._whole_lines(), *self._lines)]
        frame = pd.DataFrame(rows, columns=list(dict.fromkeys(("round", *(key for row in rows for key in row)))))
        return frame.fillna(0.0).astype({key: "int64" if key == "round" else "float64" for key in frame.columns})

    def total(self) -> float:
        """Give the seconds of all rounds together; a round that was redone after a kill counts once."""
        rounds = (self._parsed(line) for line in (*self._whole_lines(), *self._lines))
        return math.fsum(spent for each in rounds for stage, spent in each.items() if stage != "round")

    def _parsed(self, line: str) -> dict[str, float]:
        try:
            entry = json.loads(line)
            return {"round": int(entry.pop("round")), **{stage: float(spent) for stage, spent in entry.items()}}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise RunFolderError(
                f"{self._path} is damaged (a line reads {line.strip()[:80]!r}): each must hold a round and its seconds"
            ) from error

    def _whole_lines(self) -> Iterator[str]:
        if self._path.exists():
            with self._path.open(encoding="utf-8", errors="replace") as file:
                yield from (line for line in file if line.endswith("\n"))
