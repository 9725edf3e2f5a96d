"""Clients' samples as arrays that programs need which play all clients at once: batches beforehand, gaps weighted 0."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rivals import Federation


def batches(federation: Federation) -> tuple[Tensor, Tensor, Tensor]:
    """Give samples ``[clients, steps, batch, ...]``, targets and weights ``[clients, steps, batch]``.

    Clients with fewer samples than others have gaps, of weight 0: a step of gaps alone moves nothing.
    """
    work = federation.work
    steps = max(math.ceil(size / work.batch) for size in work.sizes)
    x = torch.zeros(len(work.sizes), steps * work.batch, *work.shape, device=federation.device)
    y = torch.zeros(len(work.sizes), steps * work.batch, dtype=torch.int64, device=federation.device)
    weights = torch.zeros(len(work.sizes), steps * work.batch, device=federation.device)
    for client, size in enumerate(work.sizes):
        x[client, :size], y[client, :size] = federation.samples(client)
        weights[client, :size] = 1
    return (
        x.unflatten(1, (steps, work.batch)),
        y.unflatten(1, (steps, work.batch)),
        weights.unflatten(1, (steps, work.batch)),
    )
