"""Reading what lies in a run's folder, finished or not, without a lock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from coterie.errors import RunFolderError
from coterie.runs.storage.atomic import read_json
from coterie.runs.storage.matrix_log import MatrixLog

SHARES = "shares.parquet"
"""The file that says who holds what."""


def read_config(path: Path) -> dict[str, Any]:
    """Read a run's configuration.

    Parameters
    ----------
    path
        The run's folder.

    Returns
    -------
    dict
        The configuration.

    Raises
    ------
    RunFolderError
        If that is not a run's folder.
    """
    if not path.is_dir():
        raise RunFolderError(f"there is no run in {path}: it must be a folder that `coterie run` wrote")
    try:
        config = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RunFolderError(f"{path} is not a run's folder: it holds no config.yaml") from None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        reason = " ".join(str(error).split())
        raise RunFolderError(f"{path / 'config.yaml'} cannot be read ({reason})") from error
    if not isinstance(config, dict):
        raise RunFolderError(f"{path / 'config.yaml'} holds a {type(config).__name__}: it must hold settings by name")
    return config


def read_summary(path: Path) -> dict[str, Any] | None:
    """Read a run's summary.

    Parameters
    ----------
    path
        The run's folder.

    Returns
    -------
    dict or None
        The result in short, or ``None`` if the run is not finished.
    """
    file = path / "summary.json"
    return read_json(file) if file.exists() else None


def read_shares(path: Path) -> pd.DataFrame:
    """Read who holds what in a run.

    Parameters
    ----------
    path
        The run's folder.

    Returns
    -------
    pandas.DataFrame
        What :meth:`RunFolder.write_shares` was given.

    Raises
    ------
    RunFolderError
        If it is not there, or damaged.
    """
    try:
        # As a file object: a path with ``=`` in it would be taken for columns of the table.
        with (path / SHARES).open("rb") as file:
            return pd.read_parquet(file)
    except FileNotFoundError:
        raise RunFolderError(f"{path} does not say what its clients hold: it has no {SHARES}") from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path / SHARES} is damaged ({error}): it must be a table that this run wrote") from error


def accuracy_matrix_log(path: Path) -> MatrixLog:
    """Give the accuracy matrices of a run.

    Parameters
    ----------
    path
        The run's folder.

    Returns
    -------
    WeightsLog
        Rows are personal models, columns are the clients on whose samples they were measured.
    """
    return MatrixLog(path / "matrix", "accuracy matrices", ("model", "samples"))
