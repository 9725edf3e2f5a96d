"""The user's own code in a run's folder, ``code/``, from which the run goes on wherever it lies."""

from __future__ import annotations

import hashlib
from pathlib import Path

from coterie.errors import RunFolderError
from coterie.runs.storage.atomic_files import write_bytes
from coterie.runs.storage.run_files import read_about
from coterie.user_code import MANIFEST, Copies

CODE = "code"


def checksum_of(copies: Copies) -> str | None:
    """Give the SHA-256 of the manifest of some copies, ``None`` if there is nothing to copy."""
    return hashlib.sha256(copies.manifest().encode()).hexdigest() if copies.files else None


def write_code(folder: Path, copies: Copies) -> None:
    """Write copies into a folder, which is made if there are any."""
    for each in copies.files:
        write_bytes(folder / each.file, each.text)
    if copies.files:
        write_bytes(folder / MANIFEST, copies.manifest().encode())


def read_code(path: Path) -> Copies:
    """Read the copies in a run's folder; those that are not what the run began with are a ``RunFolderError``."""
    wanted = read_about(path).get("code")
    if wanted is None:
        return Copies({}, [])
    file = path / CODE / MANIFEST
    if file.exists() and hashlib.sha256(file.read_bytes()).hexdigest() != wanted:
        raise RunFolderError(
            f"{file} is not what the run began with (its checksum differs): put the old file back, or begin a new run"
        )
    return Copies.read(path / CODE)
