"""From a configuration to everything that is computed with: samples, clients, model, engine, simulation, scorer."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from coterie import attacks, data, models, privacy, randomness
from coterie.algorithms import registry
from coterie.config import IMPORT, ExperimentConfig
from coterie.data import Dataset
from coterie.engines.base import Call, Engine
from coterie.engines.batched import BatchedEngine
from coterie.engines.cross import CrossScorer
from coterie.engines.keeping import near
from coterie.engines.loop import LoopEngine
from coterie.engines.simulation import Simulation, Transform
from coterie.engines.store import Samples, Split
from coterie.errors import ConfigError, CoterieError, ModelError
from coterie.evaluation import metrics as metric_table
from coterie.partitions import Shares, share_out
from coterie.problems import LOSSES, PerSampleLoss, Problem
from coterie.rows import Rows
from coterie.scoring import Scorer

_LOSS_OF_TASK = {"multiclass": "cross_entropy", "binary": "binary", "regression": "squared_error"}
_PURPOSES = ("round", "personalise", "adapt", "adapt personalise")


@dataclass(frozen=True)
class Roles:
    """What each client does; all in increasing order.

    Parameters
    ----------
    trainers
        Clients that take part.
    newcomers
        Clients held out of training.
    attackers
        Clients, among those that take part, that attack.
    """

    trainers: Tensor
    newcomers: Tensor
    attackers: Tensor

    @property
    def honest(self) -> list[int]:
        """The clients that train and do not attack, in increasing order."""
        attackers = set(self.attackers.tolist())
        return [client for client in self.trainers.tolist() if client not in attackers]


@dataclass(frozen=True)
class World:
    """The samples of an experiment, who holds them, and what each client does.

    Parameters
    ----------
    dataset
        The samples.
    shares
        Who holds which.
    roles
        Who trains, is held out, attacks.
    """

    dataset: Dataset
    shares: Shares
    roles: Roles

    def holdings(self) -> pd.DataFrame:
        """Say what each client holds and does.

        Returns
        -------
        pandas.DataFrame
            A row for each client: ``client``, ``role`` (``"honest"``, ``"attacker"`` or ``"newcomer"``), the sizes
            ``train``, ``validation`` and ``test``, where they are known ``group`` and ``noise``, and for each class the
            training samples of it, in a column ``class NAME``.
        """
        shares, count = self.shares, len(self.shares)
        role = np.full(count, "honest", dtype=object)
        role[self.roles.newcomers.numpy()] = "newcomer"
        role[self.roles.attackers.numpy()] = "attacker"
        columns: dict[str, Any] = {"client": np.arange(count), "role": role}
        for name in ("train", "validation", "test"):
            columns[name] = getattr(shares, name).sizes.numpy()
        columns |= {} if shares.groups is None else {"group": shares.groups.numpy()}
        columns |= {} if shares.noise is None else {"noise": shares.noise.numpy()}
        if self.dataset.classes:
            counts = shares.counts(self.dataset.y, len(self.dataset.classes)).numpy()
            columns |= {f"class {name}": counts[:, label] for label, name in enumerate(self.dataset.classes)}
        return pd.DataFrame(columns)


@dataclass(frozen=True)
class Assembly:
    """Everything that an experiment computes with.

    Parameters
    ----------
    world
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

    world: World
    simulation: Simulation
    scorer: Scorer
    crossing: CrossScorer | None
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

    Returns
    -------
    Assembly
        All of it, before the first round.
    """
    device = config.torch_device()
    algorithm = registry.make(config.algorithm, config.settings)
    world = make_world(config, data_dir)
    engine = make_engine(config, world, device, choices or {})

    def fresh(client: int) -> Tensor:
        module = _make_module(config, world.dataset, f"model of client {client}")
        return Problem.of(module, world.dataset.task, dtype=engine.samples.dtype, device=device).start

    trainers = world.roles.trainers.to(device)
    wire = _wire(config, world, device)
    kept: dict[str, Any] = {"keep": (choices or {}).get("keep", config.keep), "scratch": config.scratch or near(run)}
    if config.privacy is not None:
        kept["protection"] = privacy.Protection(privacy.parse(config.privacy), config.seed, config.clients)
    simulation = Simulation(algorithm, engine, fresh=fresh, transform=wire, members=trainers, **kept)
    splits: tuple[Split, ...] = ("train", "validation", "test") if config.eval_train else ("validation", "test")
    scorer = Scorer(simulation, trainers, world.roles.newcomers.to(device), splits, config.adapt_rounds)
    honest = torch.tensor(world.roles.honest, device=device)
    crossing = CrossScorer(simulation, trainers, honest) if config.matrix else None
    fingerprint = {
        "data": _digest(world.dataset.x, world.dataset.y),
        "partition": _digest(*(getattr(world.shares, part).flat for part in ("train", "validation", "test"))),
        "model": _digest(engine.problem.start, text=str(engine.problem.module)),
    }
    return Assembly(world, simulation, scorer, crossing, fingerprint)


def roles(config: ExperimentConfig) -> Roles:
    """Draw who trains, who is held out and who attacks.

    Parameters
    ----------
    config
        The configuration.

    Returns
    -------
    Roles
        A function of the configuration alone.

    Raises
    ------
    ConfigError
        If as many clients cannot be held out.
    """
    count = config.clients
    away = round(config.hold_out * count)
    if config.hold_out > 0 and not 0 < away < count:
        raise ConfigError(
            f"hold_out is {config.hold_out}, which is {away} of {count} clients: there must be a client that is held "
            "out and one that trains"
        )
    held = set(randomness.stream(config.seed, "hold out").permutation(count)[:away].tolist())
    newcomers = torch.tensor(sorted(held), dtype=torch.int64)
    trainers = torch.tensor(sorted(set(range(count)) - held), dtype=torch.int64)
    attackers = torch.zeros(0, dtype=torch.int64)
    if config.attack is not None:
        chosen = attacks.choose_attackers(len(trainers), attacks.parse(config.attack).fraction, config.seed)
        attackers = trainers[torch.tensor(chosen, dtype=torch.int64)]
    return Roles(trainers, newcomers, attackers)


def make_world(config: ExperimentConfig, data_dir: Path | None = None) -> World:
    """Load the data and deal it out.

    Parameters
    ----------
    config
        The configuration.
    data_dir
        Where data sets lie.

    Returns
    -------
    World
        Samples and shares.
    """
    drawn = roles(config)
    dataset = data.load(config.data, data_dir=data_dir, seed=config.seed)
    shares = share_out(
        dataset,
        config.partition,
        clients=config.clients,
        seed=config.seed,
        test_fraction=config.test_fraction,
        validation=config.validation,
        scarcity=config.scarcity,
        max_test=config.max_test,
    )
    return World(dataset, shares, drawn)


def make_engine(
    config: ExperimentConfig, world: World, device: torch.device, choices: Mapping[str, Any] | None = None
) -> Engine:
    """Put the samples on the device, build the model and the engine.

    Parameters
    ----------
    config
        The configuration.
    world
        Samples and shares.
    device
        Where to compute.
    choices
        What an earlier part of the same run chose, to be used again.

    Returns
    -------
    Engine
        The engine.
    """
    choices = choices or {}
    dataset, dtype = world.dataset, getattr(torch, config.dtype)
    _refuse_unfit(config, dataset)
    module = _make_module(config, dataset)
    models.check(module)
    loss = _imported_loss(config.loss) if config.loss and config.loss.startswith(IMPORT) else config.loss
    problem = Problem.of(module, dataset.task, loss=loss, metrics=config.metrics, dtype=dtype, device=device)
    labels = _poisoned(config, world) if len(world.roles.attackers) else None
    samples = Samples.of(dataset, world.shares, seed=config.seed, device=device, dtype=dtype, labels=labels)
    _try_out(config, problem, samples, dataset)
    if config.engine == "loop":
        return LoopEngine(problem, samples, config.seed)
    return BatchedEngine(
        problem,
        samples,
        config.seed,
        kernel=choices.get("kernel") or (None if config.kernel == "auto" else config.kernel),
        convolution=choices.get("convolution") or (None if config.convolution == "auto" else config.convolution),
        chunk=choices.get("chunk") or config.chunk,
        compile_steps=config.compile,
        precision=config.precision,
    )


def _make_module(config: ExperimentConfig, dataset: Dataset, purpose: str = "model") -> nn.Module:
    with randomness.torch_stream(config.seed, purpose):
        return models.build(config.model, dataset.input_shape, dataset.num_outputs)


def _refuse_unfit(config: ExperimentConfig, dataset: Dataset) -> None:
    fitting = metric_table.names(dataset.task)
    for metric in config.metrics:
        if metric not in fitting:
            raise ConfigError(
                f"metric {metric!r} does not fit the {dataset.task} task of {dataset.name!r}: use {', '.join(fitting)}"
            )
    own = _LOSS_OF_TASK[dataset.task]
    if config.loss in LOSSES and config.loss != own:
        raise ConfigError(f"loss {config.loss!r} does not fit the {dataset.task} task of {dataset.name!r}: use {own}")


def _imported_loss(name: str) -> PerSampleLoss:
    module, _, target = name.removeprefix(IMPORT).partition(":")
    try:
        found = getattr(importlib.import_module(module), target, None) if module and target else None
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"loss {name!r} cannot be imported ({reason})") from error
    if not callable(found):
        raise ConfigError(f"loss {name!r} must read import:package.module:function, and that function must exist")
    loss: PerSampleLoss = found
    return loss


def _try_out(config: ExperimentConfig, problem: Problem, samples: Samples, dataset: Dataset) -> None:
    """Run the model and the loss on a few real samples: what cannot work is said before anything is computed."""
    client = int(samples.sizes("train").argmax())
    index = samples.splits["train"][client][:4].unsqueeze(0)
    x, y = (value[0] for value in samples.gather(index, index.new_tensor([client])))
    with _reported(f"model {config.model!r}", f"inputs of shape {dataset.input_shape}"):
        models.check(problem.module, x)
        with torch.no_grad():
            outputs = problem.module(x)
    single = dataset.task != "multiclass"
    if (single and outputs[0].numel() != 1) or (
        not single and (outputs.dim() != 2 or outputs.shape[1] < dataset.num_outputs)
    ):
        raise ModelError(
            f"model {config.model!r} gives outputs of shape {tuple(outputs.shape[1:])} for a sample, but "
            f"{dataset.name!r} needs {dataset.num_outputs}"
        )
    with _reported(f"loss {config.loss!r}", f"outputs of shape {tuple(outputs.shape)}"):
        losses = problem.loss(outputs, y)
    if losses.shape != y.shape:
        raise ConfigError(
            f"loss {config.loss!r} gives a result of shape {tuple(losses.shape)}, but must give one for each of "
            f"{len(y)} samples"
        )


@contextlib.contextmanager
def _reported(what: str, on: str) -> Iterator[None]:
    """Turn whatever the user's own code raises into a sentence."""
    try:
        yield
    except CoterieError:
        raise
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ModelError(f"{what} fails on {on} ({reason})") from error


def _poisoned(config: ExperimentConfig, world: World) -> Tensor | None:
    attack = attacks.parse(config.attack or "")
    if not isinstance(attack, attacks.LabelPoisoning):
        return None
    shares = world.shares
    mine = torch.cat([shares.train[int(client)] for client in world.roles.attackers])
    held = torch.cat([part.flat for part in (shares.train, shares.validation, shares.test)])
    if bool((held.bincount()[mine] > 1).any()):
        raise ConfigError(
            f"attack {config.attack!r} would poison samples that attackers share with others under the partition "
            f"{config.partition!r}: use one in which clients share none"
        )
    return attack.poison(world.dataset.y, mine, len(world.dataset.classes), seed=config.seed)


def _wire(config: ExperimentConfig, world: World, device: torch.device) -> Transform | None:
    if config.attack is None or not len(world.roles.attackers):
        return None
    attack = attacks.parse(config.attack)
    if not isinstance(attack, attacks.MessageAttack):
        return None
    attackers = world.roles.attackers.to(device)

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
