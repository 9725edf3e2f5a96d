"""Per-FedAvg: a global model from which one step leads to a good personal one.

Fallah, Mokhtari and Ozdaglar, "Personalized federated learning with theoretical guarantees: a model-agnostic
meta-learning approach", NeurIPS 2020.

Minimises ``Σ_i f_i(w − a ∇f_i(w))``. A local step draws independent batches D, D' and, for HF, D''::

    w̃ = w − a ∇f_i(w; D),    g' = ∇f_i(w̃; D')
    FO:   w ← w − b g'
    HF:   w ← w − b (g' − a h),   h = [∇f_i(w + δ g'; D'') − ∇f_i(w − δ g'; D'')] / (2δ) ≈ ∇²f_i(w) g'
    server:      w ← Σ_{i∈S} p_i w_i
    evaluation:  v_i ← w − a ∇f_i(w), on training samples, ``adapt_steps`` times; dropped afterwards

The global model is ``w``; the personal models are the ``v_i``. ``b`` is ``lr``, as in every method here; ``a`` is
``inner_lr``.

Departures from the paper: clients' models are averaged by their samples as in FedAvg, so that ``a = 0`` is FedAvg. The
paper's experiments do not settle ``b``; common code takes 1e-3, which is too small for a few rounds of small data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import Field

from coterie.algorithms.base import Ask, Batch, Cohort, Message, Minibatches, Personalise, State, Task
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.local_training import Optimiser, ProximalTraining
from coterie.algorithms.row_numbers import add_times, nonzero
from coterie.rows import Rows


@dataclass(frozen=True)
class MetaTraining(ProximalTraining):
    """Epochs of steps along an estimate of the gradient of ``f_i(w − a ∇f_i(w))``.

    Parameters
    ----------
    inner_lr
        The inner step ``a``.
    delta
        Half the distance δ of the finite difference; 0 leaves the second-order term out.
    """

    per_row: ClassVar[tuple[str, ...]] = ("inner_lr", "delta")
    outside_steps: ClassVar[tuple[str, ...]] = ("from_own", "reply")

    inner_lr: float = 0.0
    delta: float = 0.0

    def step(self, work: Rows, batch: Batch, *others: Batch) -> Rows:
        """Take one step."""
        w, a = work["w"], self.inner_lr
        others = tuple(other.measuring(None) for other in others)
        adapted = add_times(w, batch.grad(w), -a)
        gradient = others[0].grad(adapted)
        if nonzero(self.delta):
            ahead = others[1].grad(add_times(w, gradient, self.delta))
            behind = others[1].grad(add_times(w, gradient, -self.delta))
            gradient = add_times(gradient, ahead - behind, -(a / (2 * self.delta)))
        return work | self.optimiser.update(work, "w", gradient)


class PerFedAvg(FedAvg):
    """A global model that one gradient step on a client's data turns into that client's own."""

    name: ClassVar[str] = "per_fedavg"
    title: ClassVar[str] = "Per-FedAvg"
    citation: ClassVar[str] = "Fallah et al., NeurIPS 2020"

    variant: Literal["fo", "hf"] = Field(
        "fo", description="first order, or with a Hessian-vector product by finite differences"
    )
    inner_lr: float = Field(0.05, ge=0, description="step a that personalises the global model")
    delta: float = Field(1e-3, gt=0, description="half the distance of the finite difference (hf)")
    adapt_steps: int = Field(
        1, ge=1, le=Minibatches.MOST, description="steps that personalise the global model for evaluation"
    )
    adapt_batch_size: int = Field(0, ge=0, description="samples in each of those steps; 0 means all")

    def tasks(self) -> dict[str, Task]:
        """Return the meta-training, and the adaptation for evaluation."""
        hf = self.variant == "hf"
        data = Minibatches(self.batch_size, self.local_epochs, draws=3 if hf else 2)
        train = MetaTraining(self.stepper, data, inner_lr=self.inner_lr, delta=self.delta if hf else 0.0)
        steps = Minibatches(self.adapt_batch_size, steps=self.adapt_steps)
        return {"train": train, "adapt": ProximalTraining(Optimiser(lr=self.inner_lr), steps, reply=False)}

    def personalise(self, server: State, cohort: Cohort) -> Personalise:
        """Take the inner step on every client."""
        yield Ask("adapt", Message(shared={"w": server["w"]}))
        return Message()
