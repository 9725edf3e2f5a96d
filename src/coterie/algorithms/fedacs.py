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

Added to the paper, which speaks of neither

- ``newcomers``: a client that comes when others have trained begins at the mean of the members' models (``"mean"``), or
  trains from there and then from its own mixture (``"mixture"``), either with the work of five rounds, averaged
  (``"averaged"``). ``"initial"`` is the method as printed: it begins at the initial model and hears those alone who
  join with it.
- ``returning="mixture"``: ``a_ij ← a_ij φ_j / Σ_l a_il φ_l`` over the last models of all who ever replied, with the
  freshness ``φ_j = γ^(k* − k_j)`` of :mod:`~coterie.algorithms.last_models`. ``"own"`` is the method as printed; where
  everybody takes part in every round the two are the same, bit for bit.
- For both, ``δ`` is taken for a newcomer and for a client that was away in its own row, over the others that it may
  hear, and admits its value: ``M_ij = (j = i) or (s_ij ≥ δ_i and s_ij > 0)``. Measured by all pairs, a model so young
  or so old is like nobody's.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.algorithms.base import Ask, Cohort, Message, Round, Start, State, Task, Weights
from coterie.algorithms.last_models import Attendance, LastModels, attended, heard_by_themselves
from coterie.algorithms.server_math.attention import fedacs_weights
from coterie.rows import Rows, mix, put_rows, take_rows


class FedACS(LastModels):
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
        return {"w": start.rows(), "members": members, **self.attending(start)}, {"w": start.rows()}

    def tasks(self) -> dict[str, Task]:
        """Return plain training from the averaged model."""
        return self.trainings()

    def played(self, server: State, cohort: Cohort, task: str) -> Round:
        """Select and average for each client, and send each client its own average."""
        w, clients, members = server["w"], cohort.clients, server["members"]
        known, outside = self.attendance(server, clients), self.outsiders(server, clients)
        if self.pool == "all" or known is not None or outside is not None:
            pool, models, a = self._among_more(server, clients, known, outside)
        else:
            pool, models = clients, take_rows(w, clients)
            a = fedacs_weights(models, self.p, offdiag=self.offdiag)
        replies = yield Ask(task, Message(each={"w": mix(a, models)}))
        new = {"w": put_rows(w, replies.clients, replies["w"]), "members": members}
        return new | attended(server, replies.clients, cohort.round), {"weights": Weights(a, clients, pool)}

    def _among_more(
        self, server: State, clients: Tensor, known: Attendance | None, outside: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Weigh more models than the cohort's: give whose they are, the models, and the cohort's weights."""
        w, members = server["w"], server["members"]
        speakers = members if known is None else members[known.speaks[members]]
        pool = torch.cat([speakers, clients]).unique()
        models, places = take_rows(w, pool), torch.searchsorted(pool, clients)
        factors = None if known is None else known.freshness[pool].expand(len(pool), -1)
        apart = torch.zeros_like(clients, dtype=torch.bool) if known is None else known.away
        if outside is not None:  # newcomers, who would hear one another alone
            none = torch.ones(len(pool), len(pool), dtype=torch.float64, device=w.device)
            factors = heard_by_themselves(none if factors is None else factors, places[outside])
            apart = apart | outside
        a = fedacs_weights(models, self.p, offdiag=self.offdiag, apart=places[apart], factors=factors)[places]
        if known is not None and self.settles:
            a[known.unknown] = self.shares(server, known)[pool]
        return pool, models, a

    def global_model(self, server: State) -> Rows | None:
        """Return the mean of the members' personal models, which is derived: the method has no global model."""
        w, members = server["w"], server["members"]
        share = w.new_zeros(len(w)).index_fill(0, members, 1 / len(members))
        return {"w": mix(share, w)}
