"""Checkpoints: everything that the next round needs, whole or not there.

A checkpoint is a folder, ``checkpoint/000003-round-00000020/``::

    state.safetensors   the tensors, ``server/NAME`` and ``clients/NAME``
    checkpoint.json     its format and the version of Coterie that wrote it, the run that it belongs to, the round, the
                        order of the tensors, whatever scalars the experiment adds, the size and SHA-256 of the other
                        file, and a SHA-256 of all this

In every format ``checkpoint.json`` is a JSON object whose ``checksum`` is the SHA-256 of the rest, so that a checkpoint
of another format can be told from a damaged one.

Of a matrix that is kept for all clients, and of which some rows were never changed, ``NAME`` holds the rows that were,
``NAME (index)`` their numbers and ``NAME (opening)`` the row that all others are; ``checkpoint.json`` then says under
``repeated`` how many rows there are. Large tensors are written and read block by block.

It is written under a draft name, forced to the disk and renamed, and only then is the last but two removed: at every
instant at least one whole checkpoint is there, once one was. The number in front counts checkpoints, so that one that
is written again (a round redone after a damaged one was passed over) never has to take the place of another.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.errors import CheckpointError
from coterie.rows import ClientMatrix
from coterie.runs.storage import tensor_file
from coterie.runs.storage.atomic_files import sync
from coterie.runs.storage.format_versions import check_format, stamp
from coterie.runs.storage.tensor_file import BLOCK, NotATensorFile, StoredTensor, TensorToWrite

FORMAT = 1
_NAME = re.compile(r"(\d+)-round-(\d+)")
_DRAFT = ".writing"
_KEPT = 2
_TENSORS = "state.safetensors"
_RECORD = "checkpoint.json"
_LARGE = 2**28  # bytes of a state whose checkpoints are spaced by the time that they take, however often they are due
_BYTES_A_SECOND = 1e9  # that are written with their checksum, until it is known how many are
_SECONDS = 1.0  # of work that is not worth a checkpoint of its own


@dataclass(frozen=True)
class Checkpoint:
    """What :meth:`Checkpoints.latest` found.

    Parameters
    ----------
    round
        The round after which it was written, 0 for before the first.
    server
        The server's state.
    clients
        The clients' state.
    extra
        The scalars that were given to :meth:`Checkpoints.save`, as JSON gives them back (a tuple becomes a list).
    """

    round: int
    server: dict[str, Tensor]
    clients: dict[str, Tensor]
    extra: dict[str, Any] = field(default_factory=dict)


class _Damaged(Exception):
    """One checkpoint cannot be used; says why."""


def as_restored(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give a state as a checkpoint would give it back: contiguous, and each tensor alone in its memory.

    Strides and alignment can decide which kernel computes a product, and so its last bit. A run that passes its state
    through here at every round's end therefore goes on exactly as one that was resumed from a checkpoint. Tensors that
    are so already are not copied.
    """
    out: dict[str, Tensor] = {}
    owners: set[int] = set()
    for name, tensor in state.items():
        if isinstance(tensor, ClientMatrix):  # lies alone on its backend, and where it lies decides nothing
            out[name] = tensor
            continue
        value = tensor.detach() if tensor.requires_grad else tensor
        storage = value.untyped_storage()
        alone = value.is_contiguous() and storage.nbytes() == value.nbytes and storage.data_ptr() not in owners
        out[name] = value if alone else value.clone(memory_format=torch.contiguous_format)
        owners.add(storage.data_ptr())
    return out


class Checkpoints:
    """The checkpoints of one run, of which the last two are there.

    Making one touches nothing on the disk, so it serves readers as well as the one writer.

    Parameters
    ----------
    folder
        The folder, ``checkpoint`` in the run's folder.
    run_id
        Names the run; a checkpoint of another run is refused.
    """

    def __init__(self, folder: Path, run_id: str) -> None:
        self._folder = folder
        self._run_id = run_id
        self._damaged: set[Path] = set()  # found on reading; only a reader pays for checksums
        self._large = False
        self.timed_by(time.monotonic)

    def timed_by(self, clock: Callable[[], float], nbytes: int = 0) -> None:
        """Space checkpoints by this clock from now on: that of a run that plays with others stands while they play.

        ``nbytes`` is the size of a state, by which the time of the first one is guessed.
        """
        self._clock = clock
        # When the last one was done, or this was called, and seconds that it took, or the first one may take.
        self._took = (clock(), nbytes / _BYTES_A_SECOND)

    def save(
        self,
        round_number: int,
        server: Mapping[str, Tensor],
        clients: Mapping[str, Tensor],
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint of the round that it closes (0: before the first), and give its folder.

        Tensors may be of any type and on any device. ``extra`` is anything that JSON can hold; floats come back bit for
        bit, NaN and infinities too.
        """
        began = self._clock()
        states = {"server": server, "clients": clients}
        draft = self._folder / _DRAFT
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(parents=True)
        tensors = {f"{owner}/{name}": value for owner, state in states.items() for name, value in state.items()}
        entries, repeated = _entries(tensors)
        size, digest = tensor_file.write(draft / _TENSORS, entries)
        record = {
            **stamp(FORMAT),
            "run": self._run_id,
            "round": int(round_number),
            # A safetensors file has an order of its own; an algorithm may well walk through its state.
            "order": {owner: list(state) for owner, state in states.items()},
            "extra": dict(extra or {}),
            "bytes": size,
            "sha256": digest,
            **({"repeated": repeated} if repeated else {}),
        }
        text = json.dumps({**record, "checksum": _checksum(record)}, indent=2)
        (draft / _RECORD).write_text(text, encoding="utf-8")
        for path in (draft / _TENSORS, draft / _RECORD, draft):
            sync(path)
        sequence = max((_number(path) for path in self._all()), default=0) + 1
        final = self._folder / f"{sequence:06d}-round-{round_number:08d}"
        os.replace(draft, final)
        sync(self._folder)
        self._prune()
        self._took, self._large = (self._clock(), self._clock() - began), size >= _LARGE
        return final

    def remove_draft(self) -> None:
        """Remove one that a killed writer left unfinished; only whoever may write may call this."""
        shutil.rmtree(self._folder / _DRAFT, ignore_errors=True)

    @property
    def affordable(self) -> bool:
        """Whether another one that is due may be written: those of a large state take a tenth of the time at most."""
        ended, seconds = self._took
        return not self._large or self._clock() - ended >= 9 * seconds

    @property
    def due(self) -> bool:
        """Whether it is time for another: a second after the last, and so that they take a fiftieth of the time."""
        ended, seconds = self._took
        return self._clock() - ended >= max(_SECONDS, 49 * seconds)

    def latest(
        self, device: torch.device | str = "cpu", places: Mapping[str, Mapping[str, Tensor]] | None = None
    ) -> Checkpoint | None:
        """Read the last whole checkpoint, passing over damaged ones; ``None`` if none was ever finished.

        ``places`` has, under ``server`` and ``clients``, states whose client matrices are filled and given back where
        they have the shape and type of what is read; whatever they held is lost, also where this fails. If all are
        damaged, or the last whole one is of another run or format, that is a ``CheckpointError``.
        """
        while True:
            found = self._all()
            reasons = []
            for path in reversed(found):
                try:
                    return self._read(path, torch.device(device), places or {})
                except _Damaged as reason:
                    self._damaged.add(path)
                    reasons.append(f"{path.name}: {reason}")
            if found == self._all():  # else another process wrote one meanwhile, and removed those that were listed
                break
        if not found:
            return None
        raise CheckpointError(
            f"no checkpoint in {self._folder} is whole ({'; '.join(reasons)}): put back a copy of the folder, "
            "or start the run again under another name"
        )

    def rounds(self) -> list[int]:
        """List the rounds of the checkpoints that are there, whole or not, from the oldest to the newest."""
        return [int(match[2]) for path in self._all() if (match := _NAME.fullmatch(path.name))]

    def _all(self) -> list[Path]:
        found = self._folder.iterdir() if self._folder.is_dir() else iter(())
        return sorted((path for path in found if _NAME.fullmatch(path.name)), key=_number)

    def _record(self, path: Path) -> dict[str, Any]:
        """Read the record and see that the tensors have their size, which is what a crash can spoil."""
        try:
            record = json.loads((path / _RECORD).read_text(encoding="utf-8"))
            checksum = record.pop("checksum")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _Damaged(f"{_RECORD} cannot be read") from error
        if checksum != _checksum(record):
            raise _Damaged(f"{_RECORD} does not match its checksum")
        check_format(f"the checkpoint {path}", record, FORMAT, CheckpointError)
        if record["run"] != self._run_id:
            raise CheckpointError(
                f"{path} belongs to another run (it carries the id {record['run']}, this run has {self._run_id}): "
                "a run goes on only from its own checkpoints, with the configuration it began with"
            )
        tensors = path / _TENSORS
        size = tensors.stat().st_size if tensors.is_file() else None
        if size != record["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes and not {record['bytes']}"
            raise _Damaged(f"{_TENSORS} {found}")
        return dict(record)

    def _read(self, path: Path, device: torch.device, places: Mapping[str, Mapping[str, Tensor]]) -> Checkpoint:
        record = self._record(path)
        repeated: dict[str, int] = record.get("repeated", {})
        loaded: dict[str, Tensor] = {}
        try:
            with tensor_file.opened(path / _TENSORS) as reader:
                for part in reader:
                    # Where there are rows that were left out, their index and the opening row have been read by now.
                    shape = (repeated[part.name], *part.shape[1:]) if part.name in repeated else part.shape
                    index, opening = (loaded.get(f"{part.name} ({what})") for what in ("index", "opening"))
                    if index is not None and not _increasing(index, shape[0]):
                        raise NotATensorFile("it numbers rows that are not there")
                    owner, _, name = part.name.partition("/")
                    place = places.get(owner, {}).get(name)
                    if isinstance(place, ClientMatrix) and (place.shape, place.dtype) == (shape, part.dtype):
                        _fill(place, part, index, opening)
                        loaded[part.name] = place
                    elif index is not None and opening is not None:
                        loaded[part.name] = opening.expand(shape).index_copy(0, index, part.whole())
                    else:
                        loaded[part.name] = part.whole()
                if reader.sha256 != record["sha256"]:
                    raise _Damaged(f"{_TENSORS} does not match its checksum")
        except (OSError, NotATensorFile) as error:
            raise _Damaged(f"{_TENSORS} cannot be read ({error})") from error
        except (KeyError, IndexError, RuntimeError) as error:  # by numbers that are not what was written, or our own
            if _digest(path / _TENSORS) == record["sha256"]:
                raise
            raise _Damaged(f"{_TENSORS} does not match its checksum") from error
        server, clients = (
            {name: _on(loaded[f"{owner}/{name}"], device) for name in record["order"][owner]}
            for owner in ("server", "clients")
        )
        return Checkpoint(record["round"], server, clients, record["extra"])

    def _prune(self) -> None:
        whole = []
        for path in self._all():
            with contextlib.suppress(_Damaged):
                self._record(path)
                whole.append(path)
        kept = [path for path in whole if path not in self._damaged][-_KEPT:]
        for path in self._all():
            if path not in kept:
                shutil.rmtree(path)


def _number(path: Path) -> int:
    return int(path.name.partition("-")[0])


def _entries(tensors: Mapping[str, Tensor]) -> tuple[dict[str, TensorToWrite], dict[str, int]]:
    """Say what to write of a state, and how many rows those matrices have of which not all are written."""
    entries: dict[str, TensorToWrite] = {}
    repeated: dict[str, int] = {}
    for name, value in tensors.items():
        if not isinstance(value, ClientMatrix):
            entries[name] = TensorToWrite.of(value)
            continue
        index = value.backend.changed()
        if len(index) < len(value):
            repeated[name] = len(value)
            entries[f"{name} (index)"] = TensorToWrite.of(index)
            entries[f"{name} (opening)"] = TensorToWrite.of(value.backend.initial_row)
        entries[name] = TensorToWrite((len(index), *value.shape[1:]), value.dtype, partial(_blocks, value, index))
    return entries, repeated


def _blocks(rows: ClientMatrix, index: Tensor) -> Iterator[Tensor]:
    for piece in index.split(max(1, BLOCK // max(1, rows.backend.row_bytes))):
        yield rows.backend.gather_to_host(piece)


def _fill(place: ClientMatrix, part: StoredTensor, index: Tensor | None, opening: Tensor | None) -> None:
    """Put rows in their place as they are read."""
    backend = place.backend
    index = torch.arange(len(place)) if index is None else index
    backend.reset(backend.initial_row if opening is None else opening.to(backend.device))
    at = 0
    for block in part.rows():
        backend.write_from_host(index[at : at + len(block)], block)
        at += len(block)


def _increasing(index: Tensor, count: int) -> bool:
    return not len(index) or (bool((index[1:] > index[:-1]).all()) and int(index[0]) >= 0 and int(index[-1]) < count)


def _on(value: Tensor, device: torch.device) -> Tensor:
    return value if isinstance(value, ClientMatrix) else value.to(device)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
