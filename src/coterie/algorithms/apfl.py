"""APFL: adaptive mixtures of a client's own model and the global one.

Deng, Kamani and Mahdavi, "Adaptive personalized federated learning", 2020.

::

    client i ∈ S:   w_i ← w;  then for each minibatch of E epochs, all on the right from before the step
                        v̄_i = α_i v_i + (1 − α_i) w_i
                        w_i ← w_i − η ∇f_i(w_i; batch)
                        v_i ← v_i − η α_i ∇f_i(v̄_i; batch)
                    at the round's first minibatch  α_i ← clip(α_i − η ⟨v_i − w_i, ∇f_i(v̄_i; batch)⟩, 0, 1)
    server:         w ← Σ_{i∈S} p_i w_i

The inner product is the derivative of the loss of ``v̄_i`` by ``α_i``, at what the round began with. Were ``w_i`` to
step first, each descent of ``α_i`` would gain ``η² ⟨∇f_i(w_i), ∇f_i(v̄_i)⟩``, which is hardly ever negative and drives
``α_i`` to zero. The personal models are ``α_i v_i + (1 − α_i) w`` with the global model as it is at evaluation; the
global model is FedAvg's ``w``. With ``α_i = 0`` held fixed the method is FedAvg, with ``α_i = 1`` it is Local.

Departures from the paper

- The server weighs clients by their samples, as FedAvg does, rather than equally.
- ``α_i`` changes once a round, which the paper suggests to save work. Its authors' program adds ``0.02 α_i`` to the
  derivative: ``alpha_decay=0.02``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from coterie.algorithms.base import Batch, ClientContext, Cohort, Message, Personalise, Start, State, Task
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.local_training import ProximalTraining
from coterie.algorithms.row_numbers import fitting
from coterie.rows import Rows


def mixture(alpha: Tensor, v: Tensor, w: Tensor) -> Tensor:
    """Return ``α v + (1 − α) w``."""
    return torch.lerp(w, v, alpha)


@dataclass(frozen=True, kw_only=True)
class MixtureTraining(ProximalTraining):
    """Steps of the copy ``w_i`` of the global model, and beside them of the client's own ``v_i`` within the mixture.

    The client's state holds ``v`` and ``alpha``; the message and the reply hold ``w``.

    Parameters
    ----------
    adaptive
        Learn ``α_i``; otherwise it stays as it was.
    alpha_decay
        Coefficient of an L2 term on ``α_i``.
    """

    per_row: ClassVar[tuple[str, ...]] = ("prox", "alpha_decay")
    outside_steps: ClassVar[tuple[str, ...]] = ("from_own", "reply")

    adaptive: bool
    alpha_decay: float

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Start at the received model and the client's own."""
        work = super().start(context, state, message)
        work |= {"v": state["v"], "alpha": state["alpha"], **self.optimiser.init(context, state["v"], "own ")}
        # One at the first step of a round and zero afterwards: how far α moves.
        return work | ({"opening": torch.ones_like(state["alpha"])} if self.adaptive else {})

    def step(self, work: Rows, batch: Batch) -> Rows:
        """Take a step of both models, and at the round's first of ``α_i``, all from where they are."""
        w, v, alpha = work["w"], work["v"], work["alpha"]
        gradient = batch.measuring("v").grad(mixture(alpha, v, w))
        changed = self.optimiser.update(work, "v", alpha * gradient, "own ")
        if self.adaptive:
            slope = torch.linalg.vecdot(v - w, gradient).unsqueeze(1) + fitting(self.alpha_decay, alpha) * alpha
            changed["alpha"] = (alpha - work["own lr"] * work["opening"] * slope).clamp(0, 1)
            changed["opening"] = torch.zeros_like(alpha)
        return super().step(work, batch) | changed  # last, since a step of w may be taken in place

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """Keep ``v_i`` and ``α_i``, and send ``w_i``."""
        return {"v": work["v"], "alpha": work["alpha"]}, {"w": work["w"]}


class APFL(FedAvg):
    """FedAvg, and for each client a learnt mixture of the global model with one of its own."""

    name: ClassVar[str] = "apfl"
    title: ClassVar[str] = "APFL"
    citation: ClassVar[str] = "Deng et al., 2020"
    own_statistics: ClassVar[str | None] = "v"

    alpha: float = Field(0.5, ge=0, le=1, description="weight of a client's own model in its mixture, at the start")
    adaptive: bool = Field(True, description="learn each client's weight; otherwise all stay at alpha")
    alpha_decay: float = Field(0.0, ge=0, description="coefficient of an L2 term on the weight")

    def init(self, start: Start) -> tuple[State, Rows]:
        """Start every model at the initial one."""
        return {"w": start.row}, {"v": start.rows(), "alpha": start.rows(start.row.new_full((1,), self.alpha))}

    def tasks(self) -> dict[str, Task]:
        """Return the training of both models."""
        task = MixtureTraining(self.stepper, self.minibatches, adaptive=self.adaptive, alpha_decay=self.alpha_decay)
        return {"train": task}

    def personalise(self, server: State, cohort: Cohort) -> Personalise:
        """Send the current global model."""
        yield from ()
        return Message(shared={"w": server["w"]})

    def personal(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Mix the global model with the client's own."""
        return {"w": mixture(state["alpha"], state["v"], message["w"])}
