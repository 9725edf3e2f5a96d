"""FedProx-FT: FedProx, then plain fine-tuning.

As compared with in Huang et al., "Personalized cross-silo federated learning on non-IID data", AAAI 2021.

::

    rounds:          as FedProx
    evaluation:      v_i ← E_ft epochs of SGD on f_i, starting from w, without the proximal term; dropped afterwards
"""

from __future__ import annotations

from typing import ClassVar

from coterie.algorithms.fedavg_ft import FedAvgFT
from coterie.algorithms.fedprox import FedProx


class FedProxFT(FedAvgFT, FedProx):
    """FedProx whose personal models are the global one, fine-tuned on each client."""

    name: ClassVar[str] = "fedprox_ft"
    title: ClassVar[str] = "FedProx-FT"
    citation: ClassVar[str] = "Huang et al., AAAI 2021"
