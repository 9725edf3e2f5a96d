"""Models of the last round that training made for the evaluation alone, so that no checkpoint has them.

Fine-tuning, an inner step and newcomers that join for a few rounds make such models, from samples that need not be
there any more when somebody wants to take a model home. All other models are made again from a checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from coterie.errors import RunFolderError
from coterie.rows import Rows
from coterie.runs.storage.atomic_files import replacing

KEPT_MODELS = "models.safetensors"
LARGEST = 2**30
"""Bytes of models that are kept at most; larger ones have to be made again from the samples."""
_CLIENTS = "(clients)"


class KeptModels:
    """Collects the rows of some kinds of models, block of clients after block.

    Parameters
    ----------
    wanted
        Says whether a kind is collected, by the name under which it is measured.
    largest
        Bytes at most; if there are more, none are kept.
    """

    def __init__(self, wanted: Callable[[str], bool], largest: int = LARGEST) -> None:
        self._wanted, self._room = wanted, largest
        self._parts: dict[str, list[Tensor]] = {}

    def add(self, kind: str, clients: Tensor, rows: Rows) -> None:
        """Copy the models of some clients, unless they are of another kind or there are too many."""
        if self._room < 0 or not self._wanted(kind):
            return
        self._room -= sum(value.nbytes for value in rows.values())
        if self._room < 0:
            self._parts.clear()
            return
        for name, value in {**rows, _CLIENTS: clients}.items():
            self._parts.setdefault(f"{kind}/{name}", []).append(value.detach().cpu().clone())

    def write(self, path: Path) -> None:
        """Write them to a run's folder, if there are any."""
        if self._parts:
            with replacing(path / KEPT_MODELS) as draft:
                save_file({name: torch.cat(parts).contiguous() for name, parts in self._parts.items()}, draft)


def read_kept_models(path: Path, kind: str) -> tuple[Tensor, Rows] | None:
    """Read the clients and the models of a kind; ``None`` where none were kept."""
    file = path / KEPT_MODELS
    if not file.exists():
        return None
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise RunFolderError(f"{file} is damaged ({error}): it must be the models that this run wrote") from error
    rows = {name.removeprefix(f"{kind}/"): value for name, value in found.items() if name.startswith(f"{kind}/")}
    return (rows.pop(_CLIENTS), rows) if rows else None
