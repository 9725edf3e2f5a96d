"""FedROD: a generic and a personal head on one body.

Chen and Chao, "On bridging generic and personalized federated learning for image classification", ICLR 2022.

A client's two predictors share the body ``θ``: the generic head ``ψ`` alone, and the generic head plus a personal one
``φ_i``. With features ``z = θ(x)`` and the client's class counts ``n_c``, each step on a minibatch takes::

    θ, ψ ← θ, ψ − η ∇ CE(ψ(z) + γ log n_c, y)          balanced softmax; classes without samples are masked
    φ_i  ← φ_i − η ∇ CE(ψ(z) + φ_i(z), y)              with z and ψ(z) held fixed
    server:   θ, ψ ← Σ_{i∈S} p_i (θ_i, ψ_i),   p_i = N_i / Σ_{k∈S} N_k

The global model is ``ψ(θ(x))``, the personal model ``ψ(θ(x)) + φ_i(θ(x))`` with the server's current ``θ`` and ``ψ``.
Personal heads never leave their client.

Departures from the paper

- Both steps are taken from the same point, on one forward pass.
- Personal heads start at zero, where the personal model is the global one.
- The plain linear personal head of the paper, not the one that a hyper-network makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from coterie.algorithms.base import (
    Batch,
    ClientContext,
    Cohort,
    Fold,
    Message,
    Net,
    Personalise,
    Start,
    State,
    Task,
)
from coterie.algorithms.body_and_head import PartsTraining, require_parts
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.row_numbers import fitting
from coterie.errors import ModelError
from coterie.models.problem import LOSSES
from coterie.rows import Rows

_cross_entropy = LOSSES["cross_entropy"]


def both_heads(net: Net, w: Tensor, phi: Tensor, x: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Apply the generic and the personal head to the same features; only the generic one's gradient reaches them."""
    head = net.sub("head")
    z = net.sub("body").outputs(net.columns("body").take(w), x, key)
    return head.outputs(net.columns("head").take(w), z, key), head.outputs(phi, z.detach(), key)


@dataclass(frozen=True)
class TwoHeadTraining(PartsTraining):
    """Epochs that train body and generic head on the balanced loss, and the personal head on what that leaves.

    Parameters
    ----------
    optimiser
        How to step.
    data
        Which minibatches.
    gamma
        How strongly class counts are balanced.
    """

    per_row: ClassVar[tuple[str, ...]] = ("gamma",)

    gamma: float

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Start at the global model and the client's own head."""
        return self.parts(context, w=message["w"], phi=state["phi"]) | {"counts": context.class_counts}

    def losses(self, work: Rows, batch: Batch) -> Tensor:
        """Return the sum of both predictors' losses."""
        generic, personal = both_heads(batch.net, work["w"], work["phi"], batch.x, batch.key)
        # A head may be wider than the data has classes; 0 to the power of 0 is 1, so γ = 0 masks nothing.
        counts = F.pad(work["counts"], (0, generic.shape[-1] - work["counts"].shape[-1]))
        balanced = generic + counts.pow(fitting(self.gamma, counts)).log().unsqueeze(1)
        # What the second term holds fixed is detached, so the gradient of the sum is that of each term apart.
        second = batch.mean_loss(generic.detach() + personal, _cross_entropy)
        return batch.mean_loss(balanced, _cross_entropy) + second

    def folds(self) -> tuple[Fold, ...]:
        """Make one pass over minibatches."""
        return (Fold(self.data, self.step_on("w", "phi")),)

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """Keep the personal head, and send the rest."""
        return {"phi": work["phi"]}, {"w": work["w"]}


class FedROD(FedAvg):
    """A global model trained on a balanced loss, and on its features a personal head for each client."""

    name: ClassVar[str] = "fedrod"
    title: ClassVar[str] = "FedROD"
    citation: ClassVar[str] = "Chen and Chao, ICLR 2022"

    gamma: float = Field(1.0, ge=0, description="exponent of class counts in the balanced softmax; 0 is plain softmax")

    def init(self, start: Start) -> tuple[State, Rows]:
        """Start every model at the initial one, with personal heads of zeros."""
        require_parts(start, self.title, outputs=2)
        if not start.net.columns("head").size:
            raise ModelError(f"{self.title} has a personal head beside a shared one: leave head out of local")
        phi = torch.zeros_like(start.net.columns("head").take(start.row))
        return {"w": start.row}, {"phi": start.rows(phi)}

    def tasks(self) -> dict[str, Task]:
        """Return the training of both predictors."""
        return {"train": TwoHeadTraining(self.stepper, self.minibatches, self.gamma)}

    def personalise(self, server: State, cohort: Cohort) -> Personalise:
        """Send the current global model to all."""
        yield from ()
        return Message(shared=dict(server))

    def personal(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Put each client's head beside the generic one."""
        return {"w": message["w"], "phi": state["phi"]}

    def predict(self, net: Net, rows: Rows, x: Tensor) -> Tensor:
        """Add the personal head's outputs, where there is one."""
        if "phi" not in rows:
            return super().predict(net, rows, x)
        generic, personal = both_heads(net, rows["w"], rows["phi"], x)
        return generic + personal
