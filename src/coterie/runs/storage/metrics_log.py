"""What was measured, in long form: one row for each round, client, model, split and metric.

While a run goes on, rows lie in part files (``metrics/part-000001.parquet``, …), each written in one step; at its end
they become one ``metrics.parquet``. While both are there, a merge was interrupted after its last step but one:
``metrics.parquet`` is the whole truth and the parts are leftovers.

Rows come in the order of rounds and, within a round, in the order in which they were appended, so two runs that
measured the same hold the same table bit for bit, however often either was killed and resumed. Nothing here depends on
time: seconds are kept apart, by :class:`~coterie.runs.storage.timings_log.TimingsLog`. Bytes on the wire are
reproducible and belong here, as numbers of the whole federation (client :data:`EVERYONE`).
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from coterie.errors import RunFolderError
from coterie.runs.storage.atomic_files import replacing, sync, write_bytes
from coterie.runs.storage.metric_columns import NAMES, MetricColumns
from coterie.runs.storage.seals import BLANK, check_seal, seal, sealed

EVERYONE = -1
"""The client number of what belongs to no client in particular."""

_SCHEMA = pa.schema(
    [("round", pa.int32()), ("client", pa.int32()), *((name, pa.string()) for name in NAMES), ("value", pa.float64())]
)
_EVERYONE = np.array([EVERYONE], dtype=np.int32)
_GROUP_ROWS = 2**20  # rows of a group in the merged file: fixed, so that the file does not depend on the parts
_SMALL_ROWS = 2**16  # of which a part is made in memory: a file would be opened several times
_BUFFER_ROWS = 2**22  # about 50 MB
_PAUSES = (0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)  # seconds between tries to read what another process is writing
_PART = re.compile(r"part-(\d+)\.parquet")


class Block(NamedTuple):
    """One metric of some clients, as it was appended."""

    round: int
    model: str
    split: str
    metric: str
    clients: npt.NDArray[np.int32]
    values: npt.NDArray[np.float64]


class MetricsLog:
    """The metrics of one run.

    Making one touches nothing on the disk, so it serves readers as well as the one writer.

    Parameters
    ----------
    run
        The run's folder.
    """

    def __init__(self, run: Path) -> None:
        self._merged = run / "metrics.parquet"
        self._folder = run / "metrics"
        self._buffer: list[Block] = []
        self._buffered = 0
        self._last_round = 0
        self._latest: list[Block] = []

    @property
    def latest(self) -> Sequence[Block]:
        """What was appended of the last round that this object was given, on the disk already or not."""
        return self._latest

    def append(
        self,
        round_number: int,
        model: str,
        split: str,
        metric: str,
        values: npt.ArrayLike,
        clients: npt.ArrayLike,
    ) -> None:
        """Record one metric of some clients, measured after a round (0: before the first); arrays are copied.

        ``model`` is for instance ``"personal"`` or ``"global"``, ``split`` for instance ``"test"``. A client without
        samples of the split is left out, not given a NaN. Rounds must not go backwards.
        """
        block = Block(
            int(round_number),
            model,
            split,
            metric,
            np.array(clients, dtype=np.int32, ndmin=1),
            np.array(values, dtype=np.float64, ndmin=1),
        )
        if block.values.ndim != 1 or block.values.shape != block.clients.shape:
            raise ValueError(
                f"values of shape {block.values.shape} do not go with clients of shape {block.clients.shape}: "
                "there must be one value a client"
            )
        if len(block.values):
            self._add(block)

    def _add(self, block: Block) -> None:
        if block.round < self._last_round:
            raise ValueError(f"round {block.round} comes after round {self._last_round}: rounds must not go backwards")
        if block.round > self._last_round:
            self._latest = []
        self._last_round = block.round
        self._latest.append(block)
        self._buffer.append(block)
        self._buffered += len(block.values)
        if self._buffered >= _BUFFER_ROWS:
            self.flush()

    def append_bytes(self, round_number: int, up: int, down: int) -> None:
        """Record the bytes that crossed the wire in a round, from and to all clients together."""
        for metric, count in (("bytes_up", up), ("bytes_down", down)):
            self._add(
                Block(int(round_number), "federation", "wire", metric, _EVERYONE, np.array([count], dtype=np.float64))
            )

    def flush(self) -> None:
        """Put what was appended so far on the disk, as a further part."""
        if not self._buffer:
            return
        self._unmerge()
        numbers = [int(match[1]) for path in self._parts() if (match := _PART.fullmatch(path.name))]
        part = self._folder / f"part-{max(numbers, default=0) + 1:06d}.parquet"
        if self._buffered <= _SMALL_ROWS:
            content = pa.BufferOutputStream()
            _write_tables([_table(self._buffer)], content)
            write_bytes(part, sealed(content.getvalue().to_pybytes()))
        else:
            with replacing(part) as draft:
                _write([_table(self._buffer)], draft)
        self._buffer, self._buffered = [], 0

    def cut(self, round_number: int) -> None:
        """Forget everything measured after a round, in memory and on the disk."""
        self._buffer = [block for block in self._buffer if block.round <= round_number]
        self._buffered = sum(len(block.values) for block in self._buffer)
        self._last_round = min(self._last_round, round_number)
        self._latest = [block for block in self._latest if block.round <= round_number]
        self._unmerge()
        for part in self._parts():
            rounds = _read(part, columns=["round"])["round"]
            if pc.min(rounds).as_py() > round_number:
                part.unlink()
            elif pc.max(rounds).as_py() > round_number:
                kept = _read(part).filter(pc.less_equal(rounds, round_number))
                with replacing(part) as draft:
                    _write([kept], draft)

    def merge(self) -> None:
        """Put everything into one ``metrics.parquet`` and remove the parts."""
        self.flush()
        if self._merged.exists():
            return
        parts = self._parts()
        if len(parts) == 1:  # which is, byte for byte, what would be made of it
            os.replace(parts[0], self._merged)
            sync(self._merged.parent)
        else:
            with replacing(self._merged) as draft:
                _write(_groups(parts), draft)
            for part in parts:
                part.unlink()
        if self._folder.exists():
            self._folder.rmdir()

    def read(self) -> pd.DataFrame:
        """Read everything recorded so far, of a run that is finished or not.

        Columns are ``round`` and ``client`` (int32), ``model``, ``split`` and ``metric`` (categories in alphabetical
        order) and ``value`` (float64); rows are in the order of rounds and then of recording.
        """
        frame: pd.DataFrame = self._recorded().unify_dictionaries().to_pandas()
        for name in NAMES:
            column = frame[name].astype("category")
            frame[name] = column.cat.set_categories(sorted(column.cat.categories))
        return frame

    def columns(self) -> MetricColumns:
        """Give what :meth:`read` gives as arrays, in a tenth of the time."""
        return MetricColumns.of_table(self._recorded())

    def _recorded(self) -> pa.Table:
        self.flush()
        for pause in _PAUSES:
            try:
                return self._on_disk()
            except FileNotFoundError:  # another process merges the parts, or goes on with them, meanwhile
                time.sleep(pause)
        return self._on_disk()

    def _on_disk(self) -> pa.Table:
        tables = [_read(path, read_dictionary=NAMES) for path in self._files()]
        return pa.concat_tables(tables) if tables else _SCHEMA.empty_table()

    def _parts(self) -> list[Path]:
        found = self._folder.glob("part-*.parquet") if self._folder.is_dir() else iter(())
        return sorted(path for path in found if _PART.fullmatch(path.name))

    def _files(self) -> Sequence[Path]:
        return [self._merged] if self._merged.exists() else self._parts()

    def _unmerge(self) -> None:
        """Make the merged file the first part again, so that there is one way to add and to cut."""
        if not self._merged.exists():
            return
        for leftover in self._parts():
            leftover.unlink()
        if not _row_count(self._merged):  # a run that recorded nothing was merged; a part always has rows
            self._merged.unlink()
            return
        self._folder.mkdir(exist_ok=True)
        os.replace(self._merged, self._folder / "part-000000.parquet")


def _table(blocks: Sequence[Block]) -> pa.Table:
    sizes = [len(block.values) for block in blocks]
    columns: list[pa.Array] = [
        pa.array(np.repeat(np.array([block.round for block in blocks], dtype=np.int32), sizes)),
        pa.array(np.concatenate([block.clients for block in blocks])),
    ]
    for name in NAMES:
        words, codes = np.unique([getattr(block, name) for block in blocks], return_inverse=True)
        indices = pa.array(np.repeat(codes.astype(np.int32), sizes))
        columns.append(
            pa.DictionaryArray.from_arrays(indices, pa.array(words.tolist(), pa.string())).dictionary_decode()
        )
    columns.append(pa.array(np.concatenate([block.values for block in blocks])))
    return pa.Table.from_arrays(columns, schema=_SCHEMA)


def _write(tables: Iterable[pa.Table], draft: Path) -> None:
    _write_tables(tables, draft)
    seal(draft)


def _write_tables(tables: Iterable[pa.Table], where: Path | pa.BufferOutputStream) -> None:
    with pq.ParquetWriter(where, _SCHEMA.with_metadata({"checksum": BLANK}), compression="zstd") as writer:
        for table in tables:
            writer.write_table(table, row_group_size=_GROUP_ROWS)


def _row_count(path: Path) -> int:
    with _opened(path) as file:
        return int(file.metadata.num_rows)


def _read(path: Path, columns: Sequence[str] | None = None, read_dictionary: Sequence[str] = ()) -> pa.Table:
    with _opened(path, read_dictionary) as file:
        return file.read(columns=columns)


@contextlib.contextmanager
def _opened(path: Path, read_dictionary: Sequence[str] = ()) -> Iterator[pq.ParquetFile]:
    # ``ParquetFile`` and not ``read_table``: the latter takes a folder called ``lr=0.1`` for a column of the table.
    check_seal(path)
    try:
        with pq.ParquetFile(path, read_dictionary=list(read_dictionary)) as file:
            yield file
    except pa.ArrowException as error:
        raise RunFolderError(f"{path} is damaged ({error}): it must be a table that this run wrote") from error


def _groups(parts: Sequence[Path]) -> Iterator[pa.Table]:
    """Cut the parts' rows anew into groups of a fixed size, holding one part and one group in memory."""
    rest = _SCHEMA.empty_table()
    for part in parts:
        rest = pa.concat_tables([rest, _read(part)])
        while rest.num_rows >= _GROUP_ROWS:
            yield rest.slice(0, _GROUP_ROWS).combine_chunks()
            rest = rest.slice(_GROUP_ROWS)
    if rest.num_rows:
        yield rest.combine_chunks()
