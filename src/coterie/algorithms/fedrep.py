"""FedRep: a shared representation under personal heads.

Collins, Hassani, Mokhtari and Shakkottai, "Exploiting shared representations for personalized federated learning",
ICML 2021.

A model is a body ``φ`` and a head ``h_i``, the weight and the bias of the last layer. Each round::

    client i ∈ S:   h_i ← τ epochs of SGD on f_i(φ, ·), starting from its own h_i, with φ frozen
                    φ_i ← E epochs of SGD on f_i(·, h_i), starting from φ, with h_i frozen
    server:         φ ← (1/|S|) Σ_{i∈S} φ_i

The personal model is ``(φ, h_i)`` with the server's current ``φ``. Heads never leave their client: messages carry the
body's parameters and nothing else. So there is no global model: one would need the mean of the heads.

Departures from the paper

- The head is trained by epochs of minibatches, as in the paper's experiments, rather than to its minimiser, as in its
  analysis. Each part has an optimiser state of its own, made anew each round.
- The mean is over those that replied, all alike, as the paper's algorithm has it; its code weighs by sample counts.
- The default learning rate is ours (the paper's code takes 0.01 for CIFAR).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from coterie.algorithms.base import (
    Ask,
    Batch,
    ClientContext,
    Cohort,
    Fold,
    Message,
    Minibatches,
    Personalise,
    Round,
    Start,
    State,
    Task,
)
from coterie.algorithms.body_and_head import PartsTraining, apply_parts, join_parts, require_parts
from coterie.algorithms.local_training import LocalTraining
from coterie.algorithms.server_math.robust import mean
from coterie.errors import ModelError
from coterie.rows import Rows


@dataclass(frozen=True)
class HeadThenBody(PartsTraining):
    """Epochs on the head with the body frozen, then epochs on the body with the head frozen; the body is sent.

    Parameters
    ----------
    optimiser
        How to step, with either part.
    data
        Minibatches that train the body.
    head_data
        Minibatches that train the head.
    """

    head_data: Minibatches

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Put the client's own head on the server's body."""
        return self.parts(context, body=message["body"], head=state["head"])

    def losses(self, work: Rows, batch: Batch) -> Tensor:
        """Return the loss of head on body."""
        return batch.mean_loss(apply_parts(batch.net, work["body"], work["head"], batch.x, batch.key))

    def folds(self) -> tuple[Fold, ...]:
        """Train the head, then the body."""
        return Fold(self.head_data, self.step_on("head")), Fold(self.data, self.step_on("body"))

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """Keep the head and send the body."""
        return {"head": work["head"]}, {"body": work["body"]}


class FedRep(LocalTraining):
    """One shared body under a head of each client's own, which never leaves it."""

    name: ClassVar[str] = "fedrep"
    title: ClassVar[str] = "FedRep"
    citation: ClassVar[str] = "Collins et al., ICML 2021"

    head_epochs: int = Field(
        10, ge=0, le=Minibatches.MOST, description="passes over the client's samples that train the head"
    )
    local_epochs: int = Field(1, ge=0, le=Minibatches.MOST, description="passes after those that train the body")

    def init(self, start: Start) -> tuple[State, Rows]:
        """Start with a body at the server and a head at each client."""
        require_parts(start, self.title)
        body, head = start.net.columns("body"), start.net.columns("head")
        if not body.size:
            raise ModelError(f"{self.title} shares the body, and this model's has no parameters: use a deeper model")
        if not head.size:
            raise ModelError(f"{self.title} keeps the head with its client by itself: leave head out of local")
        return {"body": body.take(start.row).clone()}, {"head": start.rows(head.take(start.row))}

    def tasks(self) -> dict[str, Task]:
        """Return the training of one part after the other."""
        head_data = Minibatches(self.batch_size, self.head_epochs)
        return {"train": HeadThenBody(self.stepper, self.minibatches, head_data)}

    def round(self, server: State, cohort: Cohort) -> Round:
        """Broadcast the body, train, average."""
        replies = yield Ask("train", Message(shared=dict(server)))
        return {"body": mean(replies["body"])}, {}

    def personalise(self, server: State, cohort: Cohort) -> Personalise:
        """Send the current body to all."""
        yield from ()
        return Message(shared=dict(server))

    def personal(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Put each client's head on the current body."""
        return {"w": join_parts(context.net, message["body"], state["head"])}
