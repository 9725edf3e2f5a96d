"""FedACS: attention-based client selection.

Chen, Li and Shen, "Personalized federated learning with attention-based client selection", ICASSP 2024.

A client averages only with clients whose models are similar enough.

Round k, with participants P::

    s_ij = <w_i, w_j> / (|w_i| |w_j|)                         cosine attention, i, j ∈ P
    δ = p-quantile of all s_ij                                threshold
    M_ij = (j = i) or (s_ij > δ and s_ij > 0)                 selection
    a_ij = M_ij s_ij / Σ_l M_il s_il,   u_i = Σ_j a_ij w_j    (Eq. 4)
    client i:  w_i ← E epochs of SGD on F_i, starting from u_i        (Eq. 5 with several steps)

Departures from the paper

- C-S1: the threshold that admits everybody is −∞ (``p = 0``), not +∞.
- C-S2: a client always selects itself; the quantile alone would select nobody for p near 1.
- C-S3: the quantile is over all entries, as printed; ``offdiag=true`` leaves the diagonal out.
- C-S5: weights are normalised over the selected row, and only positive cosines are selected.
- C-S6: attention is among the round's participants; ``pool="all"`` uses the last models of all clients
  that take part in training, in this round or another.
- C-S7: several local epochs, as in the experiments, rather than one step.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field

from coterie.algorithms.base import Ask, Cohort, Message, Round, Start, State, Task, Weights
from coterie.algorithms.local_training import LocalTraining, ProximalTraining
from coterie.algorithms.server_math.attention import fedacs_weights
from coterie.rows import Rows, mix, put_rows, take_rows


class FedACS(LocalTraining):
    """Each client averages with the clients whose models are most similar to its own, then trains."""

    name: ClassVar[str] = "fedacs"
    title: ClassVar[str] = "FedACS"
    citation: ClassVar[str] = "Chen et al., ICASSP 2024"
    has_global: ClassVar[bool] = True
    derived_global: ClassVar[bool] = True

    p: float = Field(0.5, ge=0, lt=1, description="pick ratio: the quantile of cosines above which clients collaborate")
    offdiag: bool = Field(False, description="take the quantile over pairs of different clients only")
    pool: Literal["cohort", "all"] = Field("cohort", description="attend to this round's clients, or to all clients")

    def init(self, start: Start) -> tuple[State, Rows]:
        """Start with every client's last model at the server."""
        members = torch.arange(start.clients, device=start.row.device) if start.members is None else start.members
        return {"w": start.rows(), "members": members}, {"w": start.rows()}

    def tasks(self) -> dict[str, Task]:
        """Return plain training from the averaged model."""
        return {"train": ProximalTraining(self.stepper, self.minibatches)}

    def round(self, server: State, cohort: Cohort) -> Round:
        """Select and average for each client, and send each client its own average."""
        w, clients = server["w"], cohort.clients
        pool = clients if self.pool == "cohort" else torch.cat([server["members"], clients]).unique()
        models = take_rows(w, pool)
        a = fedacs_weights(models, self.p, offdiag=self.offdiag)[torch.searchsorted(pool, clients)]
        replies = yield Ask("train", Message(each={"w": mix(a, models)}))
        new = {"w": put_rows(w, replies.clients, replies["w"]), "members": server["members"]}
        return new, {"weights": Weights(a, clients, pool)}

    def global_model(self, server: State) -> Rows | None:
        """Return the mean of the members' personal models, which is derived: the method has no global model."""
        w, members = server["w"], server["members"]
        share = w.new_zeros(len(w)).index_fill(0, members, 1 / len(members))
        return {"w": mix(share, w)}
