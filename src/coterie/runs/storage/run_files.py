"""The files of a run's folder that are read as a whole, of a run that is finished or not, without a lock."""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
import yaml

from coterie.errors import RunFolderError
from coterie.runs.storage.atomic_files import read_json, write_json
from coterie.runs.storage.format_versions import check_format, stamp
from coterie.runs.storage.matrix_log import MatrixLog
from coterie.runs.storage.seals import BLANK, check_seal, sealed
from coterie.yaml_file import read_plain_text

CONFIG = "config.yaml"
ABOUT = "run.json"
"""The file that says in which format the folder is, and what wrote it."""
BEGUN_WITH = "begun_with"
"""The entry there, of a run that was made longer, with how long it was to be when it began."""
SHARES = "shares.parquet"
"""The file that says who holds what."""
CLIENT_NAMES = "clients.json"
"""The file with the clients' names, of a run whose clients nobody sees into: that of a federation's server."""
SUMMARY = "summary.json"
FORMAT = 1
"""The format of the folder: which files there are and what is in them, checkpoints apart, which have their own."""


def write_about(path: Path, code: str | None) -> None:
    """Say what writes a run's folder; ``code`` is the checksum of the user's own code's manifest, if there is one."""
    versions = {"torch": torch.__version__, "python": platform.python_version()}
    created = datetime.now(UTC).isoformat(timespec="seconds")
    write_json(path / ABOUT, {**stamp(FORMAT), **versions, "created": created, "code": code})


def read_about(path: Path) -> dict[str, Any]:
    """Read what wrote a run's folder; a folder of another format is refused with a ``RunFolderError``."""
    about = read_json(path / ABOUT) if (path / ABOUT).exists() else {}
    check_format(f"the run in {path}", about, FORMAT, RunFolderError)
    return about


def read_beginning(path: Path) -> dict[str, Any]:
    """Read what a run that was made longer began with; nothing of any other."""
    about = read_json(path / ABOUT) if (path / ABOUT).exists() else {}
    return dict(about.get(BEGUN_WITH, {}))


def read_config(path: Path) -> dict[str, Any]:
    """Read a run's configuration; what is not a run's folder, or of another format, is a ``RunFolderError``."""
    try:
        there = path.is_dir() and next(path.iterdir(), path) is not None
    except OSError as error:
        raise RunFolderError(f"{path} cannot be read ({error.strerror or error})") from error
    if not there:
        raise RunFolderError(f"there is no run in {path}: it must be a folder that `coterie run` wrote")
    file = path / CONFIG
    told = (path / ABOUT).exists() and file.exists()
    if told:
        read_about(path)  # first: another format may have another configuration
    try:
        config = read_plain_text(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(f"{path} is not a run's folder: it holds no {CONFIG}") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise RunFolderError(f"{file} cannot be read ({reason})") from error
    if not isinstance(config, dict):
        raise RunFolderError(f"{file} holds a {type(config).__name__}: it must hold settings by name")
    if not told:
        read_about(path)
    return config


def read_summary(path: Path) -> dict[str, Any] | None:
    """Read a run's result in short; ``None`` if the run is not finished."""
    file = path / SUMMARY
    return read_json(file) if file.exists() else None


def shares_file(shares: pd.DataFrame) -> bytes:
    """Give the file that says what each client of a run holds."""
    table, content = pa.Table.from_pandas(shares, preserve_index=False), pa.BufferOutputStream()
    pq.write_table(table.replace_schema_metadata({**(table.schema.metadata or {}), "checksum": BLANK}), content)
    return sealed(content.getvalue().to_pybytes())


def read_shares(path: Path) -> pd.DataFrame:
    """Read what each client of a run holds; if that is not there, or damaged, it is a ``RunFolderError``."""
    with _read_from(path):
        check_seal(path / SHARES)
        # As a file object: a path with ``=`` in it would be taken for columns of the table.
        with (path / SHARES).open("rb") as file:
            return pd.read_parquet(file)


@contextlib.contextmanager
def _read_from(path: Path) -> Iterator[None]:
    """Turn what keeps the shares of a run from being read into the sentence that the user reads."""
    try:
        yield
    except FileNotFoundError:
        raise RunFolderError(f"{path} does not say what its clients hold: it has no {SHARES}") from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path / SHARES} is damaged ({error}): it must be a table that this run wrote") from error


def read_clients_by_role(path: Path, role: str) -> npt.NDArray[np.integer[Any]]:
    """Read which clients of a run have a role, and nothing else of what :func:`read_shares` reads."""
    with _read_from(path):
        check_seal(path / SHARES)
        with (path / SHARES).open("rb") as file:
            table = pq.ParquetFile(file).read(columns=["client", "role"])
        found: npt.NDArray[np.integer[Any]] = table["client"].to_numpy()[pc.equal(table["role"], role).to_numpy()]
        return found


def read_client_names(path: Path) -> dict[int, str]:
    """Read the clients' names by number; empty where they have none, or nobody has said what they hold."""
    if (path / CLIENT_NAMES).exists():
        return dict(enumerate(read_json(path / CLIENT_NAMES)["names"]))
    if not (path / SHARES).exists():
        return {}
    shares = read_shares(path)
    return dict(zip(shares["client"].tolist(), shares["name"].tolist(), strict=True)) if "name" in shares else {}


def collaboration_weights_log(path: Path) -> MatrixLog:
    """Give a run's collaboration weights: rows are clients that took, columns those from whom they took."""
    return MatrixLog(path / "weights", "collaboration weights", ("taker", "giver"))


def accuracy_matrix_log(path: Path) -> MatrixLog:
    """Give a run's accuracy matrices: rows are personal models, columns those on whose samples they were measured."""
    return MatrixLog(path / "matrix", "accuracy matrices", ("model", "samples"))
