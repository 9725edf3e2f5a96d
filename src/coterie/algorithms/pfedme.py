"""pFedMe: personal models by Moreau envelopes.

T. Dinh, Tran and Nguyen, "Personalized federated learning with Moreau envelopes", NeurIPS 2020.

A client's loss is the envelope ``F_i(w) = min_θ f_i(θ) + (λ/2) |θ − w|²``, whose gradient is ``λ (w − θ_i(w))``. Each
round::

    client i ∈ S:   w_i ← w;  then R local rounds, each on one minibatch:
                        K times  θ_i ← θ_i − η_p (∇f_i(θ_i; batch) + λ (θ_i − w_i))
                        w_i ← w_i − η λ (w_i − θ_i)
    server:         w ← (1 − β) w + β mean_{i∈S} w_i

The personal models are ``θ_i``, the global model is ``w``.

Departures from the paper

- ``θ_i`` goes on from where it was in the client's last round (``begin="own"``); ``begin="global"`` starts it at ``w``
  in every round, as the authors' program does.
- Absent clients do not train; in the authors' program they do, and only the averaging is among a few.
- ``moves="round"`` moves ``w_i`` once, after the last minibatch: as often as FLAME moves its copy. With everybody in
  each round, one inner step and ``η = α/(λα + ρ)`` that is FLAME with duals of zero and the global model as its centre.
- R is the number of minibatches in ``local_epochs`` epochs unless ``local_rounds`` is given. The paper's values are
  ``local_rounds=20, inner_steps=5, lam=15, eta=0.005, lr=0.09, batch_size=20`` over 800 rounds, its program adds
  ``weight_decay=0.001``. The default step ``eta`` is larger, so that the global model moves within tens of rounds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

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
from coterie.algorithms.local_training import GlobalTraining, Optimiser, refuse_unstable
from coterie.algorithms.row_numbers import fitting
from coterie.rows import Rows


@dataclass(frozen=True)
class EnvelopeTraining(Task):
    """Local rounds on the Moreau envelope: inner steps of ``θ`` on one minibatch, then a step of ``w``.

    The client's state holds ``theta``; the message and the reply hold ``w``.

    Parameters
    ----------
    optimiser
        How ``θ`` steps.
    data
        Which minibatches, one a local round, and how often ``θ`` steps on each: K times.
    lam
        Weight λ of the proximal term.
    eta
        Step η of ``w``.
    from_own
        Start ``θ`` where the client left it instead of at the message's ``w``.
    once
        Step ``w`` once, after the last minibatch, instead of after each.
    """

    per_row: ClassVar[tuple[str, ...]] = ("lam", "eta")
    outside_steps: ClassVar[tuple[str, ...]] = ("from_own", "data.epochs")

    optimiser: Optimiser
    data: Minibatches
    lam: float
    eta: float
    from_own: bool = True
    once: bool = False

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Start at the global model, and ``θ`` at the client's own or there too."""
        theta = (state["theta"] if self.from_own else message["w"]).clone(memory_format=torch.contiguous_format)
        return {"w": message["w"], "theta": theta, **self.optimiser.init(context, theta)}

    def step(self, work: Rows, batch: Batch) -> Rows:
        """Take one local round on its minibatch."""
        for _ in range(self.data.repeats):
            gradient = batch.grad(work["theta"])
            work = work | self.optimiser.step_(work, "theta", gradient, self.lam, "w")
        return work if self.once else work | {"w": self.moved(work)}

    def moved(self, work: Rows) -> Tensor:
        """Return ``w`` after its step."""
        return work["w"] - fitting(self.eta * self.lam, work["w"]) * (work["w"] - work["theta"])

    def folds(self) -> tuple[Fold, ...]:
        """Make one pass, with a local round for each minibatch."""
        return (Fold(self.data, self.step),)

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """Keep ``θ_i`` and send ``w_i``."""
        return {"theta": work["theta"]}, {"w": self.moved(work) if self.once else work["w"]}


class PFedMe(GlobalTraining):
    """A global model that descends the clients' Moreau envelopes, and their minimisers as personal models."""

    name: ClassVar[str] = "pfedme"
    title: ClassVar[str] = "pFedMe"
    citation: ClassVar[str] = "T. Dinh et al., NeurIPS 2020"

    local_epochs: int = Field(
        3, ge=1, le=Minibatches.MOST, description="passes over the client's training samples in a round"
    )
    batch_size: int = Field(20, ge=0, description="samples in a minibatch; 0 means all")
    lr: float = Field(0.05, ge=0, description="learning rate of the personal models")
    lam: float = Field(
        15.0, ge=0, description="weight λ of the proximal term that holds a personal model to the global"
    )
    inner_steps: int = Field(5, ge=1, le=Minibatches.MOST, description="steps of the personal model on each minibatch")
    local_rounds: int | None = Field(
        None,
        ge=1,
        le=Minibatches.MOST,
        description="minibatches that a client takes in a round, instead of local_epochs",
    )
    eta: float = Field(0.05, ge=0, description="step of the client's copy of the global model")
    beta: float = Field(1.0, ge=0, description="how far the server goes to the mean of the clients' copies")
    begin: Literal["own", "global"] = Field("own", description="where the personal model starts in a round")
    moves: Literal["minibatch", "round"] = Field(
        "minibatch", description="move the client's copy of the global model after each minibatch, or once a round"
    )

    @model_validator(mode="after")
    def _stable(self) -> PFedMe:
        refuse_unstable(self.lr, self.lam, self.optimiser, "lam")
        refuse_unstable(self.eta, self.lam, name="lam", rate="eta")
        return self

    def init(self, start: Start) -> tuple[State, Rows]:
        """Start every model at the initial one."""
        return {"w": start.row}, {"theta": start.rows()}

    def tasks(self) -> dict[str, Task]:
        """Return the task of local rounds."""
        data = Minibatches(self.batch_size, self.local_epochs, steps=self.local_rounds, repeats=self.inner_steps)
        own, once = self.begin == "own", self.moves == "round"
        return {"train": EnvelopeTraining(self.stepper, data, self.lam, self.eta, own, once)}

    def round(self, server: State, cohort: Cohort) -> Round:
        """Broadcast, train, and move towards the mean."""
        w = server["w"]
        replies = yield Ask("train", Message(shared={"w": w}))
        return {"w": (1 - self.beta) * w + self.beta * replies["w"].mean(0)}, {}

    def personal(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Return ``θ_i``."""
        return {"w": state["theta"]}
