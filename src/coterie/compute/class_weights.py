"""Samples that count by their class, as in ``torch.nn.CrossEntropyLoss(weight=..., reduction="mean")``.

A client's mean over a batch is ``Σ w(y) loss / Σ w(y)``. Batches of a whole pass are put together by how much of the
client's weight is in each, so that the pass gives the same mean over all its samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from coterie.compute.samples import Samples, Split


@dataclass(frozen=True)
class ClassWeights:
    """How much samples count.

    Parameters
    ----------
    values
        Weight of each class for each client ``[clients, classes]``.
    means
        For each split, the mean weight of each client's samples ``[clients]``; 1 where it has none.
    """

    values: Tensor
    means: dict[Split, Tensor]

    @classmethod
    def of(cls, values: Tensor, samples: Samples) -> ClassWeights:
        """Take the means over the samples of a federation."""
        means: dict[Split, Tensor] = {}
        for split, ragged in samples.splits.items():
            whose = torch.repeat_interleave(torch.arange(len(ragged), device=ragged.flat.device), ragged.sizes)
            weights = values.double()[whose, samples.y[ragged.flat]]
            sums = torch.zeros(len(ragged), dtype=torch.float64, device=whose.device).index_add_(0, whose, weights)
            means[split] = torch.where(ragged.sizes > 0, sums / ragged.sizes.clamp(min=1), 1.0).to(values.dtype)
        return cls(values, means)

    def apply(self, clients: Tensor, y: Tensor, weight: Tensor, share: Tensor, split: Split) -> tuple[Tensor, Tensor]:
        """Give the weights of samples ``[rows, samples]`` and the shares of batches ``[rows]`` by class."""
        weighed = self.values[clients].gather(1, y) * weight
        total = weighed.sum(1, keepdim=True)
        sure = torch.where(total > 0, total, torch.ones_like(total))  # rows of padding alone have none
        return weighed / sure, share * total.squeeze(1) / self.means[split][clients]


def balanced(counts: Tensor) -> Tensor:
    """Give ``n / (k n_c)``, with ``k`` classes that are there: rare classes count more, and all classes alike.

    ``counts`` are ``[..., classes]``, as are the weights; 1 for a class of which there is no sample.
    """
    counts = counts.double()
    present = counts > 0
    share = counts.sum(-1, keepdim=True) / present.sum(-1, keepdim=True).clamp(min=1)
    return torch.where(present, share / counts.clamp(min=1), 1.0)
