"""FedPG: personalised federated learning with preserved global performance.

"Preserving global performance in personalized federated learning", ICCV submission 6989 (review version).

A round with online clients S, learning rate ``η = lr · lr_decay^(round − 1)``::

    client i ∈ S:   g_i = ∇L_i(ω),  L_i(ω)                       over all its samples
    server:         μ = mean_i |g_i|,    q_i = μ g_i / |g_i|
                    g_F = Σ_i h_i g_i,   the gradient of F = −cos(L, 1),    q_F = μ g_F / |g_F|
                    q_j = μ ĝ_j / |ĝ_j|  for absent j last seen at most ⌊M/|S|⌋ rounds ago, of M clients seen so far
                    λ = argmin |Q λ|²    over the simplex,   Q = [q_i, q_j, q_F]                      (Eq. 5)
                    d = −Q λ,    rescaled to  |d| = |mean_{i∈S} g_i|
                    γ_i = the largest γ in [0, 1] with  g_j · (d + γ (−g_i − d)) ≤ 0  for j ∈ S, j ≠ i    (Eq. 8)
                    ω ← ω + η d
    client i ∈ S:   d_i = d + γ_i (−g_i − d),    ω_i = ω + η d_i          from the old ω

Along ``d`` the losses of all online clients fall, those of recently absent ones as far as their last gradients tell,
and losses become more equal. The global model is ω, the personal models are the ω_i. An absent client keeps its last
one; with ``fresh`` all clients make theirs anew for each evaluation.

The ablations of the paper: M1 ``direction="mean"``, M2 ``fair=False``, M3 ``drift=False``, M4 ``history=False``. Its
"FedPG γ=c" is ``gamma=c``: a client then uses the larger of that and the factor it was sent.

Departures from the paper

- C-P1, C-P2: Pareto stationarity means that *no* common descent direction exists, and Eq. 8 is garbled; as above.
- C-P4: ``g_F`` is made of the gradients as they are, then rescaled: made of rescaled ones it is not the gradient of F.
- C-P5: ``g_F`` is left out where it vanishes, and where it alone makes ``d`` collapse (``fair_dropped``).
- C-P7: full gradients; ``grad_mode="pseudo"`` sends (ω − ω_i)/η after ``local_epochs`` epochs of SGD instead.
- C-P8: M counts the clients seen before the round, and a client seen exactly ⌊M/|S|⌋ rounds ago still counts.
- C-P9: only online clients bound γ_i; with ``gamma_over_history`` the absent ones in Q do too.
- C-P10, C-P12: the drift uses gradients as they are, and gradients are taken in evaluation mode.
- Gradients shorter than 1e-6 are left out. At a Pareto stationary point ``d`` is zero and ω stays.
- ω is sent every round, to newly online clients and others alike.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from coterie.algorithms.base import (
    Algorithm,
    Ask,
    Batch,
    ClientContext,
    Cohort,
    Fold,
    FullPass,
    Info,
    Message,
    Minibatches,
    Personalise,
    Replies,
    Round,
    Start,
    State,
    Task,
    Weights,
)
from coterie.algorithms.fedsgd import FullGradient
from coterie.algorithms.local_training import Optimiser
from coterie.algorithms.server_math.common_descent import CommonDescent, common_descent, drift_factors
from coterie.rows import Rows, gram, put_rows, take_rows
from coterie.rows.host_copies import on_device, on_host

_MOST_KEPT = 2048  # clients whose gradients' inner products are kept: 32 MB, which a round copies twice


@dataclass(frozen=True)
class KeptGradient(FullGradient):
    """The loss and its full gradient, sent and kept with the model they were taken at."""

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """Keep model and gradient, send gradient and loss."""
        return {"omega": work["w"], "g": work["g"]}, {"g": work["g"], "loss": work["loss"]}


@dataclass(frozen=True)
class PseudoGradient(KeptGradient):
    """The loss, and in place of its gradient what some epochs of SGD move the model by, over the learning rate.

    Parameters
    ----------
    optimiser
        How to step: plain SGD.
    data
        Which minibatches.
    """

    optimiser: Optimiser
    data: Minibatches

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Train a copy of the model."""
        return super().start(context, state, message) | {"y": message["w"]} | self.optimiser.init(context, message["w"])

    def train(self, work: Rows, batch: Batch) -> Rows:
        """Take one step."""
        return work | self.optimiser.update(work, "y", batch.grad(work["y"]))

    def step(self, work: Rows, batch: Batch) -> Rows:
        """Add a batch's part of the loss."""
        return work | {"loss": torch.addcmul(work["loss"], batch.loss(work["w"]), batch.share)}

    def folds(self) -> tuple[Fold, ...]:
        """Train, then measure the loss."""
        return Fold(self.data, self.train), Fold(FullPass(), self.step)

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """Send the displacement over the learning rate."""
        return super().finish(context, work | {"g": (work["w"] - work["y"]) / work["lr"]})


@dataclass(frozen=True)
class Drift(Task):
    """The personal model ``ω + η (d + γ (−g − d))``.

    The message holds ``d``, unless the client has it already, ``gamma`` and, unless the schedule gives it, ``eta``.

    Parameters
    ----------
    optimiser
        Gives the learning rate of the round.
    gamma
        The least γ that the client uses.
    """

    outside_steps: ClassVar[tuple[str, ...]] = ("gamma",)

    optimiser: Optimiser
    gamma: float

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Take up the message."""
        known = state | message
        eta = known["eta"].unsqueeze(1) if "eta" in known else self.optimiser.init(context, known["omega"])["lr"]
        gamma = known["gamma"].clamp_min(self.gamma).unsqueeze(1)
        return {"omega": known["omega"], "g": known["g"], "d": known["d"], "gamma": gamma, "eta": eta}

    def folds(self) -> tuple[Fold, ...]:
        """Return no pass: no data is needed."""
        return ()

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """Keep the personal model."""
        direction = work["d"] - work["gamma"] * (work["g"] + work["d"])
        return {"w": work["omega"] + work["eta"] * direction}, {}


class FedPG(Algorithm):
    """A global model that improves for everybody at once, and personal models that drift from it without harm to it."""

    name: ClassVar[str] = "fedpg"
    title: ClassVar[str] = "FedPG"
    citation: ClassVar[str] = "ICCV submission 6989, review version"
    has_global: ClassVar[bool] = True

    lr: float = Field(0.1, gt=0, description="learning rate η of the first round")
    lr_decay: float = Field(0.999, gt=0, le=1, description="factor on the learning rate after each round")
    gamma: float = Field(0.0, ge=0, le=1, description="least drift factor that clients use; 1 is a step of their own")
    fresh: bool = Field(False, description="make all personal models anew for each evaluation")
    direction: Literal["common", "mean"] = Field(
        "common", description="descend for everybody, or along the mean gradient (ablation M1)"
    )
    fair: bool = Field(True, description="make losses more equal (off: ablation M2)")
    drift: bool = Field(True, description="let personal models drift from the global one (off: ablation M3)")
    history: bool = Field(True, description="protect recently absent clients (off: ablation M4)")
    gamma_over_history: bool = Field(False, description="let absent clients bound the drift factors too")
    grad_mode: Literal["full", "pseudo"] = Field("full", description="full gradients, or displacements by local epochs")
    local_epochs: int = Field(
        5, ge=1, le=Minibatches.MOST, description="passes over the client's training samples (pseudo)"
    )
    batch_size: int = Field(50, ge=0, description="samples in a minibatch; 0 means all (pseudo)")

    @model_validator(mode="after")
    def _history_is_there(self) -> FedPG:
        if self.gamma_over_history and not self.history:
            raise ValueError("gamma_over_history=True needs history=True: without it there are no absent clients")
        return self

    def init(self, start: Start) -> tuple[State, Rows]:
        """Start every model at the initial one, without gradients."""
        nothing = torch.zeros_like(start.row)
        seen = torch.zeros(start.clients, dtype=torch.int64, device=start.row.device)
        # Where they would take more memory than the gradients, or much by themselves, they are not kept.
        worth = self.history and 2 * start.clients <= len(start.row) and start.clients <= _MOST_KEPT
        kept = start.clients if worth else 0
        products = torch.zeros(kept, kept, dtype=torch.float64, device=start.row.device)
        return {"w": start.row, "g": start.rows(nothing), "seen": seen, "products": products}, {
            "w": start.rows(),
            "omega": start.rows(),
            "g": start.rows(nothing),
        }

    @property
    def rate(self) -> Optimiser:
        """The learning rate of each round, with plain steps."""
        return Optimiser(lr=self.lr, lr_decay=self.lr_decay)

    def tasks(self) -> dict[str, Task]:
        """Return the tasks of the two exchanges."""
        pseudo = PseudoGradient(self.rate, Minibatches(self.batch_size, self.local_epochs))
        return {
            "gradient": KeptGradient() if self.grad_mode == "full" else pseudo,
            "personal": Drift(self.rate, self.gamma),
        }

    def round(self, server: State, cohort: Cohort) -> Round:
        """Find the common direction, step along it, remember the gradients."""
        w, online, memory, info = yield from self._descend(server, cohort)
        # On the host, where the next round looks at it: a GPU would have to be waited for.
        seen = on_host(server["seen"]).index_fill(0, on_host(online.clients), cohort.round)
        return {"w": w, "seen": on_device(seen, server["seen"].device)} | memory, info

    def personalise(self, server: State, cohort: Cohort) -> Personalise:
        """Keep the personal models as they are, or with ``fresh`` make them anew."""
        if self.fresh:
            yield from self._descend(server, cohort)
        return Message()

    @property
    def evaluated_together(self) -> bool:
        """Whether all are made at once: with ``fresh`` they share a direction that depends on who is evaluated."""
        return self.fresh

    def global_model(self, server: State) -> Rows | None:
        """Return ω."""
        return {"w": server["w"]}

    def _descend(self, server: State, cohort: Cohort) -> Generator[Ask, Replies, tuple[Tensor, Replies, State, Info]]:
        """Run a round's exchanges; returns the new global model, what came back, what to remember and to record."""
        w = server["w"]
        online = yield Ask("gradient", Message(shared={"w": w}))
        memory = self._remember(server, online)
        absent = self.window(server["seen"], online.clients, cohort.round)
        stale = take_rows(server["g"], absent)
        products = None
        if len(memory["products"]):
            columns = torch.cat([online.clients, absent])
            products = memory["products"][columns][:, columns]
        found = common_descent(
            online["g"],
            online["loss"],
            stale,
            products=products,
            fair=self.fair,
            mean_direction=self.direction == "mean",
        )
        gamma = torch.zeros_like(found.slopes)
        if self.drift:
            gamma = drift_factors(
                online["g"],
                found.direction,
                products=products,
                history=stale if self.gamma_over_history else None,
                constraining=found.online_kept,
            )
        eta, info = yield from self.take_step(online, found, gamma.to(w.dtype), cohort)
        return w + eta * found.direction, online, memory, self._record(found, gamma, online, absent, cohort) | info

    def _remember(self, server: State, online: Replies) -> State:
        """Return all clients' last gradients and their inner products, of which only those of new ones are computed."""
        clients, new, old, products = online.clients, online["g"], server["g"], server["products"]
        if len(products):
            # In float64 whatever the device: a direction near a Pareto stationary point hangs on the last digits.
            among = gram(new, new)
            rows = self._with_others(server, online).index_copy(1, clients, (among + among.T) / 2)
            products = products.index_copy(0, clients, rows).index_copy(1, clients, rows.T)
        return {"g": put_rows(old, clients, new), "products": products}

    def _with_others(self, server: State, online: Replies) -> Tensor:
        """Return inner products of new gradients with everybody's last one; of those online they count for nothing."""
        new, old = online["g"], server["g"]
        recorded = on_host(server["seen"]) > 0
        recorded[on_host(online.clients)] = False
        others = on_device(recorded.nonzero().squeeze(1), new.device)
        if 2 * len(others) > len(old):  # the matrix is read as it lies: to take most of its rows is to copy them
            return gram(new, old)
        rows = torch.zeros(len(new), len(old), dtype=torch.float64, device=new.device)
        return rows.index_copy(1, others, gram(new, take_rows(old, others))) if len(others) else rows

    def window(self, seen: Tensor, online: Tensor, now: int) -> Tensor:
        """Return the absent clients whose last gradients still count."""
        known = on_host(seen)
        recorded = known > 0
        recent = recorded & (now - known <= int(recorded.sum()) // len(online)) & self.history
        recent[on_host(online)] = False
        return on_device(recent.nonzero().squeeze(1), seen.device)

    def take_step(
        self, online: Replies, found: CommonDescent, gamma: Tensor, cohort: Cohort
    ) -> Generator[Ask, Replies, tuple[float, Info]]:
        """Ask clients for their personal models; returns the step along the direction, and what to record about it."""
        yield Ask("personal", Message(shared={"d": found.direction}, each={"gamma": gamma}), online.clients)
        return self.lr * self.lr_decay ** (cohort.round - 1), {}

    def _record(self, found: CommonDescent, gamma: Tensor, online: Replies, absent: Tensor, cohort: Cohort) -> Info:
        used = gamma.clamp_min(self.gamma)
        lam = found.slopes.new_zeros(cohort.total)
        lam[online.clients], lam[absent] = found.online_weights, found.history_weights
        columns = torch.cat([online.clients, absent]).sort().values
        # What client i's direction is made of: (1 - gamma_i) of the common weights, and gamma_i of its own gradient.
        mixed = (1 - used).unsqueeze(1) * lam[columns]
        mixed[torch.arange(len(used), device=mixed.device), torch.searchsorted(columns, online.clients)] += used
        place = cohort.among(online.clients)
        nobody = lam.new_zeros(len(cohort.clients))
        return {
            "weights": Weights(mixed, online.clients, columns),
            "lambda": nobody.index_copy(0, place, found.online_weights),
            "gamma": nobody.index_copy(0, place, used),
            "lambda_absent": found.history_weights.sum(),
            "lambda_fair": lam.new_full((), found.fair_weight),
            "fair_dropped": lam.new_full((), float(found.fair == "collapsed")),
            "stationary": lam.new_full((), float(found.stationary)),
        }
