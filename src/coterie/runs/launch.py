"""The experiment: cohort → round → evaluation of all clients → record → checkpoint, and how it goes on after a stop."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from coterie.config import ExperimentConfig
from coterie.errors import ConfigError, RunFolderError
from coterie.rows.distributed import Ranks, launched
from coterie.runs.builder import Assembly, assemble
from coterie.runs.experiment import Experiment, Watcher, draw_cohort, enough_memory, threads
from coterie.runs.own_code import own_code, stored_config
from coterie.runs.sharded import ShardedExperiment
from coterie.runs.storage import RunFolder, SilentFolder, read_config
from coterie.simulation.sharded import ShardedSimulation

__all__ = ["Experiment", "ShardedExperiment", "Watcher", "begin", "draw_cohort", "ranks_for", "resume", "threads"]


def ranks_for(engine: str) -> Ranks:
    """Meet the ranks with which a run is computed.

    Parameters
    ----------
    engine
        The run's engine.

    Returns
    -------
    Ranks
        This one alone, unless the run is sharded.

    Raises
    ------
    ConfigError
        If there are several processes, and the engine computes in one.
    """
    if engine == "sharded":
        return Ranks.join()
    if launched() > 1:
        raise ConfigError(
            f"engine is {engine!r}, but torchrun started {launched()} processes: use --engine sharded, or start one "
            "process without torchrun"
        )
    return Ranks()


def begin(config: ExperimentConfig, path: Path, data_dir: Path | None = None, ranks: Ranks | None = None) -> Experiment:
    """Begin a new run; what cannot work is refused before its folder is made.

    Parameters
    ----------
    config
        The configuration.
    path
        Its folder, which must not exist or be empty; one that holds a run is refused with a ``RunFolderError``.
    data_dir
        Where data sets lie.
    ranks
        The ranks that compute it; by default as :func:`ranks_for` finds them.

    Returns
    -------
    Experiment
        The experiment, before its first round.
    """
    ranks = ranks or ranks_for(config.engine)
    ranks.together(lambda: _refuse_taken(path) if ranks.leads else None)
    device = config.torch_device if ranks.count == 1 else lambda: _common_device(config, ranks)
    config = config.model_copy(update={"device": str(ranks.told(device))})
    with enough_memory(), threads(config.threads), contextlib.ExitStack() as on_failure:
        parts = assemble(config, data_dir, None, path, ranks)
        plain = config.plain()
        folder = ranks.together(
            lambda: RunFolder.create(path, plain, own_code(config)) if ranks.leads else SilentFolder(path, plain)
        )
        on_failure.callback(folder.close)
        ranks.together(lambda: _write_beginning(folder, parts, _choices(config, parts, ranks, data_dir)))
        experiment = _experiment(config, folder, parts)
        on_failure.pop_all()
    return experiment


def _refuse_taken(path: Path) -> None:
    if (path / "config.yaml").exists():  # before the data are loaded; the folder itself looks again, and more closely
        raise RunFolderError(f"{path} holds a run already: choose another --out, or `coterie resume {path}`")


def _common_device(config: ExperimentConfig, ranks: Ranks) -> str:
    if ":" in config.device:
        raise ConfigError(f"device is {config.device!r}, but each of {ranks.count} ranks needs one: use --device cuda")
    return config.torch_device().type


def _experiment(config: ExperimentConfig, folder: RunFolder, parts: Assembly) -> Experiment:
    sharded = isinstance(parts.simulation, ShardedSimulation)
    return ShardedExperiment(config, folder, parts) if sharded else Experiment(config, folder, parts)


def _write_beginning(folder: RunFolder, parts: Assembly, choices: dict[str, Any]) -> None:
    folder.write_shares(parts.population.holdings())
    folder.write_choices(choices)


def _choices(config: ExperimentConfig, parts: Assembly, ranks: Ranks, data_dir: Path | None) -> dict[str, Any]:
    chosen = parts.engine.choices | {"keep": parts.simulation.placement.keep}
    if config.engine == "sharded":
        chosen |= {"engine": "sharded", "ranks": ranks.count}
    return chosen | ({} if data_dir is None else {"data_dir": str(data_dir.expanduser().absolute())})


def resume(path: Path, data_dir: Path | None = None) -> Experiment:
    """Open a run that was begun, at its newest checkpoint.

    Parameters
    ----------
    path
        The run's folder, which all ranks of a sharded run must see.
    data_dir
        Where data sets lie; by default where they lay.

    Returns
    -------
    Experiment
        The experiment.
    """
    plain = read_config(path)
    ranks = ranks_for(str(plain.get("engine")))
    with contextlib.ExitStack() as on_failure:
        folder = ranks.together(lambda: RunFolder.open(path) if ranks.leads else SilentFolder(path, plain))
        on_failure.callback(folder.close)
        ranks.together(lambda: _refuse_finished(folder))
        config, choices = stored_config(path), ranks.told(lambda: folder.choices)
        if data_dir is None and "data_dir" in choices:
            data_dir = Path(choices["data_dir"])
        with enough_memory(), threads(config.threads or choices.get("threads")):
            parts = assemble(config, data_dir, choices, path, ranks)
            if not choices or choices.get("ranks", ranks.count) != ranks.count:
                ranks.together(lambda: _write_beginning(folder, parts, _choices(config, parts, ranks, data_dir)))
            experiment = _experiment(config, folder, parts)
        experiment.restore()
        on_failure.pop_all()
    return experiment


def _refuse_finished(folder: RunFolder) -> None:
    if folder.summary() is not None:
        raise RunFolderError(f"{folder.path} is finished: there is nothing to resume")
