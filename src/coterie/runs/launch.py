"""Beginning a run, and going on with one: from a configuration or a folder to an experiment that is ready to play."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch

from coterie.config import ExperimentConfig
from coterie.errors import ConfigError, RunFolderError
from coterie.rows.distributed import Ranks, launched, started_together
from coterie.runs.builder import Assembly, assemble
from coterie.runs.experiment import Experiment, enough_memory, threads
from coterie.runs.model_inputs import INPUTS, describe_inputs
from coterie.runs.own_code import own_code, stored_config
from coterie.runs.rounds import SimulatedRounds
from coterie.runs.storage import RunFolder, read_config
from coterie.runs.storage.run_files import shares_file
from coterie.runs.storage.run_folder import CHOICES
from coterie.simulation.processes import ONE_PROCESS, OneProcess
from coterie.simulation.sharded import ShardedProcesses


def processes_for(engine: str) -> OneProcess:
    """Meet the processes with which a run is computed: this one alone, unless the run is sharded."""
    if engine == "sharded":
        ranks = Ranks.join()
        return ONE_PROCESS if ranks.count == 1 else ShardedProcesses(ranks)
    if launched() > 1:
        raise ConfigError(
            f"engine is {engine!r}, but torchrun started {launched()} processes: use --engine sharded, or start one "
            "process without torchrun"
        )
    return ONE_PROCESS


def refuse_shards_of_one(engine: str) -> None:
    """Refuse to begin a sharded run where nothing started processes to share it; one that exists may go on alone."""
    if engine == "sharded" and not started_together():
        raise ConfigError(
            "engine is 'sharded', but torchrun did not start this process, so there is nobody to share with: use "
            "`torchrun --nproc-per-node N -m coterie run ...`, or --engine batched"
        )


def begin(
    config: ExperimentConfig, path: Path, data_dir: Path | None = None, processes: OneProcess | None = None
) -> Experiment:
    """Begin a new run; what cannot work is refused before its folder is made.

    Parameters
    ----------
    config
        The configuration.
    path
        Its folder, which must not exist or be empty; one that holds a run is refused with a ``RunFolderError``.
    data_dir
        Where data sets lie.
    processes
        The processes that compute it; by default as :func:`processes_for` finds them.

    Returns
    -------
    Experiment
        The experiment, before its first round.

    Raises
    ------
    ConfigError
        If the device does not have what the configuration asks of it.
    """
    processes = processes or processes_for(config.engine)
    processes.together(lambda: _refuse_taken(path) if processes.leads else None)
    device = processes.told(lambda: processes.common_device(config.device, config.torch_device))
    config = config.model_copy(update={"device": device})
    if config.precision != "float32" and torch.device(device).type == "cpu":
        raise ConfigError(
            f"precision is {config.precision!r}, but the device is the CPU, which multiplies in {config.dtype}: use "
            "--device cuda, or --precision float32"
        )
    with enough_memory(), threads(config.threads), contextlib.ExitStack() as on_failure:
        parts = assemble(config, data_dir, None, path, processes)
        plain = config.plain()
        folder = processes.together(
            lambda: (
                RunFolder.create(path, plain, own_code(config))
                if processes.leads
                else RunFolder.written_elsewhere(path, plain)
            )
        )
        on_failure.callback(folder.close)
        processes.write(lambda: _write_beginning(folder, parts, _choices(config, parts, data_dir)))
        experiment = Experiment(config, folder, parts, SimulatedRounds(config, folder, parts))
        on_failure.pop_all()
    return experiment


def resume(path: Path, data_dir: Path | None = None, processes: OneProcess | None = None) -> Experiment:
    """Open a run that was begun, at its newest checkpoint.

    Parameters
    ----------
    path
        The run's folder, which all processes of a sharded run must see.
    data_dir
        Where data sets lie; by default where they lay.
    processes
        The processes that compute it; by default as :func:`processes_for` finds them.

    Returns
    -------
    Experiment
        The experiment.
    """
    plain = read_config(path)
    processes = processes or processes_for(str(plain.get("engine")))
    with contextlib.ExitStack() as on_failure:
        folder = processes.together(
            lambda: RunFolder.open(path) if processes.leads else RunFolder.written_elsewhere(path, plain)
        )
        on_failure.callback(folder.close)
        processes.together(lambda: _refuse_finished(folder))
        config, choices = stored_config(path), processes.told(lambda: folder.choices)
        if data_dir is None and "data_dir" in choices:
            data_dir = Path(choices["data_dir"])
        with enough_memory(), threads(config.threads or choices.get("threads")):
            parts = assemble(config, data_dir, choices, path, processes)
            if not choices or choices.get("ranks", processes.count) != processes.count:
                processes.write(lambda: _write_beginning(folder, parts, _choices(config, parts, data_dir)))
            experiment = Experiment(config, folder, parts, SimulatedRounds(config, folder, parts))
        experiment.restore()
        on_failure.pop_all()
    return experiment


def _refuse_taken(path: Path) -> None:
    try:
        taken = (path / "config.yaml").exists()  # before the data are loaded; the folder itself looks more closely
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written ({error.strerror or error})") from error
    if taken:
        raise RunFolderError(f"{path} holds a run already: choose another --out, or `coterie resume {path}`")


def _refuse_finished(folder: RunFolder) -> None:
    if folder.summary() is not None:
        raise RunFolderError(f"{folder.path} is finished: there is nothing to resume")


def _write_beginning(folder: RunFolder, parts: Assembly, choices: dict[str, Any]) -> None:
    # Runs that play together have one population, which is held as long as they play.
    population, once = parts.population, parts.simulation.processes.once
    shares = once(("shares", id(population)), lambda: shares_file(population.holdings()))
    inputs = once(("inputs", id(population)), lambda: describe_inputs(population))
    folder.write_beginning(shares, {INPUTS: inputs, CHOICES: choices})


def _choices(config: ExperimentConfig, parts: Assembly, data_dir: Path | None) -> dict[str, Any]:
    chosen = parts.engine.choices | {"keep": parts.simulation.placement.keep}
    if config.engine == "sharded":
        chosen |= {"engine": "sharded", "ranks": parts.simulation.processes.count}
    return chosen | ({} if data_dir is None else {"data_dir": str(data_dir.expanduser().absolute())})
