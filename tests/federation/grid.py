"""A federation in one process: nodes behind a transport that can lose, delay and spoil messages."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from coterie import data
from coterie.api import run
from coterie.compute.engine import Call
from coterie.config import from_mapping
from coterie.data import Dataset
from coterie.data.partitions import share_out
from coterie.federation.agreement import Agreement, Member, Schema
from coterie.federation.node import Node
from coterie.federation.node_state import NodeState
from coterie.federation.resident import Means
from coterie.federation.transport import Failure
from coterie.rows import Rows
from coterie.runs.builder import assemble
from coterie.runs.storage import RunFolder
from coterie.simulation.simulation import Simulation
from tests.small_runs import Killed

Fault = Callable[[bytes, bytes], bytes | Failure | None]
"""From a message and the node's reply to it, to what the server gets."""


@dataclass
class LocalGrid:
    nodes_: dict[int, Node]
    faults: dict[int, Fault] = field(default_factory=dict)
    hidden: set[int] = field(default_factory=set)
    keys: dict[int, str] = field(default_factory=dict)
    exchanges: int = 0
    before: Callable[[LocalGrid], None] | None = None
    away: Callable[[int], set[int]] = field(default=lambda done: set())
    sent: list[dict[int, bytes]] = field(default_factory=list)

    def nodes(self) -> dict[int, str]:
        gone = self.hidden | self.away(self.exchanges)
        return {number: self.keys.get(number, "") for number in self.nodes_ if number not in gone}

    def exchange(
        self, messages: Mapping[int, bytes], deadline: float, patience: frozenset[int]
    ) -> dict[int, bytes | Failure]:
        gone = self.away(self.exchanges)
        self.exchanges += 1
        if self.before is not None:
            self.before(self)
        self.sent.append(dict(messages))
        out: dict[int, bytes | Failure] = {}
        for number, message in messages.items():
            if number in self.hidden | gone:
                continue
            reply: bytes | Failure | None = self.nodes_[number].handle(message)
            if number in self.faults:
                assert isinstance(reply, bytes)
                reply = self.faults[number](message, reply)
            if reply is not None:
                out[number] = reply
        return out


@dataclass
class Dying:
    """A grid whose server is killed once so many exchanges after the hello are done."""

    grid: LocalGrid
    after: int

    def nodes(self) -> dict[int, str]:
        return self.grid.nodes()

    def exchange(
        self, messages: Mapping[int, bytes], deadline: float, patience: frozenset[int]
    ) -> dict[int, bytes | Failure]:
        replies = self.grid.exchange(messages, deadline, patience)
        if self.grid.exchanges == self.after + 1:
            raise Killed
        return replies


@dataclass
class Local:
    agreement: Agreement
    grid: LocalGrid
    folder: Path
    datasets: list[Dataset]

    def node_folder(self, client: int) -> Path:
        return self.folder / f"node-{client}"

    def restart(self) -> None:
        """Start all nodes anew: they find what they have on their disks."""
        self.grid.nodes_ = {
            number: Node(self.agreement, node.client, self.datasets[node.client], node.folder)
            for number, node in self.grid.nodes_.items()
        }


def parts(clients: int) -> list[Dataset]:
    """Deal digits out, each part with its own samples alone, in the order of the whole."""
    whole = data.load("digits")
    shares = share_out(whole, "dirichlet:0.5", clients=clients, seed=5, validation=0.0)
    out = []
    for client in range(clients):
        index = torch.cat([shares.train[client], shares.test[client]]).sort().values[: 60 + 15 * client]
        out.append(
            Dataset("own", whole.x[index], whole.y[index], len(index), "multiclass", whole.classes, (0.0,), (1.0,))
        )
    return out


def make_agreement(clients: int = 3, **more: Any) -> Agreement:
    values: dict[str, Any] = {
        "name": "test",
        "members": tuple(Member(name=f"silo-{number}", key=None) for number in range(clients)),
        "data": Schema(task="multiclass", input_shape=(1, 8, 8), classes=tuple("0123456789")),
        "model": "mlp:hidden=8",
        "seed": 3,
    }
    return Agreement(**(values | more))


def make_federation(folder: Path, clients: int = 3, means: Means | None = None, **more: Any) -> Local:
    agreement = make_agreement(clients, **more)
    datasets = parts(clients)
    # The transport's numbers are not the clients' numbers.
    nodes = {
        100 - client: Node(agreement, client, datasets[client], folder / f"node-{client}", means=means)
        for client in range(clients)
    }
    return Local(agreement, LocalGrid(nodes), folder, datasets)


def combined(local: Local, out: Path) -> dict[str, Any]:
    """Give the settings of the same experiment with everybody's samples in one file."""
    x = torch.cat([each.x for each in local.datasets]).numpy()
    y = torch.cat([each.y for each in local.datasets]).numpy()
    client = np.concatenate([np.full(len(each), number) for number, each in enumerate(local.datasets)])
    out.mkdir(parents=True, exist_ok=True)
    np.savez(out / "all.npz", x=x, y=y, client=client)
    agreement = local.agreement
    return {
        "data": f"npz:{out / 'all.npz'}",
        "partition": "natural",
        "clients": len(local.datasets),
        "engine": "loop",
        "model": agreement.model,
        "local": agreement.local,
        "buffers": agreement.buffers,
        "seed": agreement.seed,
        "threads": 1,
        "test_fraction": agreement.test_fraction,
        "validation": agreement.validation,
        "dtype": agreement.dtype,
    }


def simulated(local: Local, algorithm: str, rounds: int, out: Path, **more: Any) -> Path:
    """Run the same as an ordinary simulation with the loop engine."""
    run(algorithm, out=out / "run", progress=False, rounds=rounds, **combined(local, out), **more)
    return out / "run"


def reference(local: Local, algorithm: str, out: Path, lost: Callable[[Tensor, Call], Tensor]) -> Simulation:
    """Give the same federation as a simulation that loses replies."""
    config = from_mapping({"algorithm": algorithm, **combined(local, out)})
    whole = assemble(config).simulation
    return Simulation(whole.algorithm, whole.engine, lost=lost)


def states(run_folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    with RunFolder.open(run_folder) as folder:
        found = folder.checkpoints.latest()
    assert found is not None
    return found.server, found.clients


def node_rows(local: Local, client: int, run_folder: Path) -> Rows:
    """Give a node's own state: what is committed, without what is pending."""
    name = json.loads((run_folder / "choices.json").read_text())["run"]
    return NodeState(local.node_folder(client) / "state", name, {}).rows()


def metrics_of(run_folder: Path) -> pd.DataFrame:
    frame = pd.read_parquet(run_folder / "metrics.parquet")
    frame = frame[~frame["metric"].astype(str).str.startswith("wire_")]
    columns = ["round", "client", "model", "split", "metric"]
    return frame.astype(dict.fromkeys(columns[2:], "str")).sort_values(columns).reset_index(drop=True)


def equal(ours: Rows, theirs: Rows) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        gap = (ours[name].double() - theirs[name].double()).abs().max() if ours[name].numel() else 0.0
        assert torch.equal(ours[name], theirs[name]), f"{name} differs by {gap}"


def compare(local: Local, algorithm: str, rounds: int, federated: Path, scratch: Path, **more: Any) -> None:
    """See that a federation left what a simulation leaves: the server's state, every node's row, every metric."""
    other = simulated(local, algorithm, rounds, scratch, **more)
    server, clients = states(other)
    equal(states(federated)[0], server)
    for client in range(len(local.datasets)):
        equal(
            node_rows(local, client, federated), {name: value[client : client + 1] for name, value in clients.items()}
        )
    pd.testing.assert_frame_equal(metrics_of(federated), metrics_of(other), check_exact=True)
