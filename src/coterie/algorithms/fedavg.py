"""FedAvg: federated averaging.

McMahan, Moore, Ramage, Hampson and Agüera y Arcas, "Communication-efficient learning of deep networks from
decentralized data", AISTATS 2017.

::

    client i ∈ S:   w_i ← E epochs of SGD on f_i, starting from w
    server:         w ← Σ_{i∈S} p_i w_i,    p_i = N_i / Σ_{k∈S} N_k

The global model is ``w``. A client's personal model is its ``w_i`` of its last participation, before aggregation.

Departures from the paper: none. The shares ``p_i`` are taken anew each round over those that replied; ``aggregator``
offers robust means in place of the weighted one. Replies may be lost at any time, and that must not end a run: where
too few are left for ``byzantine``, as many are assumed malicious as can be, and the round reports ``guaranteed = 0``.
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from coterie.algorithms.base import Ask, Cohort, Info, Message, Round, State
from coterie.algorithms.local_training import GlobalTraining
from coterie.algorithms.server_math.robust import aggregate, mean, tolerated
from coterie.errors import ConfigError

_WITHOUT_F = ("mean", "median")


class FedAvg(GlobalTraining):
    """One global model: the average of locally trained copies."""

    name: ClassVar[str] = "fedavg"
    title: ClassVar[str] = "FedAvg"
    citation: ClassVar[str] = "McMahan et al., AISTATS 2017"

    aggregator: Literal["mean", "median", "trimmed_mean", "krum", "multi_krum"] = Field(
        "mean", description="how the server joins the clients' models"
    )
    byzantine: int = Field(0, ge=0, description="clients assumed malicious in a round, for the robust aggregators")

    @model_validator(mode="after")
    def _byzantine_has_a_use(self) -> FedAvg:
        if self.byzantine and self.aggregator in _WITHOUT_F:
            raise ValueError(f"byzantine={self.byzantine} has no effect with aggregator={self.aggregator}")
        return self

    def check_clients(self, count: int) -> None:
        """Refuse an assumption that no round could meet."""
        most = tolerated(self.aggregator, count)
        if self.byzantine > most:
            raise ConfigError(
                f"byzantine is {self.byzantine}, but {self.aggregator} of {count} clients withstands at most {most} "
                "malicious among them: assume fewer, or use more clients"
            )

    def round(self, server: State, cohort: Cohort) -> Round:
        """Broadcast, train, average."""
        replies = yield Ask("train", Message(shared={"w": server["w"]}))
        return {"w": self.join(replies["w"], cohort.shares(replies.clients))}, self.standing(len(replies))

    def join(self, models: Tensor, shares: Tensor) -> Tensor:
        """Join the clients' models into one."""
        if self.aggregator in _WITHOUT_F:
            return aggregate(self.aggregator, models, shares)
        if len(models) < 3 and self.aggregator != "trimmed_mean":
            return mean(models)  # Krum has nothing to choose by
        return aggregate(self.aggregator, models, shares, f=self._assumed(len(models)))

    def joined_statistics(self, statistics: Tensor, shares: Tensor) -> Tensor:
        """Join running statistics as models are joined."""
        return self.join(statistics, shares)

    def standing(self, count: int) -> Info:
        """Return what a robust aggregator could guarantee in a round."""
        if self.aggregator in _WITHOUT_F:
            return {}
        assumed = self._assumed(count)
        return {
            "hostile": torch.tensor(float(assumed)),
            "guaranteed": torch.tensor(float(assumed == self.byzantine)),
        }

    def _assumed(self, count: int) -> int:
        return min(self.byzantine, tolerated(self.aggregator, count))
