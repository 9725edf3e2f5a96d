"""From a configuration to everything that is computed with: samples, clients, model, engine, simulation, scorer."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms import registry
from coterie.compute.engine import Engine
from coterie.compute.samples import Split
from coterie.compute.single_values import refuse_single_values
from coterie.config import ExperimentConfig
from coterie.data.mapped import let_go
from coterie.models.problem import Problem
from coterie.rows.distributed import number_of
from coterie.rows.placement import scratch_folder
from coterie.runs.model_builder import batch_size, make_engine, make_module
from coterie.runs.population import Population, Roles, make_population, roles
from coterie.simulation import attacks, privacy
from coterie.simulation.accuracy_matrix import AccuracyMatrixScorer
from coterie.simulation.exchange import alteration
from coterie.simulation.processes import ONE_PROCESS, OneProcess
from coterie.simulation.scoring import Scorer
from coterie.simulation.simulation import Simulation

__all__ = ["Assembly", "Population", "Roles", "assemble", "make_engine", "make_population", "roles"]


_OF_ONE_RUN = frozenset(
    (
        *(
            "algorithm",
            "algorithm_sha256",
            "settings",
            "rounds",
            "participation",
            "local",
            "adapt_rounds",
            "eval_every",
        ),
        *("eval_train", "matrix", "matrix_every", "s_acc", "checkpoint_every", "keep", "scratch", "threads"),
    )
)
"""Fields of a configuration that decide nothing of the samples, the model and the engine, but for what a method is."""


@dataclass(frozen=True)
class Assembly:
    """Everything that an experiment computes with.

    Parameters
    ----------
    population
        The samples, who holds them, and who does what.
    simulation
        The method with its clients and their engine.
    scorer
        Evaluates the simulation.
    matrix_scorer
        Measures its accuracy matrix, if that was asked for.
    fingerprint
        Digests of what the configuration names but does not hold: the samples, the partition, the initial model.
    trainers
        The clients that train, on the device.
    """

    population: Population
    simulation: Simulation
    scorer: Scorer
    matrix_scorer: AccuracyMatrixScorer | None
    fingerprint: dict[str, str]
    trainers: Tensor

    @property
    def engine(self) -> Engine:
        """What computes."""
        return self.simulation.engine


def assemble(
    config: ExperimentConfig,
    data_dir: Path | None = None,
    choices: Mapping[str, Any] | None = None,
    run: Path | None = None,
    processes: OneProcess = ONE_PROCESS,
    population: Population | None = None,
) -> Assembly:
    """Load the data, deal it out, build the model and put everything together, before the first round.

    ``choices`` are what an earlier part of the same run chose. Rows that are kept on disk lie near ``run``, the run's
    folder, which need not be there yet. A ``population`` that is given takes the place of the data.
    """
    choices = choices or {}
    device = processes.together(lambda: processes.device(config.device, config.torch_device))
    algorithm = registry.make(config.algorithm, config.settings)
    # Whoever comes second finds what the first has downloaded.
    once, world = processes.once, _world(config, data_dir)
    chosen = tuple(str(choices.get(name)) for name in ("kernel", "convolution", "chunk"))
    make = partial(once, ("population", world), partial(make_population, config, data_dir, processes.load))
    fetched = population or processes.together(lambda: make() if processes.leads else None)
    population = processes.together(lambda: fetched or make())
    scratch = scratch_folder(config.scratch, run)
    if config.keep_samples == "disk":
        population = once(("samples on disk", world), partial(population.on_disk, scratch))
    build = partial(make_engine, config, population, device, choices, processes.hold, scratch, once)
    engine = processes.together(lambda: once(("engine", world, chosen), build))

    def fresh(client: int) -> Tensor:
        module = make_module(config, population.dataset, f"model of client {client}")
        return Problem.of(module, population.dataset.task, dtype=engine.samples.dtype, device=device).start

    dataset, shares = population.dataset, population.shares
    parts = (shares.train, shares.validation, shares.test)
    problem = engine.problem
    fingerprint = {
        # Runs with different seeds may have the same data set, which the population that is kept holds.
        "data": once(("data", id(dataset.x), id(dataset.y)), lambda: _digest(dataset.x, dataset.y)),
        "partition": once(("partition", world), lambda: _digest(*(part.flat for part in parts))),
        "model": once(("model", world), lambda: _digest(*_model(problem), text=str(problem.module))),
    }
    for what, digest in fingerprint.items():
        processes.agree(f"the {what} is not the same on all ranks of the sharded run", [number_of(digest)])
    processes.align(engine)
    engine = processes.share(engine)
    # Runs that have the same have one tensor of them, which is held with the population.
    trainers = once(("trainers", id(population), device), lambda: population.roles.trainers.to(device))
    attackers = population.roles.attackers.to(device)
    simulation = Simulation(
        algorithm,
        engine,
        fresh=fresh,
        members=trainers,
        # With another number of processes, what had room for the rows of one may have none.
        keep=choices.get("keep", config.keep) if choices.get("ranks", 1) == processes.count else config.keep,
        scratch=scratch,
        processes=processes,
        protection=_protection(config, population),
        local=config.local_patterns,
        alter=None if config.attack is None else alteration(attacks.parse(config.attack), attackers, config.seed),
    )
    processes.together(lambda: refuse_single_values(engine, simulation.tasks.values()))
    splits: tuple[Split, ...] = ("train", "validation", "test") if config.eval_train else ("validation", "test")
    scorer = Scorer(simulation, trainers, population.roles.newcomers.to(device), splits, config.adapt_rounds)
    honest = torch.tensor(population.roles.honest, device=device)
    matrix_scorer = AccuracyMatrixScorer(simulation, trainers, honest) if config.matrix else None
    return Assembly(population, simulation, scorer, matrix_scorer, fingerprint, trainers)


def _world(config: ExperimentConfig, data_dir: Path | None) -> Hashable:
    """Give what decides the samples, who holds them and the model: equal runs have the same of all."""
    values = [(name, str(getattr(config, name))) for name in ExperimentConfig.model_fields if name not in _OF_ONE_RUN]
    federates = registry.get(config.algorithm).federates
    return (*values, data_dir, federates, batch_size(config))


def _protection(config: ExperimentConfig, population: Population) -> privacy.Protection | None:
    if config.privacy is None:
        return None
    made = privacy.Protection(privacy.parse(config.privacy), config.seed, config.clients)
    made.replies[population.roles.trainers] += population.told
    return made


def _model(problem: Problem) -> tuple[Tensor, ...]:
    rows = (problem.start, problem.running) if problem.statistics.size else (problem.start,)
    return (*rows, *(value for value in problem.module.parameters() if not value.requires_grad))


def _digest(*tensors: Tensor, text: str = "") -> str:
    found = hashlib.blake2b(text.encode(), digest_size=16)
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        for piece in tensor.detach().split(4096) if tensor.dim() else [tensor.detach()]:
            found.update(piece.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            let_go(tensor)
    return found.hexdigest()
