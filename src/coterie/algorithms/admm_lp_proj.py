"""ADMM Lp-Proj-2: FLAME in a small random subspace.

Zhu, Zeng, Wang, Sun, Li, Yao and Peng, "On ADMM in heterogeneous federated learning: personalization, robustness, and
fairness", 2024, Appendix C.

As FLAME with the image ``P θ_i`` in the place of ``θ_i`` wherever clients meet; ``w``, ``w_i``, ``π_i`` and ``u_i`` are
vectors of length ``d_sub``, and so are all messages. At the start ``w_i = P θ⁰`` and ``π_i = 0``. Each round::

    server:          w = (1/m) Σ_{i=1..m} u_i                       (all clients; the absent ones' u_i are old)
    client i ∈ S:    θ_i ← H epochs of  θ ← θ − η (∇f_i(θ; batch) + λ Pᵀ (P θ − c_i))
                     w_i ← (λ α_i P θ_i + ρ w − π_i) / (λ α_i + ρ)                                    (Eq. 186)
                     π_i ← π_i + ρ (w_i − w)                                                          (Eq. 187)
                     u_i ← w_i + π_i / ρ, which it sends

After every update ``π_i = λ α_i (P θ_i − w_i)``. The personal models are ``θ_i``; there is no global one.

Departures from the paper: those of FLAME; and ``P`` is made from the experiment's seed on the server and on every
client alike, so that it is never sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from pydantic import Field
from torch import Tensor

from coterie.algorithms.base import Start, Task
from coterie.algorithms.flame import AdmmTraining, AlternatingDirections
from coterie.algorithms.lp_proj import ProjectedTraining, Projection, opening_in_subspace


@dataclass(frozen=True, kw_only=True)
class ProjectedAdmmTraining(ProjectedTraining, AdmmTraining):
    """FLAME's client with ``P θ_i`` in the place of ``θ_i``."""


class ADMMLpProj(AlternatingDirections):
    """FLAME in a small random subspace: messages have the length of the subspace."""

    name: ClassVar[str] = "admm_lp_proj"
    title: ClassVar[str] = "ADMM Lp-Proj-2"
    citation: ClassVar[str] = "Zhu et al., 2024"

    d_sub: int = Field(10, ge=1, description="length of the vectors that are shared")

    def opening(self, start: Start) -> Tensor:
        """Return ``P θ⁰``."""
        return opening_in_subspace(start, self.d_sub)

    def tasks(self) -> dict[str, Task]:
        """Return FLAME's client in the subspace."""
        task = ProjectedAdmmTraining(
            self.stepper,
            self.minibatches,
            prox=self.lam,
            own_centre=self.centre == "own",
            dual=self.dual,
            projection=Projection(self.d_sub),
        )
        return {"train": task}
