"""Predictors that are more than a network with one set of parameters: what some methods make of a body and a head."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn


class TwoHeads(nn.Module):
    """A head that all clients share and one of the client's own, on the same features; their outputs are added."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.body, self.head = network.body, network.head
        self.personal = copy.deepcopy(network.head)

    def forward(self, x: Tensor) -> Tensor:
        """Give the sum of both heads' outputs."""
        features = self.body(x)
        out: Tensor = self.head(features) + self.personal(features)
        return out


class TwoExits(nn.Module):
    """A client's part that answers if it is sure enough, and a shared part for the rest.

    It is sure if the entropy of its probabilities, in nats, is not above the threshold; with a threshold of 0 it never
    is.
    """

    def __init__(self, network: Any, features: int, classes: int, threshold: float) -> None:
        super().__init__()
        self.lower, self.upper, self.head = network.body[: network.split], network.body[network.split :], network.head
        self.early = nn.Linear(features, classes)
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        """Give the outputs of one of the exits for each sample."""
        lower = self.lower(x)
        early: Tensor = self.early(lower.flatten(1))
        late: Tensor = self.head(self.upper(lower))
        if self.threshold == 0:
            return late
        entropy = torch.special.entr(early.double().softmax(-1)).sum(-1, keepdim=True)
        return torch.where(entropy > self.threshold, late, early)
