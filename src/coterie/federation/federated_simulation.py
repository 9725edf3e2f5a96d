"""The server's half of a federation, put together: a simulation whose clients are nodes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie.algorithms import registry
from coterie.config import ExperimentConfig
from coterie.errors import ConfigError
from coterie.federation.agreement import Agreement
from coterie.federation.membership import Membership
from coterie.federation.party_data import blank_population, engine_of, fresh_row
from coterie.federation.remote_exchange import RemoteExchange, Terms
from coterie.federation.reply_schema import ReplySchema, blank_engine
from coterie.federation.transport import Transport
from coterie.rows import take_rows
from coterie.runs.population import Population
from coterie.runs.storage.events import Listener
from coterie.simulation.client_states import ClientStates
from coterie.simulation.simulation import Simulation


@dataclass(frozen=True)
class Federation:
    """The server's half of a federation: a simulation whose clients are nodes.

    Parameters
    ----------
    agreement
        What all parties agreed on.
    population
        Who holds how many samples, as far as members have told; the samples themselves are blank.
    simulation
        The method with the server's state; the clients' states lie at the nodes.
    remote
        The simulation's exchange.
    members
        Who was a member when it was put together.
    """

    agreement: Agreement
    population: Population
    simulation: Simulation
    remote: RemoteExchange
    members: frozenset[int]

    def learn_sizes(self) -> None:
        """Take over the sizes of members that joined since."""
        engine = self.simulation.engine
        for client, sizes in self.remote.membership.sizes.items():
            for split in engine.sizes:
                engine.sizes[split][client] = engine.host_sizes[split][client] = sizes[split]


def make_federation(
    config: ExperimentConfig,
    agreement: Agreement,
    transport: Transport,
    membership: Membership,
    header: Mapping[str, Any],
    terms: Terms,
    report: Listener,
    known: Collection[int],
) -> Federation:
    """Put the server's half together; ``known`` are those who were there when the run began, or came since.

    A ``ConfigError`` says that the method starts from every member's number of samples, and one is not there.
    """
    members = len(agreement.members)
    sizes = {
        split: [membership.sizes.get(client, {}).get(split, 0) for client in range(members)]
        for split in ("train", "validation", "test")
    }
    # Of samples that lie elsewhere only the number is known, and nothing here is as large as that number.
    population = blank_population(agreement, {split: [min(size, 1) for size in each] for split, each in sizes.items()})
    algorithm = registry.make(config.algorithm, config.settings)
    # Who comes later is no member until its first round is over, where the method has a way to welcome it.
    first = torch.tensor(sorted(known)) if algorithm.settles else population.roles.trainers

    def fresh(client: int) -> Tensor:
        return fresh_row(config, agreement, client)

    engine = engine_of(config, population)
    for split in engine.sizes:
        engine.sizes[split], engine.host_sizes[split] = torch.tensor(sizes[split]), torch.tensor(sizes[split])
    simulation = Simulation(algorithm, engine, fresh=fresh, members=first, local=config.local_patterns)
    begin = simulation.clients.rows
    blank = blank_engine(engine, agreement)
    # Nodes make their first state themselves. They are told everybody's sizes only where it depends on them.
    local = config.local_patterns
    plain = Simulation(algorithm, blank, fresh=fresh, members=first, keep="disk", local=local).clients.rows
    common = dict(header)
    if any(not _equal_rows(plain[name], rows, members) for name, rows in begin.items()):
        if not all(sizes["train"]):
            raise ConfigError(
                f"{algorithm.title} with these settings starts from every member's number of samples, but not all "
                "members are there: start them first"
            )
        common["sizes"] = sizes["train"]
    # Of the clients' first state only shapes matter here: the state itself lies at the nodes.
    replies = ReplySchema(blank, simulation.tasks, simulation.clients.gather(torch.tensor([0])))
    remote = RemoteExchange(agreement, transport, membership, common, terms, report, replies)
    simulation.exchange, simulation.clients = remote, ClientStates({})
    return Federation(agreement, population, simulation, remote, frozenset(first.tolist()))


def _equal_rows(first: Tensor, second: Tensor, count: int) -> bool:
    """Compare matrices row by row: one of them may lie on disk because there is no room for both."""
    return all(torch.equal(take_rows(first, place), take_rows(second, place)) for place in torch.arange(count).split(1))
