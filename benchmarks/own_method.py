"""Coterie: one model for all that leaves each client's class frequencies to the client.

A method of this project's own, for the leaderboard; it is in no paper as a whole, its parts are. What differs between
clients is, more than anything else, how often they see each class. So the model that all share is trained to say what
an input looks like, and each client adds what it knows by itself: how often it meets each class. Each round, with
``n_ic`` the training samples of class c that client i has, of N_i, and C classes::

    b_ic = τ log((n_ic + ε) / (N_i + C ε))                                  what client i knows by itself
    client i ∈ S:   w_i ← E epochs of SGD on  CE(w(x) + b_i, y),  starting from w
    server:         m ← β (1 − |S|/n) m + Σ_{i∈S} p_i w_i − w;   w ← w + m  p_i = N_i / Σ_{k∈S} N_k, of n clients
                    w̄ ← w̄ + (1 − min(γ, 1 − 1/k)) (w − w̄)                   in round k
    evaluation:     v_i ← the mean of the iterates of E epochs of SGD on CE(v(x) + b_i, y) at the rate ρη, starting
                    from w̄;  client i predicts with v_i(x) + b_i; dropped afterwards

Where clients differ in their class frequencies alone, the conditional probabilities of all of them are
``softmax(f(x) + b_i)`` with one and the same f (Bayes' rule with τ = 1), so that they agree on the minimiser, however
unlike their labels are, and FedAvg's clients do not pull apart. What else a client has of its own comes from the epochs
at the end. In m the last steps speak for those clients that are away, and the mean w̄ makes up for what differs from
round to round with who is there. No client keeps anything: one that was away, and one that comes when training is over,
get what everybody gets, at once.

Limits: with ``τ = β = γ = 0`` rounds are FedAvg's; with all clients in every round β changes nothing (newcomers, before
they come, count among the n and are away). With ``ρ = 0`` the personal models are ``w̄(x) + b_i``. Where a client has
all classes alike, τ changes nothing for it. Without classes (regression) there is no ``b_i``.

Where the parts come from: losses with class frequencies inside, Ren et al., NeurIPS 2020 (balanced softmax), and Menon
et al., ICLR 2021 (logit adjustment); in federations Chen and Chao, ICLR 2022 (FedROD), where a personal head has to
learn what ``b_i`` says; momentum of the server, Hsu et al., 2019; means of iterates, Polyak and Juditsky, 1992. It uses
no validation samples, and a client tells nobody its ``n_ic``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from pydantic import Field
from torch import Tensor

from coterie.algorithms import Ask, Batch, ClientContext, Cohort, Message, Net, Personalise, Round, Start, State, Task
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.local_training import ProximalTraining
from coterie.rows import Rows

PRIOR = "prior"
"""The name, among rows, of what clients know of their class frequencies."""


def log_prior(counts: Tensor, tau: float, smoothing: float) -> Tensor:
    """Return ``b_i`` for class counts ``[rows, classes]``, and in a last column that of a class that nobody counts."""
    if not counts.shape[1]:
        return counts
    padded = torch.nn.functional.pad(counts.double(), (0, 1)) + smoothing
    whole = counts.double().sum(1, keepdim=True) + smoothing * counts.shape[1]
    return (tau * (padded / whole).log()).to(counts.dtype)


def with_prior(outputs: Tensor, prior: Tensor) -> Tensor:
    """Add ``b_i`` to outputs ``[rows, samples, ...]``: a logit for each class, or one for the second of two."""
    classes = prior.shape[1] - 1
    if classes < 1:
        return outputs
    width = outputs.shape[2] if outputs.dim() > 2 else 1
    if width == 1:
        return outputs + (prior[:, 1] - prior[:, 0]).view(-1, *(1,) * (outputs.dim() - 1))
    known, unknown = prior.split((classes, 1), dim=1)
    # A model may have more outputs than the data have classes.
    return outputs + torch.cat([known, unknown.expand(-1, width - classes)], 1).unsqueeze(1)


def knowing(batch: Batch, prior: Tensor) -> Batch:
    """Return the batch with the loss of a model to whose outputs ``b_i`` is added."""

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        return batch.per_sample(with_prior(outputs.unflatten(0, (len(prior), -1)), prior).flatten(0, 1), targets)

    return replace(batch, per_sample=losses)


@dataclass(frozen=True, kw_only=True)
class PriorTraining(ProximalTraining):
    """Epochs on the loss with a client's class frequencies inside.

    Parameters
    ----------
    tau
        Weight τ of the log frequencies.
    smoothing
        What is added to every count, ε.
    """

    per_row: ClassVar[tuple[str, ...]] = ("prox",)
    outside_steps: ClassVar[tuple[str, ...]] = ("from_own", "reply", "tau", "smoothing")

    tau: float
    smoothing: float

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Start at the received model, with what the client knows."""
        prior = log_prior(context.class_counts, self.tau, self.smoothing)
        return super().start(context, state, message) | {PRIOR: prior}

    def step(self, work: Rows, batch: Batch) -> Rows:
        """Take one step."""
        return super().step(work, knowing(batch, work[PRIOR]))

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """Send the trained model, and keep nothing."""
        return {}, {"w": work["w"]}


@dataclass(frozen=True, kw_only=True)
class MeanOfIterates(PriorTraining):
    """The same epochs, of which the client keeps the mean of the models after each step, and sends nothing."""

    per_row: ClassVar[tuple[str, ...]] = ("prox",)
    outside_steps: ClassVar[tuple[str, ...]] = ("from_own", "reply", "tau", "smoothing")

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Start at the received model, with no step taken."""
        work = super().start(context, state, message)
        return work | {"mean": work["w"].clone(), "steps": torch.zeros_like(work["lr"])}

    def step(self, work: Rows, batch: Batch) -> Rows:
        """Take one step, and move the mean."""
        new, steps = super().step(work, batch), work["steps"] + 1
        return new | {"mean": work["mean"] + (new["w"] - work["mean"]) / steps, "steps": steps}

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """Keep the mean."""
        return {"w": work["mean"]}, {}


class Coterie(FedAvg):
    """One model for all, to which each client adds its own class frequencies, then a short training of its own."""

    name: ClassVar[str] = "coterie"
    title: ClassVar[str] = "Coterie"
    citation: ClassVar[str] = "this library"

    tau: float = Field(1.0, ge=0, description="weight τ of a client's log class frequencies; 0 leaves them out")
    smoothing: float = Field(0.1, gt=0, description="samples ε that each client is given of every class beside its own")
    server_momentum: float = Field(0.6, ge=0, lt=1, description="factor β of the last step, for clients that are away")
    averaging: float = Field(0.8, ge=0, lt=1, description="factor γ of the last mean in the mean of global models")
    adaptation: float = Field(0.3, ge=0, description="rate ρ of the training at the end, as a multiple of lr")

    def init(self, start: Start) -> tuple[State, Rows]:
        """Start every model at the initial one."""
        rest = torch.zeros_like(start.row)
        return {"w": start.row, "velocity": rest, "mean": start.row.clone()}, {"w": start.rows()}

    def tasks(self) -> dict[str, Task]:
        """Return the training of the model for all, and that of a client's own."""
        train = PriorTraining(self.stepper, self.minibatches, tau=self.tau, smoothing=self.smoothing)
        slower = replace(self.stepper, lr=self.adaptation * self.lr)
        adapt = MeanOfIterates(slower, self.minibatches, reply=False, tau=self.tau, smoothing=self.smoothing)
        return {"train": train, "adapt": adapt}

    def round(self, server: State, cohort: Cohort) -> Round:
        """Broadcast, train, move with momentum, and move the mean."""
        w, mean = server["w"], server["mean"]
        replies = yield Ask("train", Message(shared={"w": w}))
        joined = self.join(replies["w"], cohort.shares(replies.clients))
        carried = self.server_momentum * (1 - len(replies) / cohort.total) * server["velocity"]
        moved, velocity = joined + carried, joined - w + carried
        kept = min(self.averaging, 1 - 1 / cohort.round)
        new = {"w": moved, "velocity": velocity, "mean": torch.lerp(mean, moved, 1 - kept)}
        return new, self.standing(len(replies))

    def personalise(self, server: State, cohort: Cohort) -> Personalise:
        """Let every client train from the mean model."""
        yield Ask("adapt", Message(shared={"w": server["mean"]}))
        return Message()

    def personal(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Put beside each client's model what it knows of its classes."""
        return {"w": state["w"], PRIOR: log_prior(context.class_counts, self.tau, self.smoothing)}

    def global_model(self, server: State) -> Rows | None:
        """Return the mean model, which takes all classes for equally frequent."""
        return {"w": server["mean"]}

    def predict(self, net: Net, rows: Rows, x: Tensor) -> Tensor:
        """Add what a client knows, where there is a client."""
        outputs = net.outputs(rows["w"], x)
        return with_prior(outputs, rows[PRIOR]) if PRIOR in rows else outputs
