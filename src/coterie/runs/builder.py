"""From a configuration to everything that is computed with: samples, clients, model, engine, simulation, scorer."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms import registry
from coterie.compute.batched import BatchedEngine
from coterie.compute.engine import Call, Engine
from coterie.compute.samples import Split
from coterie.config import ExperimentConfig
from coterie.errors import ConfigError
from coterie.models.problem import Problem
from coterie.rows import Rows
from coterie.rows.distributed import Ranks, number_of
from coterie.rows.placement import nearest_folder
from coterie.runs.model_builder import make_engine, make_module
from coterie.runs.population import Population, Roles, make_population, roles
from coterie.simulation import attacks, privacy
from coterie.simulation.accuracy_matrix import AccuracyMatrixScorer
from coterie.simulation.scoring import Scorer
from coterie.simulation.sharded import ShardedSimulation
from coterie.simulation.simulation import Simulation, Transform

__all__ = ["Assembly", "Population", "Roles", "assemble", "device_of", "make_engine", "make_population", "roles"]

_PURPOSES = ("round", "personalise", "adapt", "adapt personalise")


@dataclass(frozen=True)
class Assembly:
    """Everything that an experiment computes with.

    Parameters
    ----------
    population
        The samples and who holds them.
    simulation
        The method with its clients and their engine.
    scorer
        Evaluates the simulation.
    crossing
        Measures its accuracy matrix, if that was asked for.
    fingerprint
        Digests of what the configuration names but does not hold: the samples, the partition, the initial model.
    """

    population: Population
    simulation: Simulation
    scorer: Scorer
    crossing: AccuracyMatrixScorer | None
    fingerprint: dict[str, str]

    @property
    def engine(self) -> Engine:
        """What computes."""
        return self.simulation.engine


def assemble(
    config: ExperimentConfig,
    data_dir: Path | None = None,
    choices: Mapping[str, Any] | None = None,
    run: Path | None = None,
    ranks: Ranks | None = None,
) -> Assembly:
    """Load the data, deal it out, build the model and put everything together.

    Parameters
    ----------
    config
        The configuration.
    data_dir
        Where data sets lie.
    choices
        What an earlier part of the same run chose, to be used again.
    run
        The run's folder, made or not, near which rows are kept on disk.
    ranks
        The ranks of a sharded run; by default this process is alone.

    Returns
    -------
    Assembly
        All of it, before the first round.
    """
    ranks, choices = ranks or Ranks(), choices or {}
    device = ranks.together(lambda: device_of(config, ranks))
    algorithm = registry.make(config.algorithm, config.settings)
    # Whoever comes second finds what the first has fetched.
    fetched = ranks.together(lambda: make_population(config, data_dir) if ranks.leads else None)
    population = ranks.together(lambda: fetched or make_population(config, data_dir))
    engine = ranks.together(lambda: make_engine(config, population, device, choices))

    def fresh(client: int) -> Tensor:
        module = make_module(config, population.dataset, f"model of client {client}")
        return Problem.of(module, population.dataset.task, dtype=engine.samples.dtype, device=device).start

    fingerprint = {
        "data": _digest(population.dataset.x, population.dataset.y),
        "partition": _digest(*(getattr(population.shares, part).flat for part in ("train", "validation", "test"))),
        "model": _digest(engine.problem.start, text=str(engine.problem.module)),
    }
    for what, digest in fingerprint.items():
        ranks.agree(f"the {what} is not the same on all ranks of the sharded run", [number_of(digest)])
    trainers = population.roles.trainers.to(device)
    options: dict[str, Any] = {"fresh": fresh, "transform": _wire(config, population, device), "members": trainers}
    # With another number of ranks, what had room for the rows of one may have none.
    options["keep"] = choices.get("keep", config.keep) if choices.get("ranks", 1) == ranks.count else config.keep
    options["scratch"] = config.scratch or nearest_folder(run)
    if config.privacy is not None:
        options["protection"] = privacy.Protection(privacy.parse(config.privacy), config.seed, config.clients)
    if ranks.count == 1:
        simulation = Simulation(algorithm, engine, **options)
    else:
        _compute_alike(engine, ranks)
        simulation = ShardedSimulation(algorithm, engine, ranks, **options)
    splits: tuple[Split, ...] = ("train", "validation", "test") if config.eval_train else ("validation", "test")
    scorer = Scorer(simulation, trainers, population.roles.newcomers.to(device), splits, config.adapt_rounds)
    honest = torch.tensor(population.roles.honest, device=device)
    crossing = AccuracyMatrixScorer(simulation, trainers, honest) if config.matrix else None
    return Assembly(population, simulation, scorer, crossing, fingerprint)


def device_of(config: ExperimentConfig, ranks: Ranks) -> torch.device:
    """Give the device that a rank computes on.

    Parameters
    ----------
    config
        The configuration.
    ranks
        The ranks.

    Returns
    -------
    torch.device
        The device; on a machine with several GPUs another one for each rank.

    Raises
    ------
    ConfigError
        If it is not there.
    """
    device = config.torch_device()
    if ranks.count == 1 or device.type == "cpu":
        return device
    if ":" in config.device:
        raise ConfigError(f"device is {config.device!r}, but each of {ranks.count} ranks needs one: use --device cuda")
    there = torch.cuda.device_count()
    if ranks.local_rank >= there:
        raise ConfigError(
            f"device is {config.device!r}, but this machine has {there} CUDA device(s) for {ranks.local_count} ranks: "
            "start as many as there are devices"
        )
    device = torch.device("cuda", ranks.local_rank)
    torch.cuda.set_device(device)  # what is sent between ranks goes through the current device
    return device


def _compute_alike(engine: Engine, ranks: Ranks) -> None:
    """Compute in the same way on all ranks: what is kept of an engine's choices is one rank's."""
    if isinstance(engine, BatchedEngine):
        chunk = ranks.least(engine.chunk or 0)
        engine.chunk = chunk or None
        convolution = ranks.told(lambda: engine.convolution)
        if convolution != engine.convolution:
            engine.convolve(convolution)


def _wire(config: ExperimentConfig, population: Population, device: torch.device) -> Transform | None:
    if config.attack is None or not len(population.roles.attackers):
        return None
    attack = attacks.parse(config.attack)
    if not isinstance(attack, attacks.MessageAttack):
        return None
    attackers = population.roles.attackers.to(device)

    def transform(rows: Rows, clients: Tensor, call: Call) -> Rows:
        # An attacker draws anew for every exchange, those of an evaluation included.
        exchange = len(_PURPOSES) * call.exchange + _PURPOSES.index(call.purpose)
        hostile = torch.isin(clients, attackers)
        return attack.apply(rows, clients, hostile, seed=config.seed, round_number=call.round, exchange=exchange)

    return transform


def _digest(*tensors: Tensor, text: str = "") -> str:
    found = hashlib.blake2b(text.encode(), digest_size=16)
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
