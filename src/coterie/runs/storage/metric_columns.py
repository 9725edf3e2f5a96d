"""What was measured, in long form, as NumPy arrays: what summaries and standings look rows up in.

A comparison does so dozens of times for each run, and each time pandas takes as long as NumPy does for all of them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

NAMES = ("model", "split", "metric")
"""The columns that hold words."""

Mask = npt.NDArray[np.bool_]
Integers = npt.NDArray[np.int32]
Numbers = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Words:
    """A column of words, by their places in a list of those that there are."""

    words: Sequence[str]
    codes: npt.NDArray[np.integer[Any]]

    def are(self, word: str) -> Mask:
        """Say which rows have a word."""
        places = [place for place, each in enumerate(self.words) if each == word]
        return self.codes == places[0] if places else np.zeros(len(self.codes), dtype=np.bool_)

    def __getitem__(self, rows: Any) -> Words:
        return Words(self.words, self.codes[rows])


@dataclass(frozen=True)
class MetricColumns:
    """The columns of a table of metrics; see :meth:`coterie.runs.storage.MetricsLog.read`.

    Parameters
    ----------
    round
        The round that a row was measured after.
    client
        Whose it is.
    names
        ``model``, ``split`` and ``metric``.
    value
        What was measured.
    """

    round: Integers
    client: Integers
    names: dict[str, Words]
    value: Numbers

    @classmethod
    def of_table(cls, table: pa.Table) -> MetricColumns:
        """Take the columns of an Arrow table whose words are in dictionaries."""
        table = table.unify_dictionaries().combine_chunks()
        plain = [table[name].to_numpy() for name in ("round", "client", "value")]
        names = {}
        for name in NAMES:
            found = table[name]
            empty = not found.num_chunks or not pa.types.is_dictionary(found.type)
            part = pa.array([], pa.string()).dictionary_encode() if empty else found.chunk(0)
            names[name] = Words(part.dictionary.to_pylist(), part.indices.to_numpy())
        return cls(plain[0], plain[1], names, plain[2])

    @classmethod
    def of_frame(cls, frame: pd.DataFrame) -> MetricColumns:
        """Take the columns of a pandas table."""
        names = {}
        for name in NAMES:
            codes, words = pd.factorize(frame[name])
            names[name] = Words([str(word) for word in words], codes)
        return cls(frame["round"].to_numpy(), frame["client"].to_numpy(), names, frame["value"].to_numpy())

    def where(self, *, clients: Collection[int] | None = None, **words: str) -> MetricColumns:
        """Give the rows with some words, and of some clients where these are given, in their order."""
        chosen = np.ones(len(self.value), dtype=np.bool_)
        for name, word in words.items():
            chosen &= self.names[name].are(word)
        if clients is not None:
            chosen &= np.isin(self.client, np.fromiter(clients, dtype=np.int64))
        return self.only(chosen)

    def after(self, round_number: int) -> MetricColumns:
        """Give the rows that were measured after a round."""
        return self.only(self.round == round_number)

    def only(self, rows: Mask) -> MetricColumns:
        """Give some rows, in their order."""
        return MetricColumns(
            self.round[rows],
            self.client[rows],
            {name: words[rows] for name, words in self.names.items()},
            self.value[rows],
        )

    def frame(self) -> pd.DataFrame:
        """Give the rows as a pandas table, with words as categories in alphabetical order."""
        columns: dict[str, Any] = {"round": self.round, "client": self.client}
        for name, words in self.names.items():
            order = sorted(range(len(words.words)), key=words.words.__getitem__)
            place = np.empty(len(order), dtype=np.int64)
            place[order] = np.arange(len(order))
            columns[name] = pd.Categorical.from_codes(
                place[words.codes], pd.Index([words.words[each] for each in order])
            )
        return pd.DataFrame({**columns, "value": self.value})

    def __len__(self) -> int:
        return len(self.value)
