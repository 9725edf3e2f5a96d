"""SCAFFOLD: local training corrected by control variates.

Karimireddy, Kale, Mohri, Reddi, Stich and Suresh, "SCAFFOLD: stochastic controlled averaging for federated learning",
ICML 2020.

::

    client i ∈ S:   y ← x;   K_i steps   y ← y − η (g_i(y) − c_i + c)
                    c_i⁺ = c_i − c + (x − y) / (K_i η)                     (option II)
    server:         x ← x + η_g mean_{i∈S} (y_i − x)
                    c ← c + (|S|/m) mean_{i∈S} (c_i⁺ − c_i)

``c_i`` estimates the client's own gradient and ``c = mean_i c_i`` that of all clients, so that ``−c_i + c`` turns a
client's step into one of everybody's: the fixed point is the optimum of the mean loss, however many local steps there
are. The global model is ``x``; a client's personal model is its ``y_i`` of its last participation.

Departures from the paper: none. The mean over clients is not weighted by their samples, as in the paper. Local steps
are plain ones, since option II reads the mean gradient off the displacement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field

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
from coterie.algorithms.local_training import GlobalTraining, Optimiser
from coterie.rows import Rows


@dataclass(frozen=True)
class ControlledTraining(Task):
    """Epochs of ``y ← y − η (g_i(y) − c_i + c)``, and the client's new control variate.

    The message holds ``w`` and ``c``; the client's state its own model ``w`` and control variate ``c``.

    Parameters
    ----------
    optimiser
        How to step: plain SGD.
    data
        Which minibatches.
    """

    references: ClassVar[Mapping[str, str | None]] = {"dw": None, "dc": None}

    optimiser: Optimiser
    data: Minibatches

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Start at the global model."""
        x, own = message["w"], state["c"]
        work = {"w": x, "x": x, "own": own, "shift": message["c"] - own, "count": x.new_zeros(len(x), 1)}
        return work | self.optimiser.init(context, x)

    def step(self, work: Rows, batch: Batch) -> Rows:
        """Take one corrected step."""
        gradient = batch.grad(work["w"]) + work["shift"]
        return work | self.optimiser.update(work, "w", gradient) | {"count": work["count"] + 1}

    def folds(self) -> tuple[Fold, ...]:
        """Make one pass over minibatches."""
        return (Fold(self.data, self.step),)

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """Update the control variate, and send both displacements."""
        y, own, count = work["w"], work["own"], work["count"]
        mean = (work["x"] - y) / (count.clamp_min(1) * work["lr"]) - work["shift"]
        new = torch.where(count > 0, mean, own)
        return {"w": y, "c": new}, {"dw": y - work["x"], "dc": new - own}


class Scaffold(GlobalTraining):
    """FedAvg whose local steps are corrected for the difference between a client's gradient and everybody's."""

    name: ClassVar[str] = "scaffold"
    title: ClassVar[str] = "SCAFFOLD"
    citation: ClassVar[str] = "Karimireddy et al., ICML 2020"

    lr: float = Field(0.05, gt=0, description="learning rate")
    optimiser: Literal["sgd"] = Field("sgd", description="local optimiser: control variates need plain steps")
    momentum: float = Field(0.0, ge=0, le=0, description="momentum: control variates need plain steps, so always 0")
    server_lr: float = Field(1.0, ge=0, description="step η_g of the server along the mean displacement")

    def init(self, start: Start) -> tuple[State, Rows]:
        """Start every model at the initial one, with control variates of zero."""
        server, clients = super().init(start)
        # m counts the clients that ever train: one that never does has no c_i to be averaged.
        m = torch.tensor(start.clients if start.members is None else len(start.members), device=start.row.device)
        mine = {"c": torch.zeros_like(start.row), "m": m}
        return server | mine, clients | {"c": start.rows(torch.zeros_like(start.row))}

    def tasks(self) -> dict[str, Task]:
        """Return the training with corrected steps."""
        return {"train": ControlledTraining(self.stepper, self.minibatches)}

    def round(self, server: State, cohort: Cohort) -> Round:
        """Broadcast model and control variate, train, and average both."""
        replies = yield Ask("train", Message(shared={"w": server["w"], "c": server["c"]}))
        w = server["w"] + self.server_lr * replies["dw"].mean(0)
        # (|S|/m) mean_S is a sum over m: it keeps c the mean of all c_i whoever took part.
        c = server["c"] + replies["dc"].sum(0) / server["m"]
        return {"w": w, "c": c, "m": server["m"]}, {}
