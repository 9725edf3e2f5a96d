"""``torch.func``: one step of all clients by ``vmap`` of ``grad``, as it is or compiled; the steps are a loop."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call, grad, vmap

from rivals import Federation, InProcess
from rivals.padded import batches


class TorchFunc(InProcess):
    """Federated averaging of stacked parameters."""

    def __init__(self, federation: Federation, compiled: bool = False) -> None:
        self.federation, self.number = federation, 0
        self.module = federation.module().train()
        self.current = {name: value.detach().clone() for name, value in self.module.named_parameters()}
        self.x, self.y, self.weights = batches(federation)
        lr = federation.work.lr

        def loss(parameters: dict[str, Tensor], x: Tensor, y: Tensor, weights: Tensor) -> Tensor:
            losses = F.cross_entropy(functional_call(self.module, parameters, (x,)), y, reduction="none")
            return (losses * weights).sum() / weights.sum().clamp(min=1)

        def step(parameters: dict[str, Tensor], x: Tensor, y: Tensor, weights: Tensor) -> dict[str, Tensor]:
            gradients = grad(loss)(parameters, x, y, weights)
            return {name: value - lr * gradients[name] for name, value in parameters.items()}

        every = vmap(step, randomness="different")
        self.step = torch.compile(every) if compiled else every

    def play(self) -> None:
        """Play one round."""
        self.number += 1
        cohort = self.federation.cohort(self.number)
        x, y, weights = self.x, self.y, self.weights
        if len(cohort) < len(x):
            places = torch.tensor(cohort, device=x.device)
            x, y, weights = x[places], y[places], weights[places]
        rows = {name: value.expand(len(cohort), *value.shape).contiguous() for name, value in self.current.items()}
        with torch.no_grad():
            for number in range(x.shape[1]):
                rows = self.step(rows, x[:, number], y[:, number], weights[:, number])
            counts = weights.sum((1, 2))
            shares = counts / counts.sum()
            self.current = {name: torch.tensordot(shares, value, 1) for name, value in rows.items()}

    def parameters(self) -> Tensor:
        """Give the global model."""
        return torch.cat([self.current[name].reshape(-1) for name, _ in self.module.named_parameters()])
