"""What a careful user writes by hand: a module, ``torch.optim.SGD``, minibatches indexed beforehand, no DataLoader."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rivals import Federation, InProcess


class PlainLoop(InProcess):
    """One client after another on one module; the average is summed up as they finish."""

    def __init__(self, federation: Federation) -> None:
        self.federation, self.number = federation, 0
        self.module = federation.module().train()
        self.current = [parameter.detach().clone() for parameter in self.module.parameters()]
        work = federation.work
        self.batches = [
            list(zip(*(part.split(work.batch) for part in federation.samples(client)), strict=True))
            for client in range(len(work.sizes))
        ]

    def play(self) -> None:
        """Play one round."""
        work, cohort = self.federation.work, self.federation.cohort(self.number + 1)
        self.number += 1
        total = sum(work.sizes[client] for client in cohort)
        parameters = list(self.module.parameters())
        sums = [torch.zeros_like(value) for value in self.current]
        for client in cohort:
            with torch.no_grad():
                for parameter, value in zip(parameters, self.current, strict=True):
                    parameter.copy_(value)
            optimiser = torch.optim.SGD(parameters, lr=work.lr)
            for x, y in self.batches[client]:
                optimiser.zero_grad()
                F.cross_entropy(self.module(x), y).backward()
                optimiser.step()
            with torch.no_grad():
                for value, parameter in zip(sums, parameters, strict=True):
                    value.add_(parameter, alpha=work.sizes[client] / total)
        self.current = sums

    def parameters(self) -> Tensor:
        """Give the global model."""
        return nn.utils.parameters_to_vector(self.current)
