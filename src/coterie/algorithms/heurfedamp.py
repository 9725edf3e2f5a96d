"""HeurFedAMP: attentive message passing with cosine attention.

Huang, Chu, Zhou, Wang, Liu, Pei and Zhang, "Personalized cross-silo federated learning on non-IID data", AAAI 2021.

As FedAMP, but with a fixed self weight and a softmax of cosines, which do not fade in high dimension::

    server:    ξ_ij = (1 − ξ_ii) · exp(σ cos(w_i, w_j)) / Σ_{h≠i} exp(σ cos(w_i, w_h))   (j ≠ i)     (Eq. 9)
               u_i = Σ_j ξ_ij w_j
    client i:  w_i ← E epochs on F_i(w) + (λ/2α) |w − u_i|²

Departures from the paper: those of FedAMP that concern the local step (C-A4, C-A7); the published self weight
``1/(N_i + 1)``, with N_i the clients that share i's distribution, needs knowledge that a server does not have, so
``self_weight`` is given: one number, or one for each client.

Added to the paper: ``newcomers`` and ``returning``, as in FedAMP.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from coterie.algorithms.base import Cohort, Info, State
from coterie.algorithms.fedamp import MessagePassing
from coterie.algorithms.server_math.attention import heurfedamp_weights
from coterie.errors import ConfigError

Unit = Annotated[float, Field(ge=0, le=1)]


class HeurFedAMP(MessagePassing):
    """FedAMP with a fixed self weight and a softmax of cosines."""

    name: ClassVar[str] = "heurfedamp"
    title: ClassVar[str] = "HeurFedAMP"
    citation: ClassVar[str] = "Huang et al., AAAI 2021"

    sigma: float = Field(100.0, ge=0, description="sharpness σ of the softmax of cosines")
    self_weight: Unit | list[Unit] = Field(0.1, description="self weight ξ_ii, one for all or one for each client")

    def attention(self, w: Tensor, members: Tensor, cohort: Cohort) -> tuple[Tensor, State, Info]:
        """Weigh by a softmax of cosines."""
        own: float | Tensor
        if isinstance(self.self_weight, list):
            if len(self.self_weight) != cohort.total:
                raise ConfigError(
                    f"self_weight has {len(self.self_weight)} entries: give one number, or one for each of the "
                    f"{cohort.total} clients"
                )
            own = torch.tensor(self.self_weight, dtype=torch.float64, device=w.device)
        else:
            own = self.self_weight
        xi = heurfedamp_weights(w, self.sigma, own, rows=cohort.clients, speakers=members)
        return xi, {}, {}
