"""A run's folder that another process writes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from coterie.runs.storage.run_folder import RunFolder


class _Nothing:
    """Takes whatever it is given, and keeps nothing."""

    def append(self, *args: Any, **named: Any) -> None:
        """Do nothing."""

    append_bytes = flush = cut = append


class SilentFolder(RunFolder):
    """Stands in for a run's folder where another process writes it: what is recorded here is dropped.

    Its checkpoints can be read, and only the other process writes them.

    Parameters
    ----------
    path
        The folder, which need not be there.
    config
        The run's configuration.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self.path = path
        nothing: Any = _Nothing()
        self.metrics = self.timings = self.collaboration_weights = self.accuracy_matrices = nothing
        self._use(dict(config))

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Do nothing; see :meth:`RunFolder.write_config`."""

    def write_choices(self, choices: Mapping[str, Any]) -> None:
        """Do nothing; see :meth:`RunFolder.write_choices`."""

    def write_shares(self, shares: pd.DataFrame) -> None:
        """Do nothing; see :meth:`RunFolder.write_shares`."""

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Do nothing; see :meth:`RunFolder.write_summary`."""

    def flush(self) -> None:
        """Do nothing; see :meth:`RunFolder.flush`."""

    def checkpoint(
        self,
        round_number: int,
        server: Mapping[str, Tensor],
        clients: Mapping[str, Tensor],
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Do nothing; see :meth:`RunFolder.checkpoint`."""

    def rewind(self, round_number: int) -> None:
        """Do nothing; see :meth:`RunFolder.rewind`."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Do nothing; see :meth:`RunFolder.finish`."""

    def summary(self) -> dict[str, Any] | None:
        """Know of none; see :meth:`RunFolder.summary`."""
        return None

    def close(self) -> None:
        """Do nothing; see :meth:`RunFolder.close`."""
