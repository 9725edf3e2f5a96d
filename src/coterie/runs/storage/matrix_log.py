"""Matrices of clients against clients, for each round that has one: collaboration weights, accuracy matrices.

One file a round, ``weights/round-00000010.safetensors``, with the matrix and the clients that its rows and columns
stand for. The words are those of collaboration weights, which say how much each client took from every other.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from coterie.errors import RunFolderError
from coterie.runs.storage.atomic import replace_all

_FILE = re.compile(r"round-(\d+)\.safetensors")
_BUFFER_BYTES = 2**26


class MatrixLog:
    """The collaboration weights of one run, or other matrices of clients against clients.

    Making one touches nothing on the disk, so it serves readers as well as the one writer.

    Parameters
    ----------
    folder
        The folder, ``weights`` in the run's folder.
    what
        What the matrices are, for error messages.
    axes
        What the clients of the rows and of the columns are called.
    """

    def __init__(
        self, folder: Path, what: str = "collaboration weights", axes: tuple[str, str] = ("taker", "giver")
    ) -> None:
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
        weights: npt.ArrayLike,
        takers: npt.ArrayLike,
        givers: npt.ArrayLike | None = None,
    ) -> None:
        """Record the weights of one round.

        Parameters
        ----------
        round_number
            The round; appending it again replaces what was there.
        weights
            The matrix, ``weights[i, j]`` being what ``takers[i]`` took from ``givers[j]``; copied, in its own type.
        takers
            The clients that the rows stand for.
        givers
            The clients that the columns stand for, by default those of the rows.

        Raises
        ------
        ValueError
            If the matrix and the clients do not match.
        """
        matrix = np.array(weights, order="C")
        rows = np.array(takers, dtype=np.int32, ndmin=1)
        columns = rows.copy() if givers is None else np.array(givers, dtype=np.int32, ndmin=1)
        if matrix.shape != (len(rows), len(columns)):
            raise ValueError(
                f"weights of shape {matrix.shape} do not go with {len(rows)} takers and {len(columns)} givers"
            )
        self._buffer[int(round_number)] = {"weights": matrix, "takers": rows, "givers": columns}
        self._latest = (int(round_number), matrix)
        if sum(entry["weights"].nbytes for entry in self._buffer.values()) >= _BUFFER_BYTES:
            self.flush()

    def flush(self) -> None:
        """Put what was appended so far on the disk."""
        writers = {self._file(number).name: partial(save_file, entry) for number, entry in self._buffer.items()}
        replace_all(self._folder, writers)
        self._buffer = {}

    def cut(self, round_number: int) -> None:
        """Forget the weights after a round.

        Parameters
        ----------
        round_number
            The last round to keep.
        """
        self._buffer = {key: entry for key, entry in self._buffer.items() if key <= round_number}
        for number in self._stored():
            if number > round_number:
                self._file(number).unlink()

    def rounds(self) -> list[int]:
        """List the rounds that have weights.

        Returns
        -------
        list of int
            In order.
        """
        return sorted({*self._stored(), *self._buffer})

    def read(self, round_number: int | None = None) -> pd.DataFrame:
        """Read the weights of one round.

        Parameters
        ----------
        round_number
            The round, by default the last that has weights.

        Returns
        -------
        pandas.DataFrame
            The matrix; its index and columns are client numbers, named by the log's axes.

        Raises
        ------
        RunFolderError
            If there are none for that round, or their file is damaged.
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
        try:
            entry = load_file(self._file(number))
        except SafetensorError as error:
            raise RunFolderError(f"{self._file(number)} is damaged ({error}): it must hold {self._what}") from error
        return pd.DataFrame(
            entry["weights"],
            index=pd.Index(entry["takers"], name=self._axes[0]),
            columns=pd.Index(entry["givers"], name=self._axes[1]),
        )

    def _file(self, round_number: int) -> Path:
        return self._folder / f"round-{round_number:08d}.safetensors"

    def _stored(self) -> list[int]:
        found = self._folder.iterdir() if self._folder.is_dir() else iter(())
        return sorted(int(match[1]) for path in found if (match := _FILE.fullmatch(path.name)))
