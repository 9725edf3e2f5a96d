"""A node's state on its own disk: what is committed, and what is pending until the server says that it counts.

::

    STATE/RUN/
      committed.safetensors     the state after the last reply that counts; carries that reply's token
      pending/TOKEN.safetensors the state after a reply of which the node does not know yet whether it counts

Every file is whole or absent, holds its own checksum, and says in its metadata which format it has. The server counts
a reply only once the round that it belongs to is in a checkpoint, so a committed state never has to be taken back.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Collection
from pathlib import Path

from safetensors import SafetensorError, safe_open

from coterie.errors import CheckpointError, RunFolderError
from coterie.federation.wire import Rejected
from coterie.rows import Rows
from coterie.runs.storage.atomic_files import remove_drafts, replacing, sync
from coterie.runs.storage.format_versions import check_format, stamp
from coterie.runs.storage.seals import BLANK, check_seal, seal
from coterie.runs.storage.tensor_file import TensorToWrite, write

_TOKEN = re.compile(r"[0-9a-z-]{1,80}")
_RUN = re.compile(r"[0-9a-z-]{1,80}")
_ENDING = ".safetensors"
_FORMAT = 1


class NodeState:
    """The state of one node in one run.

    Parameters
    ----------
    folder
        The node's folder of states.
    run
        The run.
    begin
        The node's state before its first round, one row for each name.
    lost_is_fine
        Whether to begin anew where the state that the server counts on is missing.
    method
        The method and its settings, which stay what they are while a run lasts.

    Raises
    ------
    Rejected
        If ``run`` is not a run's name.
    """

    def __init__(self, folder: Path, run: str, begin: Rows, lost_is_fine: bool = False, method: str = "") -> None:
        if not _RUN.fullmatch(run):
            raise Rejected(f"its run is {run!r}, which is not a run's name")
        self._folder, self._begin, self._lost_is_fine = folder / run, begin, lost_is_fine
        self._method = hashlib.blake2b(method.encode(), digest_size=16).hexdigest() if method else ""
        self._committed = self._folder / f"committed{_ENDING}"

    def settle(self, counted: str, keep: Collection[str]) -> None:
        """Commit the pending state that counts, and delete the pending states that no longer can.

        ``counted`` is the token of the node's last reply that counts, empty if none does; ``keep`` are the tokens of
        pending states that are still needed. Where the state that counts is missing, the message is
        :class:`Rejected`, unless the node may begin anew.
        """
        if counted != self.token:
            pending = self._pending(counted) if counted else None
            if pending is not None and pending.exists():
                os.replace(pending, self._committed)
                sync(self._folder)
            elif not self._lost_is_fine:
                raise Rejected(
                    f"the server counts on the node's state {counted or 'of the beginning'!r}, but the node has "
                    f"{self.token or 'none'!r}: put the node's state folder back, or set lost_state: begin-anew"
                )
            else:
                self._write(self._committed, counted, self._begin)
        for path in self._all():
            if path.name.removesuffix(_ENDING) not in keep:
                path.unlink()

    @property
    def token(self) -> str:
        """The token of the committed state, empty before the first."""
        return self._read(self._committed, [])[0] if self._committed.exists() else ""

    def rows(self, base: str = "") -> Rows:
        """Give the pending state with the token ``base``, or by default the committed one: one row for each name."""
        if base:
            if not self._pending(base).exists():
                raise Rejected(f"the node has no pending state {base!r}")
            return self._read(self._pending(base))[1]
        if self._committed.exists():
            return self._read(self._committed)[1]
        return {name: value.clone() for name, value in self._begin.items()}

    def put(self, token: str, rows: Rows) -> None:
        """Write the state after a reply as pending, under the reply's token."""
        self._write(self._pending(token), token, rows)

    def pending(self) -> list[str]:
        """List the tokens of pending states, in alphabetical order."""
        return sorted(path.name.removesuffix(_ENDING) for path in self._all())

    def _pending(self, token: str) -> Path:
        if not _TOKEN.fullmatch(token):
            raise Rejected(f"{token!r} is not a token")
        return self._folder / "pending" / f"{token}{_ENDING}"

    def _all(self) -> list[Path]:
        folder = self._folder / "pending"
        return [path for path in folder.iterdir() if path.name.endswith(_ENDING)] if folder.is_dir() else []

    def _write(self, path: Path, token: str, rows: Rows) -> None:
        notes = {**{name: str(value) for name, value in stamp(_FORMAT).items()}, "token": token, "method": self._method}
        save_sealed(path, rows, {**notes, "order": json.dumps(list(rows))})

    def _read(self, path: Path, names: Collection[str] | None = None) -> tuple[str, Rows]:
        """Read a state's token and its rows, or those of these names."""
        try:
            check_seal(path)
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                token, order, found = metadata["token"], json.loads(metadata["order"]), metadata.get("format")
                record = {**metadata, "format": int(found) if found else None}
                check_format(f"the node's state {path}", record, _FORMAT, CheckpointError)
                if self._method and metadata.get("method", "") not in ("", self._method):
                    raise Rejected("its method or settings are not those that the run began with")
                # Cloned out of the file's mapping, whose alignment is not that of memory that PyTorch allocates.
                wanted = order if names is None else names
                return token, {name: file.get_tensor(name).clone() for name in wanted}
        except (SafetensorError, RunFolderError, KeyError, ValueError) as error:
            raise CheckpointError(f"the node's state {path} is damaged ({error}): put back a copy") from error


def save_sealed(path: Path, tensors: Rows, notes: dict[str, str]) -> None:
    """Write a file of tensors, with notes and its own checksum, whole or not at all."""
    with replacing(path) as draft:
        # Block by block: safetensors itself holds all of them once more on the way.
        entries = {name: TensorToWrite.of(value) for name, value in tensors.items()}
        write(draft, entries, {**notes, "checksum": BLANK})
        seal(draft)


def tidy(folder: Path) -> None:
    """Remove what writers that were killed left in a node's folder."""
    parts = [
        folder,
        folder / "state",
        *folder.glob("state/*"),
        *folder.glob("state/*/pending"),
        *folder.glob("models/*"),
    ]
    remove_drafts(*parts)
