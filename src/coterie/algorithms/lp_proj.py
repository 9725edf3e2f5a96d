"""Lp-Proj-2: personal models held together in a small random subspace.

Lin, Han, Li and Zhang, "Personalized federated learning towards communication efficiency, robustness and fairness",
NeurIPS 2022; as compared with in Zhu et al., 2024, Appendix C.

``P`` is a fixed matrix of ``d_sub`` rows, each a Gaussian vector scaled to length one; clients share vectors of length
``d_sub``. At the start ``u_i = P θ⁰``. Each round::

    server:          w = (1/m) Σ_{i=1..m} u_i                       (all clients; the absent ones' u_i are old)
    client i ∈ S:    θ_i ← H epochs of  θ ← θ − η (∇f_i(θ; batch) + λ Pᵀ (P θ − w))
                     w_i ← w − η_w λ (w − P θ_i),   u_i ← w_i, which it sends

The personal models are ``θ_i``; a vector of length ``d_sub`` is no model, so there is no global one.

Departures from the paper

- As in the comparison of Zhu et al., ``w_i`` takes one step a round, after ``θ_i``'s epochs, and the mean is over all
  clients. With ``η_w = α/(λ α + ρ)`` that is ADMM Lp-Proj-2 without duals.
- ``d_sub = 10`` is that comparison's. So few directions of a network hold little together: personal models then stay
  close to Local's. A larger subspace holds more, and costs ``d_sub`` times a model in every step.
- ``P`` is never sent: the server and every client make it from the experiment's seed. ``Pᵀ P`` is never formed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import Tensor

from coterie import randomness
from coterie.algorithms.base import Batch, ClientContext, Start, Task
from coterie.algorithms.flame import Consensus, PersonalTraining
from coterie.algorithms.local_training import refuse_unstable
from coterie.errors import AlgorithmError, ConfigError
from coterie.memory import free_memory, gpu_memory
from coterie.rows import Rows

_MOST_MEMORY = 0.5  # of what is free, for the one matrix


def projection_matrix(seed: int, rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make ``P``; the server and all clients make the same one, but for rounding."""
    needed = rows * columns * torch.empty((), dtype=dtype).element_size()
    free = gpu_memory(device)[0] if device.type == "cuda" else free_memory()
    if needed > _MOST_MEMORY * free:
        raise ConfigError(
            f"d_sub is {rows}: its matrix has {needed / 2**30:.1f} GiB for a model of {columns} parameters, more than "
            f"{_MOST_MEMORY:g} of the {free / 2**30:.1f} GiB that are free; take fewer"
        )
    matrix = torch.empty(rows, columns, dtype=dtype, device=device)
    keys = randomness.keys(seed, "projection", 0, torch.arange(rows, device=device))
    for row, key in enumerate(keys):  # one at a time: the generator's float64 temporaries are several times a row
        drawn = randomness.normal(key, columns)
        matrix[row] = drawn / drawn.norm()
    return matrix


class Projection:
    """``P`` in the client's half: one matrix for all rows, made when a task starts and kept for its steps.

    It is a function of the experiment's seed and the model, so it is no state: whoever needs it makes the same one.

    Parameters
    ----------
    rows
        Length ``d_sub`` of the shared vectors.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self._made_for: tuple[object, ...] | None = None
        self._matrix: Tensor | None = None

    def prepare(self, seed: int, theta: Tensor) -> None:
        """Make the matrix for given models, unless it was made before."""
        wanted = (seed, theta.shape[1], theta.dtype, theta.device)
        if self._made_for != wanted:
            self._matrix = projection_matrix(seed, self.rows, theta.shape[1], theta.dtype, theta.device)
            self._made_for = wanted

    @property
    def matrix(self) -> Tensor:
        """The matrix ``[d_sub, parameters]``."""
        if self._matrix is None:
            raise AlgorithmError("a projection was used before the task that makes it had started")
        return self._matrix


@dataclass(frozen=True, kw_only=True)
class ProjectedTraining(PersonalTraining):
    """Epochs that train ``θ`` with its image ``P θ`` held to a centre.

    Parameters
    ----------
    projection
        The matrix ``P``.
    """

    projection: Projection

    def image(self, theta: Tensor) -> Tensor:
        """Return ``P θ``."""
        return theta @ self.projection.matrix.T

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        """Make ``P``, then start."""
        self.projection.prepare(context.seed, state["theta"])
        return super().start(context, state, message)

    def step(self, work: Rows, batch: Batch) -> Rows:
        """Take one step with gradient ``∇f + λ Pᵀ (P θ − c)``."""
        gap = self.image(work["w"]) - work["centre"]
        gradient = torch.addmm(batch.grad(work["w"]), gap, self.projection.matrix, alpha=self.prox)
        return work | self.optimiser.update(work, "w", gradient)


@dataclass(frozen=True, kw_only=True)
class LpProjTraining(ProjectedTraining):
    """The client's half: ``θ_i`` by epochs, then one step of ``w_i``, which is the message.

    Parameters
    ----------
    eta
        Step ``η_w`` of the shared vector.
    """

    eta: float

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        """Step from ``w`` towards ``P θ_i``."""
        theta, w = work["w"], work["shared"]
        return {"theta": theta}, {"u": w - self.eta * self.prox * (w - self.image(theta))}


def opening_in_subspace(start: Start, d_sub: int) -> Tensor:
    """Return ``P θ⁰``."""
    row = start.row
    if d_sub > len(row):
        raise ConfigError(f"d_sub is {d_sub}: the model has {len(row)} parameters, and d_sub may be at most that")
    return projection_matrix(start.seed, d_sub, len(row), row.dtype, row.device) @ row


class LpProj(Consensus):
    """Personal models whose projections to a small random subspace are held together."""

    name: ClassVar[str] = "lp_proj"
    title: ClassVar[str] = "Lp-Proj-2"
    citation: ClassVar[str] = "Lin et al., NeurIPS 2022"

    d_sub: int = Field(10, ge=1, description="length of the vectors that are shared")
    eta: float = Field(0.5, ge=0, description="step of the shared vector towards a client's projected model")

    @model_validator(mode="after")
    def _stable_in_the_subspace(self) -> LpProj:
        refuse_unstable(self.eta, self.lam, name="lam", rate="eta")
        return self

    def opening(self, start: Start) -> Tensor:
        """Return ``P θ⁰``."""
        return opening_in_subspace(start, self.d_sub)

    def tasks(self) -> dict[str, Task]:
        """Return the training with projections held together."""
        projection = Projection(self.d_sub)
        task = LpProjTraining(self.stepper, self.minibatches, prox=self.lam, projection=projection, eta=self.eta)
        return {"train": task}
