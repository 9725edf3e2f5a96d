"""Matrices of clients against clients, for each round that has one: collaboration weights, accuracy matrices.

One file a round, ``weights/round-00000010.safetensors``, with the matrix and the clients that its rows and columns
stand for.
"""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from coterie.errors import RunFolderError
from coterie.runs.storage.atomic_files import replace_all
from coterie.runs.storage.seals import BLANK, check_seal, sealed

_FILE = re.compile(r"round-(\d+)\.safetensors")
_BUFFER_BYTES = 2**26


class MatrixLog:
    """Matrices of clients against clients of one run.

    Making one touches nothing on the disk, so it serves readers as well as the one writer.

    Parameters
    ----------
    folder
        The folder, for instance ``weights`` in the run's folder.
    what
        What the matrices are, for error messages.
    axes
        What the clients of the rows and of the columns are called in what is read.
    """

    def __init__(self, folder: Path, what: str, axes: tuple[str, str]) -> None:
        self._folder, self._what, self._axes = folder, what, axes
        self._buffer: dict[int, dict[str, npt.NDArray[np.generic]]] = {}
        self._latest: tuple[int, npt.NDArray[np.generic]] | None = None

    @property
    def latest(self) -> tuple[int, npt.NDArray[np.generic]] | None:
        """The last round that this object was given and its matrix, on the disk already or not."""
        return self._latest

    def append(
        self,
        round_number: int,
        matrix: npt.ArrayLike,
        rows: npt.ArrayLike,
        columns: npt.ArrayLike | None = None,
    ) -> None:
        """Record the matrix of one round, in its own type, in place of one that was recorded for that round before.

        ``rows`` and ``columns`` are the clients that these stand for; the columns' are by default those of the rows.
        """
        values = np.array(matrix, order="C")
        over = np.array(rows, dtype=np.int32, ndmin=1)
        across = over.copy() if columns is None else np.array(columns, dtype=np.int32, ndmin=1)
        if values.shape != (len(over), len(across)):
            raise ValueError(
                f"a matrix of shape {values.shape} does not go with {len(over)} rows and {len(across)} columns"
            )
        self._buffer[int(round_number)] = {"matrix": values, "rows": over, "columns": across}
        self._latest = (int(round_number), values)
        if sum(entry["matrix"].nbytes for entry in self._buffer.values()) >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Put what was appended so far on the disk."""
        # One after the other; and not by ``save_file``: a full disk is no OSError there.
        replace_all(
            self._folder,
            (
                (self._file(number).name, sealed(save(entry, {"checksum": BLANK})))
                for number, entry in self._buffer.items()
            ),
        )
        self._buffer = {}

    def cut(self, round_number: int) -> None:
        """Forget the matrices after a round."""
        self._buffer = {key: entry for key, entry in self._buffer.items() if key <= round_number}
        for number in self._stored():
            if number > round_number:
                self._file(number).unlink()

    def rounds(self) -> list[int]:
        """List the rounds that have a matrix, in order."""
        return sorted({*self._stored(), *self._buffer})

    def read(self, round_number: int | None = None) -> pd.DataFrame:
        """Read the matrix of one round, by default of the last that has one.

        Index and columns are clients, named by the log's axes. If there is none, or its file is damaged, that is a
        ``RunFolderError``.
        """
        rounds = self.rounds()
        if not rounds:
            raise RunFolderError(f"{self._folder.parent} holds no {self._what}: none were recorded")
        number = rounds[-1] if round_number is None else round_number
        if number not in rounds:
            raise RunFolderError(
                f"round {number} has no {self._what}: there are some for {len(rounds)} round(s) "
                f"from {rounds[0]} to {rounds[-1]}"
            )
        self.flush()
        check_seal(self._file(number))
        try:
            entry = load_file(self._file(number))
        except SafetensorError as error:
            raise RunFolderError(f"{self._file(number)} is damaged ({error}): it must hold {self._what}") from error
        return pd.DataFrame(
            entry["matrix"],
            index=pd.Index(entry["rows"], name=self._axes[0]),
            columns=pd.Index(entry["columns"], name=self._axes[1]),
        )

    def _file(self, round_number: int) -> Path:
        return self._folder / f"round-{round_number:08d}.safetensors"

    def _stored(self) -> list[int]:
        found = self._folder.iterdir() if self._folder.is_dir() else iter(())
        return sorted(int(match[1]) for path in found if (match := _FILE.fullmatch(path.name)))
