"""How single samples were answered after the last round: what paired tests and pictures of calibration are made of.

A file for test samples and one for validation samples. A row for each model, client and sample, in the order of the
client's share, which is the same for every method that met the same clients. ``answer`` is the probability of the class
that was predicted, with a minus sign if that was wrong; NaN if the model gave none. Four bytes a sample and model.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from coterie.errors import RunFolderError
from coterie.runs.storage.atomic_files import replace_all, replacing
from coterie.runs.storage.seals import BLANK, check_seal, seal

ANSWERS = {"test": "answers.parquet", "validation": "validation_answers.parquet"}
"""The files that say how each sample of a split was answered after the last round."""

Answers = dict[str, tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]]
"""For each model the client and the answer of every sample."""


def write_answers(path: Path, round_number: int, found: Mapping[str, Answers]) -> None:
    """Write the answers to the samples of some splits."""
    replace_all(path, [(ANSWERS[split], partial(_draft, round_number, answers)) for split, answers in found.items()])


def _draft(round_number: int, found: Answers, draft: Path) -> None:
    clients, answers = zip(*found.values(), strict=True)
    sizes = [len(each) for each in answers]
    which = pa.array(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes))
    columns = {
        "round": pa.array(np.full(sum(sizes), round_number, dtype=np.int32)),
        "model": pa.DictionaryArray.from_arrays(which, pa.array(list(found), pa.string())).dictionary_decode(),
        "client": pa.array(np.concatenate(clients)),
        "answer": pa.array(np.concatenate(answers)),
    }
    # Answers hardly repeat: a dictionary of them would make the file half as large again, and take longer.
    repeated = [name for name in columns if name != "answer"]
    table = pa.table(columns).replace_schema_metadata({"checksum": BLANK})
    pq.write_table(table, draft, compression="zstd", use_dictionary=repeated)
    seal(draft)


def keep_answers(path: Path, round_number: int) -> None:
    """Keep the answers of a round that was the last one, in a folder of its own, before the run goes on."""
    for name in ANSWERS.values():
        if (path / name).exists():
            (path / _of_round(round_number)).mkdir(parents=True, exist_ok=True)
            with replacing(path / _of_round(round_number) / name) as draft:
                shutil.copyfile(path / name, draft)


def read_answers(path: Path, split: str = "test", round_number: int | None = None) -> pd.DataFrame | None:
    """Read a run's answers to the samples of a split after a round, by default the last; ``None`` if there are none.

    A damaged file is a ``RunFolderError``.
    """
    file = path / ANSWERS[split]
    if round_number is not None and (path / _of_round(round_number) / ANSWERS[split]).exists():
        file = path / _of_round(round_number) / ANSWERS[split]
    if not file.exists():
        return None
    found = _read(file)
    return found if round_number is None or (found["round"] == round_number).all() else None


def _of_round(round_number: int) -> str:
    return f"ends/{round_number:08d}"


def _read(file: Path) -> pd.DataFrame:
    check_seal(file)
    try:
        with file.open("rb") as opened:  # a path with ``=`` in it would be taken for columns of the table
            return pd.read_parquet(opened)
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{file} is damaged ({error}): it must be a table that this run wrote") from error
