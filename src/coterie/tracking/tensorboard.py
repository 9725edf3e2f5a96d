"""TensorBoard: event files that ``tensorboard --logdir`` shows.

Files are written in this process, one event after another, and forced to the disk after every round: a writer with a
thread and a queue of its own (as ``SummaryWriter`` has) loses what it holds when the process is killed, and waits for
ever when its disk is full.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from coterie.errors import RunFolderError
from coterie.tracking.base import Measured, TrackedRun, Vector, results

FOLDER = "tensorboard"
_EVENTS = "events.out.tfevents"
_BINS = 30
_SIDE = 256  # pixels of an image's side at most


class TensorBoard:
    """Writes event files.

    Parameters
    ----------
    folder
        Where; runs have folders of their names in it. By default ``tensorboard`` in the run's own folder.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._folder = None if folder is None else Path(folder).expanduser()
        self._writer: Any = None
        self._run: TrackedRun | None = None

    def place(self, run: Path) -> Path:
        """Return the folder of a run's event files."""
        return run / FOLDER if self._folder is None else self._folder / run.resolve().name

    def refuse_taken(self, run: Path) -> None:
        """Refuse to mix the events of a new run with those of another one."""
        place = self.place(run)
        if any(place.glob(f"{_EVENTS}*")):
            raise RunFolderError(f"{place} holds the events of another run: track in another folder, or remove them")

    def begin(self, run: TrackedRun) -> None:
        """Open a new event file."""
        from tensorboardX import RecordWriter
        from tensorboardX.proto.event_pb2 import Event, SessionLog

        place = self.place(run.path).absolute()
        place.mkdir(parents=True, exist_ok=True)
        # Named by the round after which it goes on: files are read in the order of their names.
        name = f"{_EVENTS}.{int(time.time()):010d}.{socket.gethostname()}.{run.after:08d}"
        self._run, self._writer = run, RecordWriter(str(place / name))
        self._write(Event(file_version="brain.Event:2"), 0)
        # Readers drop what other files hold from this step on: those rounds are told again.
        self._write(Event(session_log=SessionLog(status=SessionLog.START)), run.after + 1)

    def round(self, number: int, measured: Measured) -> None:
        """Write scalars, histograms over clients and an image of the weights."""
        from tensorboardX import summary

        values = [summary.scalar(name, value) for name, value in measured.scalars.items()]
        values += [summary.histogram(name, each, _BINS) for name, each in measured.clients.items()]
        if measured.weights is not None and measured.weights.size:
            values.append(summary.image("weights", picture(measured.weights), dataformats="HW"))
        self._write_summaries(values, number)

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """Write the configuration beside the result, for the table of all runs."""
        from tensorboardX import summary as make

        if summary is not None and self._run is not None:
            found = results(summary)
            last = int(summary["rounds"])
            self._write_summaries([make.scalar(name, value) for name, value in found.items()], last)
            headline = {name: value for name, value in found.items() if name.endswith("/final/mean")}
            self._write_summaries(list(make.hparams(self._run.settings(), headline)), 0)
        self._close()

    def _write_summaries(self, summaries: list[Any], step: int) -> None:
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        self._write(Event(summary=Summary(value=[value for each in summaries for value in each.value])), step)

    def _write(self, event: Any, step: int) -> None:
        event.wall_time, event.step = time.time(), step
        try:
            self._writer.write(event.SerializeToString())
            self._writer.flush()
        except OSError:
            self._close()
            raise

    def _close(self) -> None:
        if self._writer is not None:
            with contextlib.suppress(OSError):  # a full disk refuses what is left once more
                self._writer.close()
            self._writer = None


def picture(weights: Vector) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Draw a matrix in grey, its largest entry white."""
    shown = np.clip(np.nan_to_num(weights, nan=0.0, posinf=0.0, neginf=0.0), 0.0, None)
    for axis in (0, 1):
        starts = np.unique(np.linspace(0, shown.shape[axis], min(_SIDE, shown.shape[axis]), endpoint=False, dtype=int))
        sizes = np.diff([*starts, shown.shape[axis]])
        shape = (-1, 1) if axis == 0 else (1, -1)
        shown = np.add.reduceat(shown, starts, axis=axis) / sizes.reshape(shape)
    return np.asarray(np.rint(255 * shown / (shown.max() or 1.0)), dtype=np.uint8)
