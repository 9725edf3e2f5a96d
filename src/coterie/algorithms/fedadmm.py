"""FedADMM: federated averaging with a dual variable on each client.

Gong, Li and Freris, "FedADMM: a robust federated deep learning framework with adaptivity to system heterogeneity",
ICDE 2022.

At the start ``w_i = w`` and ``π_i = 0``. Each round::

    client i ∈ S:   w_i ← E_i epochs on f_i(w_i) + ⟨π_i, w_i − w⟩ + (ρ/2) |w_i − w|²,  starting from w
                        gradient ∇f_i(w_i; batch) + π_i + ρ (w_i − w);  E_i drawn from E_min .. E
                    π_i ← π_i + ρ (w_i − w)
                    Δ_i = (w_i + π_i/ρ)_new − (w_i + π_i/ρ)_old, which it sends
    server:         w ← w + (η_s / m) Σ_{i∈S} Δ_i

The global model is ``w``. A client's personal model is its ``w_i`` of its last participation. With ``η_s = 1``,
``w = mean_i (w_i + π_i/ρ)`` over all m clients, whoever takes part.

Departures from the paper

- The paper divides by ``|S|``, not m. But a client's first ``Δ_i`` carries all that ``w`` has moved so far, so a small
  cohort would double ``w`` every round. The paper's step is ``server_lr = m/|S|``; with everybody both are the same.
- The authors' program measures ``Δ_i`` from the received ``w`` instead of the client's own last message; here it is the
  true difference.
- ``begin="own"`` starts training at the client's own ``w_i``.
- With ``ρ = 0`` duals stay zero and ``w_i`` itself is sent as a difference: FedAvg with equal weights where everybody
  takes part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from coterie.algorithms.base import Ask, ClientContext, Cohort, Message, Minibatches, Round, Start, State, Task
from coterie.algorithms.local_training import GlobalTraining, ProximalTraining, refuse_unstable
from coterie.rows import Rows


@dataclass(frozen=True)
class LagrangianTraining(ProximalTraining):
    """Epochs on the augmented Lagrangian, then the dual's step; ``prox`` is the penalty ρ.

    The client's state holds ``w`` and ``pi``; the message holds ``w``, the reply ``delta``.
    """

    references: ClassVar[Mapping[str, str | None]] = {"delta": None}
    per_row: ClassVar[tuple[str, ...]] = ("prox",)
    outside_steps: ClassVar[tuple[str, ...]] = ("from_own", "reply")

    def augmented(self, w: Tensor, pi: Tensor) -> Tensor:
        """Return ``w_i + π_i/ρ``."""
        return w + pi / self.prox if self.prox else w

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Start at the received model, or the client's own."""
        work = super().start(context, state, message)
        if self.prox:
            # π + ρ (w_i − w) = ρ (w_i − (w − π/ρ)): the linear term moves the centre.
            work["centre"] = message["w"] - state["pi"] / self.prox
        sent = self.augmented(state["w"], state["pi"])
        return work | {"received": message["w"], "pi": state["pi"], "sent": sent}

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """Step the dual, and send by how much the message changed."""
        w = work["w"]
        pi = torch.add(work["pi"], w - work["received"], alpha=self.prox)
        return {"w": w, "pi": pi}, {"delta": self.augmented(w, pi) - work["sent"]}


class FedADMM(GlobalTraining):
    """One global model; each client's dual variable carries what makes it differ from the others."""

    name: ClassVar[str] = "fedadmm"
    title: ClassVar[str] = "FedADMM"
    citation: ClassVar[str] = "Gong et al., ICDE 2022"

    local_epochs: int = Field(
        10, ge=1, le=Minibatches.MOST, description="most passes over the client's training samples in a round"
    )
    least_epochs: int = Field(
        1, ge=1, le=Minibatches.MOST, description="fewest passes; each client draws its number each round"
    )
    batch_size: int = Field(50, ge=0, description="samples in a minibatch; 0 means all")
    lr: float = Field(0.1, ge=0, description="learning rate")
    momentum: float = Field(0.5, ge=0, lt=1, description="momentum of the local optimiser (sgd)")
    rho: float = Field(0.01, ge=0, description="penalty ρ of the constraint w_i = w")
    server_lr: float = Field(1.0, ge=0, description="step of the server along the change of the mean over all clients")
    late_server_lr: float = Field(0.5, ge=0, description="step of the server after early_rounds")
    early_rounds: int | None = Field(60, ge=0, description="rounds before the server's step changes; null for never")
    begin: Literal["global", "own"] = Field("global", description="where local training starts")

    @model_validator(mode="after")
    def _consistent(self) -> FedADMM:
        refuse_unstable(self.lr, self.rho, self.optimiser, "rho")
        if self.least_epochs > self.local_epochs:
            raise ValueError(f"least_epochs is {self.least_epochs}: it may be at most local_epochs={self.local_epochs}")
        return self

    def init(self, start: Start) -> tuple[State, Rows]:
        """Start every model at the initial one, with duals of zero."""
        # m counts the clients that ever train: one that never does has nothing to be averaged.
        m = torch.tensor(start.clients if start.members is None else len(start.members), device=start.row.device)
        return {"w": start.row, "m": m}, {"w": start.rows(), "pi": start.rows(torch.zeros_like(start.row))}

    def tasks(self) -> dict[str, Task]:
        """Return the training on the augmented Lagrangian."""
        data = Minibatches(self.batch_size, (self.least_epochs, self.local_epochs))
        return {"train": LagrangianTraining(self.stepper, data, prox=self.rho, from_own=self.begin == "own")}

    def round(self, server: State, cohort: Cohort) -> Round:
        """Broadcast, train, and add the change of the mean over all clients."""
        replies = yield Ask("train", Message(shared={"w": server["w"]}))
        early = self.early_rounds is None or cohort.round <= self.early_rounds
        step = self.server_lr if early else self.late_server_lr
        change = replies["delta"].sum(0) / server["m"]
        return {"w": torch.add(server["w"], change, alpha=step), "m": server["m"]}, {}
