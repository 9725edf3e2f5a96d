"""Multi-Krum: federated averaging of the models that lie close to many others.

Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine learning with adversaries: Byzantine tolerant gradient descent",
NeurIPS 2017.

::

    client i ∈ S:   w_i ← E epochs of SGD on f_i, starting from w
    server:         score_i = Σ |w_i − w_j|² over the s − f − 2 others j nearest to i,    s = |S|
                    w ← mean of the s − f models with the lowest scores

The number ``f`` of clients that may be hostile is a fraction of those that replied, rounded down. The global model is
``w``; a client's personal model is its ``w_i`` of its last participation.

Departures from the paper: models are compared rather than gradients, which is the same up to the common ``w``. The
guarantee needs ``2f + 2 < s``; a fraction of at most 0.2 always gives it. Beyond it the method still runs, with ``f``
kept at ``s − 3`` or below, and the round reports ``guaranteed = 0``: replies may be lost at any time, and that must not
end a run.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from coterie.algorithms.base import Ask, Cohort, Message, Round, State
from coterie.algorithms.local_training import GlobalTraining
from coterie.algorithms.server_math.robust import aggregate, multi_krum


class MultiKrum(GlobalTraining):
    """FedAvg that leaves out the models that lie far from the others."""

    name: ClassVar[str] = "multi_krum"
    title: ClassVar[str] = "multi-Krum"
    citation: ClassVar[str] = "Blanchard et al., NeurIPS 2017"

    fraction: float = Field(0.2, ge=0, lt=1, description="fraction of a round's clients that may be hostile")
    select: int | None = Field(None, ge=1, description="how many models to average; all but the hostile if not given")

    def round(self, server: State, cohort: Cohort) -> Round:
        """Broadcast, train, average the models that agree."""
        replies = yield Ask("train", Message(shared={"w": server["w"]}))
        count = len(replies)
        hostile = min(self.hostile(count), max(count - 3, 0))
        chosen = None if self.select is None or count < 3 else min(self.select, count)
        w = multi_krum(replies["w"], hostile, select=chosen, strict=False)
        guaranteed = float(2 * hostile + 2 < count and hostile == self.hostile(count))
        return {"w": w}, {"hostile": torch.tensor(float(hostile)), "guaranteed": torch.tensor(guaranteed)}

    def joined_statistics(self, statistics: Tensor, shares: Tensor) -> Tensor:
        """Take the median of each running statistic, which few hostile clients cannot move far."""
        return aggregate("median", statistics, shares)

    def hostile(self, count: int) -> int:
        """Return how many of ``count`` clients may be hostile."""
        # A fraction such as 0.29 lies a little below its decimal, and 0.29 · 100 below 29.
        return int(self.fraction * count + 1e-9)
