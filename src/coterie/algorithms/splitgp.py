"""SplitGP: a client's part with an early exit, and a server's part for what it is unsure of.

Han, Kim, Choi, Brinton and Moon, "SplitGP: achieving both generalization and personalization in federated learning",
INFOCOM 2023.

The model is cut in two. The client's part is the first layers of the body, ``φ_i``, with an auxiliary linear head
``h_i`` on their activations (the client's exit); the server's part ``θ`` is the rest of the body with the model's own
head (the server's exit). Each round::

    client i ∈ S:   (φ_i, h_i) ← λ (φ_i, h_i) + (1 − λ) (φ, h)
                    (φ_i, h_i), θ_i ← E epochs of SGD on γ ℓ(h(φ(x)), y) + (1 − γ) ℓ(θ(φ(x)), y), θ_i from θ
    server:         (φ, h), θ ← Σ_{i∈S} p_i ((φ_i, h_i), θ_i),   p_i = N_i / Σ_{k∈S} N_k

Inference takes the client's exit, unless the entropy of its softmax, in nats, is above ``E_th``: then the server's.
The personal model is ``λ (φ_i, h_i) + (1 − λ) (φ, h)`` with the server's current ``θ``. With the server's means alone
it is the same for all: the global model, which is derived.

Departures from the paper

- Both parts are trained on the client, so that a round is one exchange and no activations or labels are sent: messages
  carry the model and the auxiliary head, ``n + (d + 1) classes`` floats each way for activations of ``d`` numbers.
- A client mixes its part with the current mean when it is next asked, and for evaluation, instead of the server doing
  it at the end of the round; with all clients in every round that is the same.
- The paper's ``γ``, ``λ`` and ``E_th`` vary by experiment; the defaults are ours.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from coterie import randomness
from coterie.algorithms.base import (
    Ask,
    Batch,
    ClientContext,
    Cohort,
    Fold,
    Message,
    Net,
    Personalise,
    Round,
    Start,
    State,
    Task,
)
from coterie.algorithms.body_and_head import PartsTraining, require_parts
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.row_numbers import fitting
from coterie.rows import Rows


def exits(net: Net, client: Tensor, server: Tensor, x: Tensor, key: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Apply both parts of a split model."""
    lower, upper = net.sub("body", slice(0, net.split)), net.sub("body", slice(net.split, None))
    layers, auxiliary = client[:, : lower.layout.size], client[:, lower.layout.size :]
    z = lower.outputs(layers, x, key)
    flat = z.flatten(2)
    classes = auxiliary.shape[1] // (flat.shape[2] + 1)
    weight, bias = auxiliary[:, :-classes].unflatten(1, (classes, -1)), auxiliary[:, -classes:]
    early = torch.baddbmm(bias.unsqueeze(1), flat, weight.transpose(1, 2))
    deep = upper.outputs(server[:, : upper.layout.size], z, key)
    return early, net.sub("head").outputs(server[:, upper.layout.size :], deep, key)


def towards(own: Tensor, mean: Tensor, lam: float) -> Tensor:
    """Mix a client's part with the mean: ``λ own + (1 − λ) mean``."""
    return lam * own + (1 - lam) * mean


@dataclass(frozen=True)
class TwoExitTraining(PartsTraining):
    """Epochs on the loss of both exits, starting from the client's part mixed with the mean and the server's part.

    Parameters
    ----------
    optimiser
        How to step.
    data
        Which minibatches.
    gamma
        Weight of the client's exit in the loss.
    lam
        Weight of the client's own part in the mixture.
    """

    per_row: ClassVar[tuple[str, ...]] = ("gamma",)
    outside_steps: ClassVar[tuple[str, ...]] = ("lam",)

    gamma: float
    lam: float

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Mix the client's part with the mean."""
        client = towards(state["client"], message["client"], self.lam)
        return self.parts(context, client=client, server=message["server"])

    def losses(self, work: Rows, batch: Batch) -> Tensor:
        """Return the weighted sum of both exits' losses."""
        early, late = exits(batch.net, work["client"], work["server"], batch.x, batch.key)
        first, second = batch.mean_loss(early), batch.mean_loss(late)
        return fitting(self.gamma, first) * first + fitting(1 - self.gamma, second) * second

    def folds(self) -> tuple[Fold, ...]:
        """Make one pass over minibatches."""
        return (Fold(self.data, self.step_on("client", "server")),)

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """Keep the client's part, and send both."""
        return {"client": work["client"]}, {"client": work["client"], "server": work["server"]}


class SplitGP(FedAvg):
    """A model cut in two: a personal part that answers when it is sure, and a shared part for the rest."""

    name: ClassVar[str] = "splitgp"
    title: ClassVar[str] = "SplitGP"
    citation: ClassVar[str] = "Han et al., INFOCOM 2023"
    derived_global: ClassVar[bool] = True

    gamma: float = Field(0.5, ge=0, le=1, description="weight γ of the client's exit in the training loss")
    lam: float = Field(0.2, ge=0, le=1, description="weight λ of a client's own part when it is mixed with the mean")
    threshold: float = Field(
        0.2,
        ge=0,
        description="entropy, in nats, above which the server's exit answers: always at 0, never above log(classes)",
    )

    def init(self, start: Start) -> tuple[State, Rows]:
        """Cut the model, and draw an auxiliary head that all start from."""
        classes = require_parts(start, self.title, outputs=2)
        net, row = start.net, start.row
        first, rest = ("body", slice(0, net.split)), ("body", slice(net.split, None))
        lower = net.columns(*first).take(row)
        with torch.no_grad():
            features = net.sub(*first).outputs(lower.unsqueeze(0), start.probe.unsqueeze(0))[0, 0].numel()
        # As torch initialises a linear layer of that many inputs.
        bound = 1 / math.sqrt(features)
        drawn = randomness.stream(start.seed, "auxiliary head").uniform(-bound, bound, (features + 1) * classes)
        client = torch.cat([lower, torch.from_numpy(drawn).to(row)])
        server = torch.cat([net.columns(*rest).take(row), net.columns("head").take(row)])
        return {"client": client, "server": server}, {"client": start.rows(client)}

    def tasks(self) -> dict[str, Task]:
        """Return the training of both parts."""
        return {"train": TwoExitTraining(self.stepper, self.minibatches, self.gamma, self.lam)}

    def round(self, server: State, cohort: Cohort) -> Round:
        """Broadcast the means, train, average."""
        replies = yield Ask("train", Message(shared=dict(server)))
        whole = torch.cat([replies["client"], replies["server"]], 1)
        joined = self.join(whole, cohort.shares(replies.clients))
        client, rest = joined.split([len(server["client"]), len(server["server"])])
        return {"client": client.clone(), "server": rest.clone()}, self.standing(len(replies))

    def personalise(self, server: State, cohort: Cohort) -> Personalise:
        """Send the current means to all."""
        yield from ()
        return Message(shared=dict(server))

    def personal(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Mix each client's part with the mean."""
        return {"client": towards(state["client"], message["client"], self.lam), "server": message["server"]}

    def global_model(self, server: State) -> Rows | None:
        """Return the means of both parts, which is derived: the method has no global model."""
        return dict(server)

    def predict(self, net: Net, rows: Rows, x: Tensor) -> Tensor:
        """Take the client's exit where it is sure enough, else the server's."""
        early, late = exits(net, rows["client"], rows["server"], x)
        entropy = torch.special.entr(early.double().softmax(-1)).sum(-1, keepdim=True)
        # Entropy is above 0 for any finite outputs, but a saturated softmax rounds it to 0.
        unsure = entropy > self.threshold if self.threshold else torch.ones_like(entropy, dtype=torch.bool)
        return torch.where(unsure, late, early)
