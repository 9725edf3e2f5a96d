"""FedSGD: one gradient step a round.

McMahan, Moore, Ramage, Hampson and Agüera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017.

::

    client i ∈ S:   g_i = ∇f_i(w), over all its samples
    server:         w ← w − η Σ_{i∈S} p_i g_i,    p_i = N_i / Σ_{k∈S} N_k

With all clients this is gradient descent on the pooled data. There is a global model only.

Departures from the paper: gradients are taken in evaluation mode, without dropout.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field

from coterie.algorithms.base import (
    Algorithm,
    Ask,
    Batch,
    ClientContext,
    Cohort,
    Fold,
    FullPass,
    Message,
    Personalise,
    Round,
    Start,
    State,
    Task,
)
from coterie.rows import Rows, mix


@dataclass(frozen=True)
class FullGradient(Task):
    """The loss ``f_i(w)`` and its gradient at the model ``w`` of the message, over all training samples."""

    references: ClassVar[Mapping[str, str | None]] = {"g": None, "loss": None}

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Start both sums at zero."""
        w = message["w"]
        return {"w": w, "g": torch.zeros_like(w), "loss": w.new_zeros(len(w))}

    def step(self, work: Rows, batch: Batch) -> Rows:
        """Add a batch's part."""
        loss, gradient = batch.loss_and_grad(work["w"])
        g = torch.addcmul(work["g"], gradient, batch.share.unsqueeze(1))
        return work | {"g": g, "loss": torch.addcmul(work["loss"], loss, batch.share)}

    def folds(self) -> tuple[Fold, ...]:
        """Make one pass over all samples."""
        return (Fold(FullPass(), self.step),)

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """Send the gradient."""
        return {}, {"g": work["g"]}


class FedSGD(Algorithm):
    """One global model: a step along the mean of the clients' full gradients."""

    name: ClassVar[str] = "fedsgd"
    title: ClassVar[str] = "FedSGD"
    citation: ClassVar[str] = "McMahan et al., AISTATS 2017"
    has_personal: ClassVar[bool] = False
    has_global: ClassVar[bool] = True

    lr: float = Field(0.5, ge=0, description="learning rate of the server's step")
    lr_decay: float = Field(1.0, gt=0, le=1, description="factor on the learning rate after each round")

    def init(self, start: Start) -> tuple[State, Rows]:
        """Start with the initial model at the server, and no state at the clients."""
        return {"w": start.row}, {}

    def tasks(self) -> dict[str, Task]:
        """Return the task that computes the full gradient."""
        return {"gradient": FullGradient()}

    def round(self, server: State, cohort: Cohort) -> Round:
        """Broadcast, gather gradients, step."""
        replies = yield Ask("gradient", Message(shared={"w": server["w"]}))
        eta = self.lr * self.lr_decay ** (cohort.round - 1)
        return {"w": server["w"] - eta * mix(cohort.shares(replies.clients), replies["g"])}, {}

    def personalise(self, server: State, cohort: Cohort) -> Personalise:
        """Send the global model."""
        yield from ()
        return Message(shared={"w": server["w"]})

    def personal(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Use the global model: the method makes no personal ones."""
        return {"w": message["w"]}

    def global_model(self, server: State) -> Rows | None:
        """Return the server's model."""
        return {"w": server["w"]}
