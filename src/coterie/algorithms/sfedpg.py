"""S-FedPG: FedPG with a line search for the step.

"Preserving global performance in personalized federated learning", ICCV submission 6989 (review version), section 3.4.

FedPG up to the direction ``d`` and the drift factors γ_i; then, with ``σ`` the factor that rescaled ``d`` and slopes
``g_i · d`` and ``g_F · d``::

    try η' = 2^s η, 2^(s−1) η, …  down to  2^(−s) η / σ
    accept the first with   L_i(ω + η' d) ≤ L_i(ω) + β η' g_i · d   for all i ∈ S
                      and   F(ω + η' d) ≤ F(ω) + β η' g_F · d                                     (Eq. 9)
    ω ← ω + η' d,    ω_i = ω + η' d_i   from the old ω

The steps to try are known beforehand, so by default all of them go out in one exchange, for which each client returns a
loss a step: between machines an exchange costs seconds, whatever is in it. With ``line_search="exchanges"`` they go out
one by one until one is accepted. Both accept the same step.

Departures from the paper, beside FedPG's

- C-P3: each client's own slope stands in its line of Eq. 9, and ``g_F · d`` in that of F.
- C-P6: the floor divides by σ: multiplied by it, it can lie above the first step, and nothing is ever tried.
- If nothing is accepted the last step that was tried is taken (``accepted = 0``).
- F is tested where ``g_F`` is part of the direction. If replies to a trial are lost, all tests are among those that
  replied; F among fewer clients need not fall along ``d``, and is not tested where its slope does not.
- The accepted step is sent in an exchange of its own, with γ_i.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from coterie.algorithms.base import (
    Ask,
    Batch,
    ClientContext,
    Cohort,
    Fold,
    FullPass,
    Info,
    Message,
    Replies,
    Start,
    State,
    Task,
)
from coterie.algorithms.fedpg import FedPG
from coterie.algorithms.server_math.common_descent import CommonDescent
from coterie.algorithms.server_math.fairness import fairness_coefficients
from coterie.algorithms.server_math.line_search import armijo_accepts, first_accepted, trial_steps
from coterie.rows import Rows


@dataclass(frozen=True)
class Trial(Task):
    """The losses ``L_i(ω + η' d)`` for some steps η'.

    The message holds ``steps`` and, the first time in a round, ``d``, which the client keeps.
    """

    references: ClassVar[Mapping[str, str | None]] = {"losses": None}
    moves_statistics: ClassVar[bool] = False

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Start the losses at zero."""
        known = state | message
        steps = known["steps"]
        return {"omega": known["omega"], "d": known["d"], "steps": steps, "losses": torch.zeros_like(steps)}

    def step(self, work: Rows, batch: Batch) -> Rows:
        """Add a batch's part of every step's loss."""
        omega, d = work["omega"], work["d"]
        tried = [batch.loss(torch.addcmul(omega, step.unsqueeze(1), d)) for step in work["steps"].unbind(1)]
        losses = torch.addcmul(work["losses"], torch.stack(tried, 1), batch.share.unsqueeze(1))
        return work | {"losses": losses}

    def folds(self) -> tuple[Fold, ...]:
        """Make one pass over all samples."""
        return (Fold(FullPass(), self.step),)

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """Keep the direction, send the losses."""
        return {"d": work["d"]}, {"losses": work["losses"]}


class SFedPG(FedPG):
    """FedPG whose step is searched for, so that the losses of all online clients fall."""

    name: ClassVar[str] = "sfedpg"
    title: ClassVar[str] = "S-FedPG"

    s: int = Field(1, ge=0, le=30, description="the first step is 2^s times the learning rate, the last 2^-s times it")
    beta: float = Field(1e-4, ge=0, lt=1, description="part of the promised decrease that a step must give")
    line_search: Literal["one", "exchanges"] = Field(
        "one", description="try all steps in one exchange, or one by one until one is accepted"
    )

    def init(self, start: Start) -> tuple[State, Rows]:
        """Start as FedPG does, with a direction that clients keep."""
        server, clients = super().init(start)
        return server, clients | {"d": start.rows(torch.zeros_like(start.row))}

    def tasks(self) -> dict[str, Task]:
        """Return FedPG's two tasks, and the trial of steps."""
        return super().tasks() | {"trial": Trial()}

    def take_step(
        self, online: Replies, found: CommonDescent, gamma: Tensor, cohort: Cohort
    ) -> Generator[Ask, Replies, tuple[float, Info]]:
        """Search for the step, then ask clients for their personal models."""
        d, clients = found.direction, online.clients
        steps = trial_steps(self.lr * self.lr_decay ** (cohort.round - 1), self.s, found.scale).to(d)
        shared = {"d": d}
        tried, success = 0, False
        eta = steps[0]
        for some in steps.split(len(steps) if self.line_search == "one" else 1):
            replies = yield Ask("trial", Message(shared=shared | {"steps": some}), clients)
            clients, shared = replies.clients, {}
            at, success = first_accepted(self.accepts(online, found, some, replies))
            tried, eta = tried + at + 1, some[at]
            if success:
                break
        left = torch.searchsorted(online.clients, clients)
        yield Ask("personal", Message(shared={"eta": eta}, each={"gamma": gamma[left]}), clients)
        info = {"step": eta, "trials": torch.tensor(float(tried)), "accepted": torch.tensor(float(success))}
        return float(eta), dict(info)

    def accepts(self, online: Replies, found: CommonDescent, steps: Tensor, trial: Replies) -> Tensor:
        """Return which steps pass the test for all clients whose trial losses came back."""
        among = torch.searchsorted(online.clients, trial.clients)
        losses, slopes = online["loss"][among], found.slopes[among]
        fair_slope = found.fair_slope
        if fair_slope is not None and len(among) < len(online):
            of_these = float(fairness_coefficients(losses) @ slopes)
            fair_slope = of_these if of_these < 0 else None
        kept = found.online_kept[among]
        return armijo_accepts(losses, trial["losses"].T, steps, slopes, fair_slope, beta=self.beta, protected=kept)
