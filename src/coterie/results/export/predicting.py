"""Predictions of an exported folder, by its own ``predict.py``."""

from __future__ import annotations

import importlib.util
import io
import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pandas as pd

from coterie.errors import DataError, RunFolderError


def predict(
    model: str | os.PathLike[str], rows: str | os.PathLike[str] | pd.DataFrame, client: int | str | None = None
) -> pd.DataFrame:
    """Predict for raw rows with a model of an exported folder.

    Columns that the model does not use are ignored, a category that it does not know counts as none of those it knows,
    and gaps are filled as in training. What does not fit, all of it, is told in one ``DataError``. The folder's own
    ``predict.py`` is run, so use folders that you trust.

    Parameters
    ----------
    model
        The folder that :func:`export` wrote.
    rows
        A table: a data frame, or a CSV or Parquet file with a header. For models of other data, a NumPy file with
        samples (``.npy``, or ``x`` in ``.npz``).
    client
        Whose model, by name or number; may be left out where there is only one.

    Returns
    -------
    pandas.DataFrame
        For each row, in order, ``predicted`` and, of classes, ``probability CLASS``.

    Raises
    ------
    DataError
        If the rows cannot be read, or do not fit.
    """
    folder = Path(model)
    code = _code_of(folder)
    try:
        scores: dict[str, list[Any]] = code.load(client, folder).scores(_read(code, rows))
    except code.UnfitInput as unfit:
        what = "the rows" if isinstance(rows, pd.DataFrame) else str(rows)
        count = f"{len(unfit.problems)} problems: " if len(unfit.problems) > 1 else ""
        raise DataError(f"{what} cannot be predicted from: {count}{'; '.join(unfit.problems)}") from None
    return pd.DataFrame(scores)


def _code_of(folder: Path) -> ModuleType:
    file = folder / "predict.py"
    if not file.is_file() or not (folder / "model.json").is_file():
        raise RunFolderError(f"there is no exported model in {folder}: it must be a folder that `coterie export` wrote")
    spec = importlib.util.spec_from_file_location("coterie_exported_model", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _read(code: ModuleType, rows: str | os.PathLike[str] | pd.DataFrame) -> Any:
    if isinstance(rows, pd.DataFrame):
        return code.table_of(io.StringIO(rows.to_csv(index=False)))
    path = Path(rows)
    try:
        if path.suffix.lower() in (".npy", ".npz"):
            return code.read_samples(path)
        if path.suffix.lower() == ".parquet":
            return code.table_of(io.StringIO(pd.read_parquet(path).to_csv(index=False)))
        return code.read_table(path)
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, code.UnfitInput):
            raise
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"{path} cannot be read ({reason})") from None
