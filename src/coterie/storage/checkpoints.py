"""Checkpoints: everything that the next round needs, whole or not there.

A checkpoint is a folder, ``checkpoint/000003-round-00000020/``::

    state.safetensors   the tensors, ``server/NAME`` and ``clients/NAME``
    checkpoint.json     the run that it belongs to, the round, the order of the tensors, whatever scalars the experiment
                        adds, the size and SHA-256 of the other file, and a SHA-256 of all this

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
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from coterie.errors import CheckpointError
from coterie.storage.atomic import sync

_NAME = re.compile(r"(\d+)-round-(\d+)")
_DRAFT = ".writing"
_KEPT = 2
_TENSORS = "state.safetensors"
_RECORD = "checkpoint.json"


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


def settled(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Give a state as a checkpoint would give it back: contiguous, and each tensor alone in its memory.

    Strides and alignment can decide which kernel computes a product, and so its last bit. A run that passes its state
    through here at every round's end therefore goes on exactly as one that was resumed from a checkpoint.

    Parameters
    ----------
    state
        Named tensors; they are not changed, and those that are settled already are not copied.

    Returns
    -------
    dict of str to Tensor
        The same names and values, in the same order.
    """
    out: dict[str, Tensor] = {}
    owners: set[int] = set()
    for name, tensor in state.items():
        value = tensor.detach()
        storage = value.untyped_storage()
        alone = value.is_contiguous() and storage.nbytes() == value.nbytes and storage.data_ptr() not in owners
        out[name] = value if alone else value.clone(memory_format=torch.contiguous_format)
        owners.add(storage.data_ptr())
    return out


class Checkpoints:
    """The checkpoints of one run; the last two are kept.

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

    def save(
        self,
        round_number: int,
        server: Mapping[str, Tensor],
        clients: Mapping[str, Tensor],
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint.

        Parameters
        ----------
        round_number
            The round that it closes, 0 for before the first.
        server
            The server's state: tensors of any type, on any device.
        clients
            The clients' state, likewise.
        extra
            Anything that JSON can hold; floats come back bit for bit, NaN and infinities too.

        Returns
        -------
        Path
            Its folder.
        """
        states = {"server": server, "clients": clients}
        draft = self._folder / _DRAFT
        if draft.exists():
            shutil.rmtree(draft)
        draft.mkdir(parents=True)
        tensors = {f"{owner}/{name}": value for owner, state in states.items() for name, value in state.items()}
        save_file(settled(tensors), draft / _TENSORS)
        record = {
            "run": self._run_id,
            "round": int(round_number),
            # A safetensors file has an order of its own; an algorithm may well walk through its state.
            "order": {owner: list(state) for owner, state in states.items()},
            "extra": dict(extra or {}),
            "bytes": (draft / _TENSORS).stat().st_size,
            "sha256": _digest(draft / _TENSORS),
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
        return final

    def latest(self, device: torch.device | str = "cpu") -> Checkpoint | None:
        """Read the newest whole checkpoint, passing over damaged ones.

        Parameters
        ----------
        device
            Where to put the tensors.

        Returns
        -------
        Checkpoint or None
            The checkpoint, or ``None`` if none was ever finished.

        Raises
        ------
        CheckpointError
            If all are damaged, or the newest whole one belongs to another run.
        """
        while True:
            found = self._all()
            reasons = []
            for path in reversed(found):
                try:
                    return self._read(path, torch.device(device))
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
        """List the rounds of the checkpoints that are there, whole or not.

        Returns
        -------
        list of int
            From the oldest to the newest.
        """
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

    def _read(self, path: Path, device: torch.device) -> Checkpoint:
        record = self._record(path)
        try:
            if _digest(path / _TENSORS) != record["sha256"]:
                raise _Damaged(f"{_TENSORS} does not match its checksum")
            loaded = load_file(path / _TENSORS, device=str(device))
        except (OSError, SafetensorError) as error:
            raise _Damaged(f"{_TENSORS} cannot be read ({error})") from error
        # Cloned out of the file's mapping, whose alignment is not that of memory that PyTorch allocates.
        server, clients = (
            {name: loaded[f"{owner}/{name}"].clone() for name in record["order"][owner]}
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


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
