"""FedProx: federated averaging with a proximal term.

Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "Federated optimization in heterogeneous networks", MLSys 2020.

::

    client i ∈ S:   w_i ← E epochs on f_i(w_i) + (μ/2) |w_i − w|²,  gradient ∇f_i(w_i) + μ (w_i − w)
    server:         w ← Σ_{i∈S} p_i w_i

Departures from the paper: the local problem is solved by the same epochs as FedAvg's, without an inexactness test.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from coterie.algorithms.base import Task
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.local_training import ProximalTraining, refuse_unstable


class FedProx(FedAvg):
    """FedAvg whose clients are held near the global model while they train."""

    name: ClassVar[str] = "fedprox"
    title: ClassVar[str] = "FedProx"
    citation: ClassVar[str] = "Li et al., MLSys 2020"

    mu: float = Field(0.1, ge=0, description="weight of the proximal term")

    @model_validator(mode="after")
    def _stable(self) -> FedProx:
        refuse_unstable(self.lr, self.mu, self.optimiser, "mu")
        return self

    def tasks(self) -> dict[str, Task]:
        """Return the training with the proximal term."""
        return super().tasks() | {"train": ProximalTraining(self.stepper, self.minibatches, prox=self.mu)}
