"""Equal random parts, with equal or growing noise on the inputs."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from coterie.data.partitions.scheme import Assignment, SamplePool, Scheme
from coterie.randomness import stream


class Iid(Scheme):
    """Shuffle all samples and split them equally: every client has the same law."""

    name: ClassVar[str] = "iid"
    by_label: ClassVar[bool] = False
    citation: ClassVar[str] = (
        "McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017"
    )

    def assign(self, pool: SamplePool, clients: int, seed: int) -> Assignment:
        """Deal equal random parts."""
        order = stream(seed, "partition: iid").permutation(len(pool))
        return Assignment(np.array_split(order, clients))


class Quality(Scheme):
    """Equal random parts whose inputs carry Gaussian noise that grows with the client's number."""

    name: ClassVar[str] = "quality"
    by_label: ClassVar[bool] = False
    positional: ClassVar[str | None] = "sigma"
    citation: ClassVar[str] = (
        "Li, Diao, Chen, He, Federated learning on non-IID data silos: an experimental study, ICDE 2022"
    )

    sigma: float = Field(0.1, gt=0, description="client i of m has noise sigma*i/m, after normalisation")
    variance: bool = Field(False, description="sigma*i/m is the noise's variance, not its standard deviation")
    redraw: bool = Field(False, description="draw the noise anew at every access, instead of once for each sample")
    contiguous: bool = Field(False, description="cut the samples in stored order, without shuffling them first")

    def assign(self, pool: SamplePool, clients: int, seed: int) -> Assignment:
        """Deal equal parts and the noise levels."""
        order = np.arange(len(pool)) if self.contiguous else stream(seed, "partition: quality").permutation(len(pool))
        level = self.sigma * np.arange(clients) / clients
        noise = (np.sqrt(level) if self.variance else level).astype(np.float32)
        return Assignment(np.array_split(order, clients), noise=noise, redraw_noise=self.redraw)
