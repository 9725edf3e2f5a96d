"""FedMGDA+: a common descent direction from normalised updates.

Hu, Shaloudegi, Zhang and Yu, "Federated learning meets multi-objective optimization", IEEE TNSE 2022.

::

    client i ∈ S:   w_i ← E epochs of SGD on f_i, starting from w
    server:         D_i = w − w_i,    z_i = D_i / |D_i|
                    λ = argmin |Σ λ_i z_i|²   over   Σ λ_i = 1, λ ≥ 0, |λ_i − λ⁰_i| ≤ ε,    λ⁰_i = N_i / Σ N_k
                    w ← w − η_g Σ λ_i z_i

``ε = 0`` is FedAvg on normalised updates; ``ε = 1`` is multiple gradient descent (MGDA), the only case in which the
direction serves every client. The global model is ``w``; a client's personal model is its ``w_i`` of its last
participation.

Departures from the paper: a client whose update is zero has no direction, and is left out of the round. Normalised
updates do not shrink as training proceeds; ``server_lr_decay`` shrinks the server's step instead.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from coterie.algorithms.base import Ask, Cohort, Message, Round, State, Weights
from coterie.algorithms.local_training import GlobalTraining
from coterie.algorithms.server_math.common_descent import rescale
from coterie.algorithms.server_math.min_norm import min_norm_point_in_box
from coterie.rows import gram, mix


class FedMGDA(GlobalTraining):
    """One global model that moves along a mixture of normalised updates that conflicts with none, or few."""

    name: ClassVar[str] = "fedmgda"
    title: ClassVar[str] = "FedMGDA+"
    citation: ClassVar[str] = "Hu et al., IEEE TNSE 2022"

    eps: float = Field(0.1, ge=0, le=1, description="how far weights may lie from the clients' shares of samples")
    server_lr: float = Field(1.0, ge=0, description="length η_g of the server's step along normalised updates")
    server_lr_decay: float = Field(1.0, gt=0, le=1, description="factor on the server's step after each round")

    def round(self, server: State, cohort: Cohort) -> Round:
        """Broadcast, train, weigh, step."""
        w = server["w"]
        replies = yield Ask("train", Message(shared={"w": w}))
        updates = w - replies["w"]
        factors, _ = rescale(updates, 1.0, smallest=0.0)
        kept = factors > 0
        clients, updates, factors = replies.clients[kept], updates[kept], factors[kept]
        if not len(clients):
            return {"w": w}, {}
        centre = cohort.shares(clients)
        low, high = (centre - self.eps).clamp_min(0), (centre + self.eps).clamp_max(1)
        lam = min_norm_point_in_box(gram(updates) * factors * factors.unsqueeze(1), low, high)
        step = self.server_lr * self.server_lr_decay ** (cohort.round - 1)
        weights = Weights(lam.expand(len(lam), -1), clients, clients)
        return {"w": w - step * mix(lam * factors, updates)}, {"weights": weights}
