"""The samples of an experiment, who holds them, and what each client does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from coterie import data, randomness
from coterie.algorithms import registry
from coterie.config import ExperimentConfig
from coterie.data import Dataset
from coterie.data.bounded_statistics import BoundedColumns
from coterie.data.mapped import is_mapped, mapped_copy
from coterie.data.partitions import Shares, share_out
from coterie.data.partitions.assignment import refuse_too_many
from coterie.data.statistics import Constants, constants_of, prepared, refuse_medians, with_constants
from coterie.errors import ConfigError
from coterie.simulation import attacks
from coterie.simulation.privacy import Protection, parse


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
class Population:
    """The samples of an experiment, who holds them, and what each client does.

    Parameters
    ----------
    dataset
        The samples.
    shares
        Who holds which.
    roles
        Who trains, is held out, attacks.
    own
        For each client, the data set with statistics of its own training samples, where those are what scales it.
    told
        How many replies' worth of privacy each trainer has spent on telling statistics.
    """

    dataset: Dataset
    shares: Shares
    roles: Roles
    own: tuple[Dataset, ...] = ()
    told: int = 0

    def seen_by(self, client: int) -> Dataset:
        """Give the data set with the statistics that scale a client's samples."""
        return self.own[client] if self.own else self.dataset

    def on_disk(self, folder: Path) -> Population:
        """Give the same with inputs in a file, as those of many images are already; it has no name in the folder."""
        if is_mapped(self.dataset.x):
            return self
        x = mapped_copy(self.dataset.x, folder)
        return replace(self, dataset=replace(self.dataset, x=x), own=tuple(replace(one, x=x) for one in self.own))

    def holdings(self) -> pd.DataFrame:
        """Say what each client holds and does, in a table with a row for each.

        Its columns are ``client``, where clients have names ``name``, ``role`` (honest, attacker or newcomer), the
        sizes ``train``, ``validation`` and ``test``, where they are known ``group`` and ``noise``, and for each class
        ``class NAME``.
        """
        shares, count = self.shares, len(self.shares)
        role = np.full(count, "honest", dtype=object)
        role[self.roles.newcomers.numpy()] = "newcomer"
        role[self.roles.attackers.numpy()] = "attacker"
        columns: dict[str, Any] = {"client": np.arange(count)}
        columns |= {"name": np.array(shares.names, dtype=object)} if shares.names else {}
        columns["role"] = role
        for name in ("train", "validation", "test"):
            columns[name] = getattr(shares, name).sizes.numpy()
        columns |= {} if shares.groups is None else {"group": shares.groups.numpy()}
        columns |= {} if shares.noise is None else {"noise": shares.noise.numpy()}
        if self.dataset.classes:
            counts = shares.counts(self.dataset.y, len(self.dataset.classes)).numpy()
            columns |= {f"class {name}": counts[:, label] for label, name in enumerate(self.dataset.classes)}
        return pd.DataFrame(columns)


def roles(config: ExperimentConfig) -> Roles:
    """Draw who trains, who is held out and who attacks: a function of the configuration alone."""
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


def make_population(
    config: ExperimentConfig, data_dir: Path | None = None, load: Callable[..., Dataset] = data.load
) -> Population:
    """Load the data and deal it out; ``load`` may give a data set that was loaded before."""
    dataset = load(config.data, data_dir=data_dir, seed=config.seed)
    refuse_too_many(dataset, config.clients)  # before anything is drawn for each of them
    drawn = roles(config)
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
    return _with_statistics(config, Population(dataset, shares, drawn))


def _with_statistics(config: ExperimentConfig, population: Population) -> Population:
    """Take what scales inputs and fills gaps from training samples: of each client, or of all that train."""
    dataset, train = population.dataset, population.shares.train
    alone = config.scope == "local" or not registry.get(config.algorithm).federates
    if dataset.preparation is None or (config.scope == "pooled" and not alone):  # as the data were loaded
        return population
    if alone:
        own = tuple(prepared(dataset, [train[client]], "local") for client in range(len(train)))
        return replace(population, own=own)
    trainers = population.roles.trainers
    if config.privacy is not None:
        protection = Protection(parse(config.privacy), config.seed, config.clients)
        found = noisy_constants(dataset, [train[client] for client in trainers.tolist()], protection, trainers)
        return replace(population, dataset=with_constants(dataset, found), told=int(protection.replies.max()))
    parts = [train[client] for client in trainers.tolist()]
    return replace(population, dataset=prepared(dataset, parts, "federated"))


def noisy_constants(dataset: Dataset, parts: list[Tensor], protection: Protection, clients: Tensor) -> Constants:
    """Give what the statistics of some clients come to that each tells with noise, as one reply."""
    preparation = dataset.preparation
    assert preparation is not None
    refuse_medians(preparation)
    columns = BoundedColumns(preparation, dataset.features, dataset.x.dtype == torch.uint8)
    if not columns.places:
        return Constants(dataset.mean, dataset.std, dataset.fill)
    size = protection.privacy.clip / columns.radius
    told = torch.stack([columns.told(dataset.x[part]) for part in parts]) * size
    sent = protection({"statistics": told}, {}, {"statistics": None}, clients, ("statistics", 0))["statistics"]
    return constants_of(preparation, *columns.moments((sent / size).mean(0), len(parts)))
