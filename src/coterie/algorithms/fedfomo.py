"""FedFomo: each client moves towards the models that help it.

Zhang, Sapra, Fidler, Yeung and Alvarez, "Personalized federated learning with first order model optimization",
ICLR 2021.

The server keeps every client's last model ``v_j`` and an affinity matrix ``P``, and sends a client the ``M`` models
that have helped it most. Each round, with ``L_i`` the loss on the client's validation samples::

    server:     C_i = the M clients j ≠ i of largest P_ij, or, with probability ε, any M clients
    client i:   ω_ij = max(0, (L_i(v_i) − L_i(v_j)) / |v_j − v_i|),  j ∈ C_i;   ω̄_ij = ω_ij / Σ_l ω_il, or all 0
                v_i ← v_i + Σ_j ω̄_ij (v_j − v_i)                                                (Eq. 4, 5)
                v_i ← E epochs of SGD on f_i, starting from there
    server:     P_ij ← P_ij + ω_ij,  j ∈ C_i;   ε ← max(0, ε − decay)

The personal model is ``v_i``. The mean of the ``v_j`` of all who took part serves as a global model, which is derived.

Departures from the paper

- A client replies with its ``M`` raw weights ``ω_ij`` beside its model: the server needs them for ``P``, and records
  them. Messages are ``M n`` floats down and ``n + M`` up.
- ``P`` starts at zero and equal affinities are taken in random order, so that the first rounds explore; ``ε = 0``
  always takes the M largest.
- The validation samples are the experiment's (``validation``, a tenth of the training samples by default; the paper
  takes a fifth). A client that has none keeps its model and trains it.
- An absent client's last model may still be sent to others. Models of clients that never took part yet are sent only
  where there are too few others: they are the common initial one. Those of clients held out of training never are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from coterie import randomness
from coterie.algorithms.base import (
    Ask,
    Batch,
    ClientContext,
    Cohort,
    Fold,
    FullPass,
    Message,
    Round,
    Start,
    State,
    Task,
    Weights,
)
from coterie.algorithms.local_training import LocalTraining, ProximalTraining
from coterie.algorithms.server_math.fomo import fomo_weights
from coterie.algorithms.server_math.robust import mean
from coterie.rows import Rows, put_rows, take_rows


@dataclass(frozen=True)
class FirstOrderTraining(ProximalTraining):
    """Evaluates the received models on validation samples, moves towards the better ones, then trains."""

    references: ClassVar[Mapping[str, str | None]] = {"w": None, "raw": None}
    per_row: ClassVar[tuple[str, ...]] = ("prox",)
    outside_steps: ClassVar[tuple[str, ...]] = ("from_own", "reply")

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Set all losses to zero."""
        candidates = message["candidates"]
        loss = torch.zeros(len(candidates), dtype=torch.float64, device=candidates.device)
        losses = loss.unsqueeze(1).repeat(1, candidates.shape[1])
        return {"w": state["w"], "candidates": candidates, "own_loss": loss, "losses": losses}

    def judge(self, work: Rows, batch: Batch) -> Rows:
        """Add up the losses of the client's own model and of the candidates."""
        losses = [batch.loss(model) for model in (work["w"], *work["candidates"].unbind(1))]
        own, *others = [batch.share.double() * loss for loss in losses]
        added = torch.stack(others, 1) if others else torch.zeros_like(work["losses"])
        return work | {"own_loss": work["own_loss"] + own, "losses": work["losses"] + added}

    def move(self, context: ClientContext, work: Rows) -> Rows:
        """Weigh the candidates and move towards them."""
        own, candidates = work["w"], work["candidates"].unbind(1)
        away = [torch.linalg.vector_norm(model - own, dim=1, dtype=torch.float64) for model in candidates]
        distances = torch.stack(away, 1) if away else torch.zeros_like(work["losses"])
        weights, raw = fomo_weights(work["own_loss"], work["losses"], distances)
        moved = own.clone()  # the steps that follow may write to it
        for model, weight in zip(candidates, weights.to(own.dtype).unsqueeze(2).unbind(1), strict=True):
            # A model that diverged has weight 0, and 0 times infinity is not a number.
            moved = moved + torch.where(weight > 0, weight * (model - own), 0.0)
        return {"w": moved, "raw": raw.to(own.dtype), **self.optimiser.init(context, moved)}

    def folds(self) -> tuple[Fold, ...]:
        """Judge and move, then train."""
        return Fold(FullPass("validation"), self.judge, self.move), *super().folds()

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """Keep the trained model, and send it with the weights."""
        changes, reply = super().finish(context, work)
        return changes, reply | {"raw": work["raw"]}


class FedFomo(LocalTraining):
    """Each client moves towards those of the models it is sent that lower its own validation loss, then trains."""

    name: ClassVar[str] = "fedfomo"
    title: ClassVar[str] = "FedFomo"
    citation: ClassVar[str] = "Zhang et al., ICLR 2021"
    has_global: ClassVar[bool] = True
    derived_global: ClassVar[bool] = True

    candidates: int = Field(5, ge=1, description="models M that a client is sent in a round")
    epsilon: float = Field(0.3, ge=0, le=1, description="probability, in round 1, of sending any models")
    epsilon_decay: float = Field(0.05, ge=0, le=1, description="what is taken off that probability after each round")

    def init(self, start: Start) -> tuple[State, Rows]:
        """Start with every client's last model, and no affinities, at the server."""
        affinity = start.rows(torch.zeros(start.clients, dtype=torch.float64, device=start.row.device))
        seen = torch.zeros(start.clients, dtype=torch.bool, device=start.row.device)
        members = torch.arange(start.clients, device=start.row.device) if start.members is None else start.members
        server = {"w": start.rows(), "affinity": affinity, "seen": seen, "members": members}
        return server, {"w": start.rows()}

    def tasks(self) -> dict[str, Task]:
        """Return the client's half: judge, move, train."""
        return {"train": FirstOrderTraining(self.stepper, self.minibatches)}

    def choose(self, server: State, cohort: Cohort) -> Tensor:
        """Choose whose models each client is sent."""
        epsilon = max(0.0, self.epsilon - self.epsilon_decay * (cohort.round - 1))
        key = randomness.keys(cohort.seed, "candidates", cohort.round, cohort.clients)
        drawn = randomness.uniform(key, cohort.total + 1)
        explores, order = drawn[:, :1] < epsilon, drawn[:, 1:].argsort(1)
        value = take_rows(server["affinity"], cohort.clients).masked_fill(explores, 0.0)
        value = value.masked_fill(~server["seen"], -1.0)
        members = server["members"]  # a client that is held out of training has no model of its own to send
        value = torch.full_like(value, -torch.inf).index_copy(1, members, value[:, members])
        value = value.scatter(1, cohort.clients.unsqueeze(1), -torch.inf)
        # A stable sort of shuffled columns: the largest first, equal ones in random order.
        best = value.gather(1, order).argsort(dim=1, descending=True, stable=True)
        count = min(self.candidates, len(members) - int(torch.isin(cohort.clients, members).any()))
        return order.gather(1, best[:, :count]).sort(1).values

    def round(self, server: State, cohort: Cohort) -> Round:
        """Send each client its candidates, and keep the models and weights that come back."""
        w, affinity = server["w"], server["affinity"]
        chosen = self.choose(server, cohort)
        replies = yield Ask("train", Message(each={"candidates": take_rows(w, chosen)}))
        clients, chosen = replies.clients, chosen[cohort.among(replies.clients)]
        # Whatever a client claims, it has helped or it has not.
        raw = replies["raw"].double().nan_to_num(0.0, 0.0, 0.0).clamp_min(0.0)
        total = raw.sum(1, keepdim=True)
        weights = torch.zeros(len(clients), cohort.total, dtype=raw.dtype, device=raw.device)
        weights = weights.scatter(1, chosen, torch.where(total > 0, raw / total, 0.0))
        weights = weights.scatter(1, clients.unsqueeze(1), 1 - weights.sum(1, keepdim=True))
        new = {
            "w": put_rows(w, clients, replies["w"]),
            "affinity": put_rows(affinity, clients, take_rows(affinity, clients).scatter_add(1, chosen, raw)),
            "seen": put_rows(server["seen"], clients, torch.ones_like(clients)),
            "members": server["members"],
        }
        return new, {"weights": Weights(weights, clients, torch.arange(cohort.total, device=w.device))}

    def global_model(self, server: State) -> Rows | None:
        """Return the mean of the models of all who took part, which is derived: the method has no global model."""
        seen = server["seen"]
        return {"w": mean(server["w"], torch.where(seen.any(), seen, True))}
