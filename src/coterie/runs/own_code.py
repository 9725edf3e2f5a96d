"""Settings of a run that name code of the user's own: what is copied of it, and how a run goes on with the copies."""

from __future__ import annotations

from pathlib import Path

from coterie import user_code
from coterie.algorithms import registry
from coterie.config import ExperimentConfig, from_mapping
from coterie.runs.storage import read_code, read_config
from coterie.runs.storage.code_folder import CODE


def own_code(config: ExperimentConfig) -> user_code.Copies:
    """Read the source of the method, model, loss and data loader that are the user's own."""
    specs = {"algorithm": config.algorithm} if registry.is_file(config.algorithm) else {}
    for field in ("model", "loss", "data"):
        spec = getattr(config, field)
        if spec is not None and spec.startswith(user_code.IMPORT):
            specs[field] = spec
    return user_code.collect(specs)


def stored_config(path: Path) -> ExperimentConfig:
    """Read the configuration of a run so that what is the user's own is loaded from the run's folder."""
    return from_mapping({**read_config(path), **read_code(path).use(path / CODE)})
