"""FedPG's fairness objective: minus the cosine between the clients' losses and the vector of ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def unfairness(losses: Tensor) -> Tensor:
    """How unequal losses are: ``F + 1 = 1 - cos(L, 1)``, exact also where they are nearly equal.

    Parameters
    ----------
    losses
        Losses ``[..., clients]``, not negative.

    Returns
    -------
    Tensor
        Float64 ``[...]``; zero where all losses are equal, also where all are zero.
    """
    wide = losses.double()
    largest = wide.abs().amax(-1, keepdim=True)
    wide = wide / torch.where(largest > 0, largest, 1.0)
    # sin^2 of the angle is the variance over the mean square, which does not cancel as 1 - cos does.
    sine = wide.var(-1, correction=0) / wide.square().mean(-1).clamp_min(torch.finfo(torch.float64).tiny)
    return sine / (1 + (1 - sine).clamp_min(0).sqrt())


def fairness_coefficients(losses: Tensor) -> Tensor:
    """Return the derivatives ``h_i = dF/dL_i`` of the fairness objective ``F = -cos(L, 1)``.

    Parameters
    ----------
    losses
        Losses ``[clients]``, not negative.

    Returns
    -------
    Tensor
        Float64 ``h`` with ``h . L = 0``; exactly zero where all losses are equal.

    Examples
    --------
    >>> fairness_coefficients(torch.tensor([0.3, 0.3]))
    tensor([0., 0.], dtype=torch.float64)
    """
    wide = losses.double()
    largest = wide.abs().max()
    if not largest > 0:
        return torch.zeros_like(wide)
    wide = wide / largest
    # (L.1) L_i - |L|^2 = sum_j L_j (L_i - L_j): differences first, so that nothing cancels.
    numerator = (wide.unsqueeze(1) - wide) @ wide
    length = float(torch.linalg.vector_norm(wide))
    return numerator / (math.sqrt(len(wide)) * length**3 * float(largest))
