"""FedAMP: attentive message passing.

Huang, Chu, Zhou, Wang, Liu, Pei and Zhang, "Personalized cross-silo federated learning on non-IID data", AAAI 2021.

The problem is ``G(W) = Σ_i F_i(w_i) + λ Σ_{i<j} A(|w_i − w_j|²)`` with ``A(x) = 1 − exp(−x/σ)``. Each round::

    server:    ξ_ij = α A'(|w_i − w_j|²) = κ exp(−|w_i − w_j|² / σ)   (j ≠ i),   ξ_ii = 1 − Σ_{j≠i} ξ_ij
               u_i = Σ_j ξ_ij w_j                                                               (Eq. 5, 7)
    client i:  w_i ← E epochs on F_i(w) + (λ/2α) |w − u_i|²,  gradient ∇F_i(w) + prox (w − u_i)   (Eq. 6)

in the two numbers that matter, ``κ = α/σ`` (``kappa``) and ``prox = λ/α`` (``prox``). An absent client's last model
still speaks to the others. A client that is held out of training listens once it joins, but nobody listens to it.

Departures from the paper

- C-A1: Eq. 5 omits the factor 2 of the gradient; kept as printed, so ``U = W − (α/2) ∇A(W)``.
- C-A3: "small α" is not enforced by the paper; here a row whose weights for others exceed ``1 − xi_min`` is scaled
  down to that, and the round reports how many were (``guard``).
- C-A4: the local problem is solved by ``local_epochs`` epochs starting at the client's own model (``begin="own"``) or
  at its cloud model (``begin="cloud"``).
- C-A7: all clients start from one common model (``common_start``).
- The experiments' values are not published. By default σ is the median squared distance between two clients' models,
  taken anew each round, and κ = 2/m; both count those clients only that take part in training.

Added to the paper, which speaks of neither, here and in HeurFedAMP

- ``newcomers``: a client that comes when others have trained begins at the mean of the members' models and is held to
  it (``"mean"``), and then plays a round of the method (``"mixture"``), either with the work of five rounds, averaged
  (``"averaged"``), by which it comes nearer to the minimum of Eq. 6. ``"initial"`` is the method as printed.
- ``returning="mixture"``: ``ξ_ij ← ξ_ij φ_j / Σ_l ξ_il φ_l`` with the freshness ``φ_j = γ^(k* − k_j)`` of
  :mod:`~coterie.algorithms.last_models`, and a client that was away starts from its cloud model, whatever ``begin``
  says. ``"own"`` is the method as printed; where everybody takes part in every round the two are the same, bit for bit.
"""

from __future__ import annotations

import abc
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from coterie.algorithms.base import Ask, Cohort, Info, Message, Round, Start, State, Task, Weights
from coterie.algorithms.last_models import LastModels, attended, reweighed
from coterie.algorithms.local_training import ANEW, refuse_unstable
from coterie.algorithms.server_math.attention import fedamp_weights, median_squared_distance
from coterie.rows import Rows, distances_from, mix, put_rows, squared_distances


class MessagePassing(LastModels):
    """What FedAMP and HeurFedAMP share: a cloud model for each client, and proximal training towards it."""

    prox: float = Field(1.0, ge=0, description="weight λ/α of the proximal term that holds a client to its cloud model")
    begin: Literal["own", "cloud"] = Field("own", description="where local training starts")
    common_start: bool = Field(True, description="start all clients from one model, rather than each from its own")

    @model_validator(mode="after")
    def _stable(self) -> MessagePassing:
        refuse_unstable(self.lr, self.prox, self.optimiser)
        return self

    def init(self, start: Start) -> tuple[State, Rows]:
        """Start with every client's last model and cloud model at the server."""
        w, u, own = (start.rows() for _ in range(3))
        if not self.common_start:
            fresh = torch.stack([start.fresh(client) for client in range(start.clients)])
            everyone = torch.arange(start.clients, device=fresh.device)
            w, u, own = (put_rows(rows, everyone, fresh) for rows in (w, u, own))
        members = torch.arange(start.clients, device=w.device) if start.members is None else start.members
        return {"w": w, "u": u, "members": members, **self.attending(start)}, {"w": own}

    def tasks(self) -> dict[str, Task]:
        """Return the training towards the cloud model."""
        return self.trainings(self.prox, from_own=self.begin == "own")

    @abc.abstractmethod
    def attention(self, w: Tensor, members: Tensor, cohort: Cohort) -> tuple[Tensor, State, Info]:
        """Return the weights of the members for each client of the cohort, new state, and what to record."""

    def played(self, server: State, cohort: Cohort, task: str) -> Round:
        """Make the cloud models, send each client its own, and keep the models that come back."""
        w, clients = server["w"], cohort.clients
        xi, kept, info = self.attention(w, server["members"], cohort)
        known = self.attendance(server, clients)
        if known is not None:
            xi = reweighed(xi, known.freshness)
            if self.settles:
                xi[known.unknown] = self.shares(server, known)
        u = mix(xi, w)
        anew = {} if known is None else {ANEW: known.away.to(u.dtype).unsqueeze(1)}
        replies = yield Ask(task, Message(each={"w": u, **anew}))
        everyone = torch.arange(cohort.total, device=w.device)
        new = {
            "w": put_rows(w, replies.clients, replies["w"]),
            "u": put_rows(server["u"], clients, u),
            "members": server["members"],
            **attended(server, replies.clients, cohort.round),
        }
        return new | kept, {"weights": Weights(xi, clients, everyone), **info}

    def other_models(self, server: State) -> dict[str, Rows]:
        """Return the cloud models."""
        return {"cloud": {"w": server["u"]}}


class FedAMP(MessagePassing):
    """Each client trains towards a mixture of the models most like its own."""

    name: ClassVar[str] = "fedamp"
    title: ClassVar[str] = "FedAMP"
    citation: ClassVar[str] = "Huang et al., AAAI 2021"

    sigma: float | None = Field(None, gt=0, description="scale σ of squared distances; their median if not given")
    kappa: float | None = Field(None, ge=0, description="weight κ = α/σ of an identical model; 2/clients if not given")
    guard: bool = Field(True, description="keep self weights at xi_min or above")
    xi_min: float = Field(0.0, ge=0, le=1, description="least self weight under the guard")

    @model_validator(mode="after")
    def _weights_are_not_negative(self) -> FedAMP:
        if self.returning == "mixture" and not self.guard:
            raise ValueError("guard=false has negative weights, which returning=mixture cannot weigh by freshness")
        return self

    def init(self, start: Start) -> tuple[State, Rows]:
        """Keep the scale σ beside the models."""
        server, clients = super().init(start)
        return server | {"sigma": torch.ones((), dtype=torch.float64, device=start.row.device)}, clients

    def attention(self, w: Tensor, members: Tensor, cohort: Cohort) -> tuple[Tensor, State, Info]:
        """Weigh by ``κ exp(−|w_i − w_j|²/σ)``."""
        mine = cohort.clients
        if self.sigma is None:
            apart = squared_distances(w)
            sigma = median_squared_distance(w, distances=apart[members][:, members])
            own = apart[mine]
        else:
            sigma = torch.tensor(self.sigma, dtype=torch.float64, device=w.device)
            own = distances_from(w, mine)
        kappa = 2 / len(members) if self.kappa is None else self.kappa
        # Who does not speak is infinitely far from everybody.
        heard = torch.full_like(own, torch.inf).index_copy(1, members, own[:, members])
        xi, guarded = fedamp_weights(w, kappa, sigma, self.guard, self.xi_min, rows=mine, distances=heard)
        return xi, {"sigma": sigma}, {"guarded": torch.tensor(float(guarded))}
