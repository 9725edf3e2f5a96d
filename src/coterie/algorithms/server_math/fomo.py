"""FedFomo: how much a client moves towards each of the models it was sent."""

from __future__ import annotations

import torch
from torch import Tensor

_TINY = 1e-12


def fomo_weights(own_loss: Tensor, candidate_losses: Tensor, distances: Tensor) -> tuple[Tensor, Tensor]:
    """Weigh candidate models by how much they lower the client's validation loss per unit of distance.

    ``om_ij = max(0, (L_i(v_i) - L_i(v_j)) / (|v_j - v_i| + tiny))``, normalised over ``j``; the client then moves by
    ``sum_j om_ij (v_j - v_i)``.

    Parameters
    ----------
    own_loss
        Validation loss ``[rows]`` of each client's own model.
    candidate_losses
        Validation losses ``[rows, candidates]`` of the models each client was sent.
    distances
        Distances ``[rows, candidates]`` from the client's own model to them.

    Returns
    -------
    normalised : Tensor
        Float64 weights ``[rows, candidates]``; a row sums to one, or is zero where no candidate is better.
    raw : Tensor
        The same before normalisation: what the server adds to its affinity matrix.

    Examples
    --------
    >>> fomo_weights(torch.tensor([2.0]), torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 1.0]]))[0]
    tensor([[1., 0.]], dtype=torch.float64)
    """
    away = distances.double()
    ratio = (own_loss.double().unsqueeze(1) - candidate_losses.double()) / (away + _TINY)
    # At distance 0 it is the client's own model: a last-bit difference of the losses would otherwise take all weight.
    # A loss or distance that is not finite belongs to a model that diverged.
    raw = torch.where((away > 0) & ratio.isfinite(), ratio.clamp_min(0.0), 0.0)
    total = raw.sum(1, keepdim=True)
    return torch.where(total > 0, raw / total, 0.0), raw
