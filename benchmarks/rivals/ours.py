"""Coterie: whole rounds of ``Simulation.play_round``, batch orders drawn and samples gathered within them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from coterie.algorithms import registry
from coterie.compute.batched import BatchedEngine
from coterie.compute.samples import Samples
from coterie.data.partitions import Ragged
from coterie.models.problem import Problem
from coterie.simulation.simulation import Simulation
from rivals import CLASSES, Federation, InProcess


def simulation(federation: Federation, method: str = "fedavg", **options: Any) -> Simulation:
    """Give a method on the batched engine with a federation's samples and model."""
    work, device = federation.work, federation.device
    count = len(federation.y)
    one = torch.ones((), device=device)
    parts = {
        "train": list(torch.arange(count).split(list(work.sizes))),
        "validation": [torch.arange(0) for _ in work.sizes],
        "test": [torch.arange(0) for _ in work.sizes],
    }
    splits: Any = {}
    for name, part in parts.items():
        ragged = Ragged.of(part)
        splits[name] = Ragged(ragged.flat.to(device), ragged.offsets.to(device))
    counts = torch.zeros(len(work.sizes), CLASSES, device=device)
    samples = Samples(federation.x, federation.y, one, torch.zeros_like(one), splits, counts, None, torch.float32)
    engine = BatchedEngine(Problem.of(federation.module(), device=device), samples, 1, **options)
    settings = {"local_epochs": 1, "batch_size": work.batch, "lr": work.lr}
    return Simulation(registry.make(method, settings), engine)


class Ours(InProcess):
    """FedAvg on the batched engine."""

    def __init__(self, federation: Federation, **options: Any) -> None:
        self.federation, self.number = federation, 0
        self.simulation = simulation(federation, **options)

    def play(self) -> None:
        """Play one round."""
        self.number += 1
        cohort = torch.tensor(self.federation.cohort(self.number), device=self.federation.device)
        self.simulation.play_round(cohort, self.number)

    def parameters(self) -> Tensor:
        """Give the global model."""
        layout = self.simulation.engine.problem.layout
        row = self.simulation.server["w"]
        named = layout.views(row.unsqueeze(0))
        order = [name for name, _ in self.federation.module().named_parameters()]
        return torch.cat([named[name].reshape(-1) for name in order])
