"""Ditto: personal models held to the global one.

Li, Hu, Beirami and Smith, "Ditto: fair and robust federated learning through personalization", ICML 2021.

::

    client i ∈ S:   w_i ← E epochs of SGD on f_i, starting from w
                    v_i ← E_v epochs of  v ← v − η_v (∇f_i(v; batch) + λ (v − w)),  starting from its own v_i
    server:         w ← Σ_{i∈S} p_i w_i

``w`` is the global model that the client received. The personal models are ``v_i``, the global model is ``w``, which
is FedAvg's whatever λ is.

Departures from the paper

- C-F19: the client's copy of the global model starts from ``w`` in every round; in a published comparison it did not.
- ``E_v`` and ``η_v`` are E and η unless given. The paper's program takes ``personal_epochs=2`` and λ among .1, 1 and 2.
- ``local_steps`` counts the steps of ``w_i`` instead of E: with 1, both ``w_i`` and ``w`` change once a round, as in
  FLAME's comparison.

Added to the paper: ``newcomers="global"`` lets the personal model of a client that comes when others have trained begin
at the global one. With ``"initial"`` it begins, as everybody's does before the first round, at the initial model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator

from coterie.algorithms.base import (
    Ask,
    Batch,
    ClientContext,
    Cohort,
    Fold,
    Message,
    Minibatches,
    Round,
    Start,
    State,
    Task,
)
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.local_training import ANEW, Optimiser, ProximalTraining, refuse_unstable
from coterie.rows import Rows


@dataclass(frozen=True, kw_only=True)
class DittoTraining(ProximalTraining):
    """FedAvg's training, then epochs of the client's own ``v`` with a proximal term to the model it received.

    The client's state holds ``v``; the message and the reply hold ``w``.

    Parameters
    ----------
    personal_optimiser
        How ``v`` steps.
    personal_data
        Which minibatches it sees.
    lam
        Weight λ of its proximal term.
    """

    per_row: ClassVar[tuple[str, ...]] = ("prox", "lam")
    outside_steps: ClassVar[tuple[str, ...]] = ("from_own", "reply", "data.epochs", "personal_data.epochs")

    personal_optimiser: Optimiser
    personal_data: Minibatches
    lam: float

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Start both models."""
        v = state["v"]
        if ANEW in message:
            v = torch.where(message[ANEW] > 0, message["w"], v)
        rows = self.personal_optimiser.init(context, v, "personal ")
        ours = v.clone(memory_format=torch.contiguous_format)  # steps are taken in place
        return super().start(context, state, message) | {"v": ours, "received": message["w"], **rows}

    def personal_step(self, work: Rows, batch: Batch) -> Rows:
        """Take one step of ``v``."""
        gradient = batch.measuring("v").grad(work["v"])
        return work | self.personal_optimiser.step_(work, "v", gradient, self.lam, "received", "personal ")

    def folds(self) -> tuple[Fold, ...]:
        """Make a pass for each of the two models."""
        return (*super().folds(), Fold(self.personal_data, self.personal_step))

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """Keep ``v_i`` and send ``w_i``."""
        return {"v": work["v"]}, {"w": work["w"]}


class Ditto(FedAvg):
    """FedAvg, and beside it a model for each client that is held to the global one while it trains."""

    name: ClassVar[str] = "ditto"
    title: ClassVar[str] = "Ditto"
    citation: ClassVar[str] = "Li et al., ICML 2021"
    own_statistics: ClassVar[str | None] = "v"

    lam: float = Field(1.0, ge=0, description="weight λ of the proximal term that holds a personal model to the global")
    personal_epochs: int | None = Field(
        None, ge=1, le=Minibatches.MOST, description="epochs of the personal model; local_epochs if not given"
    )
    personal_lr: float | None = Field(None, ge=0, description="learning rate of the personal model; lr if not given")
    local_steps: int | None = Field(
        None,
        ge=1,
        le=Minibatches.MOST,
        description="minibatches of the global model in a round, instead of local_epochs",
    )
    newcomers: Literal["initial", "global"] = Field(
        "global",
        description="where the personal model begins of a client that comes when others have trained: at the initial "
        "model (as in the paper), or at the global one",
    )

    @model_validator(mode="after")
    def _stable(self) -> Ditto:
        given = self.personal_lr is not None
        refuse_unstable(self._personal_lr, self.lam, self.optimiser, "lam", "personal_lr" if given else "lr")
        return self

    @property
    def _personal_lr(self) -> float:
        return self.lr if self.personal_lr is None else self.personal_lr

    def init(self, start: Start) -> tuple[State, Rows]:
        """Start every model at the initial one."""
        return {"w": start.row}, {"v": start.rows()}

    def tasks(self) -> dict[str, Task]:
        """Return the training of both models."""
        task = DittoTraining(
            self.stepper,
            Minibatches(self.batch_size, self.local_epochs, steps=self.local_steps),
            personal_optimiser=replace(self.stepper, lr=self._personal_lr),
            personal_data=Minibatches(self.batch_size, self.personal_epochs or self.local_epochs),
            lam=self.lam,
        )
        return {"train": task}

    def welcome(self, server: State, cohort: Cohort) -> Round:
        """Play the first round of newcomers, as ``newcomers`` says."""
        return self.round(server, cohort) if self.newcomers == "initial" else self._welcomed(server, cohort)

    @property
    def settles(self) -> bool:
        """Whether newcomers begin elsewhere than clients before the first round."""
        return self.newcomers != "initial"

    def _welcomed(self, server: State, cohort: Cohort) -> Round:
        w = server["w"]
        replies = yield Ask("train", Message(shared={"w": w, ANEW: w.new_ones(1)}))
        return {"w": self.join(replies["w"], cohort.shares(replies.clients))}, self.standing(len(replies))

    def personal(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Return ``v_i``."""
        return {"w": state["v"]}
