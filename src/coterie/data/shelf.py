"""Data sets that were loaded before."""

from __future__ import annotations

from pathlib import Path

from coterie.data.dataset import Dataset
from coterie.data.registry import is_drawn, load


class DatasetShelf:
    """Keeps the data sets that it has loaded, so that runs of a study that use the same one read it once."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, Path | None, int | None], Dataset] = {}

    def load(self, name: str, *, data_dir: Path | None = None, seed: int = 0) -> Dataset:
        """Load a data set, or give the one that was loaded before; see :func:`coterie.data.load`.

        Parameters
        ----------
        name
            ``name`` or ``name:key=value,key=value``.
        data_dir
            The data folder.
        seed
            For data sets that are drawn; others are the same for all seeds.

        Returns
        -------
        Dataset
            The samples.
        """
        key = name, data_dir, seed if is_drawn(name) else None
        if key not in self._kept:
            self._kept[key] = load(name, data_dir=data_dir, seed=seed)
        return self._kept[key]
