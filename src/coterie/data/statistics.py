"""How inputs are brought to mean 0 and deviation 1 and gaps are filled, by statistics of training samples alone.

A client's part of a statistic is, of each channel, how many values there are, their sum and their sum of squares: what
it could really send. Sums of squares are held as squared deviations from the client's own mean, which is the same
knowledge, and put together by

    n = n_a + n_b,   mean = mean_a + (mean_b - mean_a) n_b / n,   S = S_a + S_b + (mean_b - mean_a)² n_a n_b / n,

so that a channel whose mean is large beside its deviation loses no digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from coterie.data.dataset import Dataset, Preparation
from coterie.data.mapped import let_go
from coterie.errors import ConfigError

_SMALL, _NUMBERS = 2**13, 2**21  # numbers of a sample; numbers at once where samples are larger

Scope = Literal["local", "federated", "pooled"]


@dataclass(frozen=True)
class Moments:
    """Of each channel: how many values, their mean, and the sum of their squared deviations from it (float64)."""

    count: Tensor
    mean: Tensor
    squares: Tensor

    @classmethod
    def of(cls, x: Tensor, index: Tensor) -> Moments:
        """Take them from some of the samples ``[N, channels, ...]``; gaps (NaN) do not count, bytes count as 0 to 1."""
        rest = [axis for axis in range(x.dim()) if axis != 1]
        found = cls(*torch.zeros(3, x.shape[1], dtype=torch.float64).unbind())
        # In float64, but never all at once: that would be eight times the images.
        sample = max(1, math.prod(x.shape[1:]))
        if sample > _SMALL and x.dtype == torch.uint8:
            return cls._of_bytes(x, index, rest)
        for some in index.split(4096 if sample <= _SMALL else max(1, _NUMBERS // sample)):
            piece = x[some]
            values = piece.double() / 255.0 if x.dtype == torch.uint8 else piece.double()
            here = ~values.isnan()
            count = here.sum(rest).double()
            mean = values.nan_to_num(0.0).sum(rest) / count.clamp(min=1)
            away = (values - mean.view(1, -1, *(1,) * (x.dim() - 2))).nan_to_num(0.0)
            found = found + cls(count, mean, away.square().sum(rest))
            let_go(x)
        return found

    @classmethod
    def _of_bytes(cls, x: Tensor, index: Tensor, rest: list[int]) -> Moments:
        """Count large images in whole numbers, which is exact and takes a fraction of the time."""
        sums = torch.zeros(2, x.shape[1], dtype=torch.int64)
        for some in index.split(max(1, 4 * _NUMBERS // x[0].numel())):
            piece = x[some]
            sums[0] += piece.sum(rest, dtype=torch.int64)
            sums[1] += piece.to(torch.int32).square_().sum(rest, dtype=torch.int64)
            let_go(x)
        count = len(index) * (x[0].numel() // x.shape[1])
        squares = [
            (count * two - one * one) / (count * 255**2) if count else 0.0
            for one, two in zip(*sums.tolist(), strict=True)
        ]
        mean = sums[0].double() / (255 * max(1, count))
        return cls(torch.full_like(mean, count), mean, torch.tensor(squares, dtype=torch.float64))

    def __add__(self, other: Moments) -> Moments:
        count = self.count + other.count
        share = other.count / count.clamp(min=1)
        step = other.mean - self.mean
        squares = self.squares + other.squares + step.square() * self.count * share
        return Moments(count, self.mean + step * share, squares)


@dataclass(frozen=True)
class Constants:
    """What statistics come to: what is subtracted, what is then divided by, and what stands in the place of gaps."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    fill: tuple[float, ...]


def prepared(dataset: Dataset, parts: Iterable[Tensor], scope: Scope) -> Dataset:
    """Give the data set with statistics of some samples: each entry of ``parts`` are the samples of one client."""
    preparation = dataset.preparation
    if preparation is None:
        return dataset
    if scope == "federated":
        refuse_medians(preparation)
    parts = list(parts)
    zero = Moments(*torch.zeros(3, dataset.x.shape[1], dtype=torch.float64).unbind())
    moments = sum((Moments.of(dataset.x, part) for part in parts), zero)

    def median(place: int) -> float:
        values = torch.cat([dataset.x[part, place] for part in parts]).double()
        values = values[~values.isnan()]
        return float(values.quantile(0.5)) if len(values) else 0.0

    return with_constants(dataset, constants_of(preparation, moments, sum(map(len, parts)), median))


def refuse_medians(preparation: Preparation) -> None:
    """Refuse gaps that are filled with a median where statistics are put together from what clients send."""
    if "median" in preparation.gaps:
        raise ConfigError(
            "scope is federated, but a median cannot be put together from what clients send: fill gaps with mean or "
            "zero, or use scope local or pooled"
        )


def constants_of(
    preparation: Preparation, moments: Moments, rows: int, median: Callable[[int], float] | None = None
) -> Constants:
    """Give what moments come to; ``rows`` counts the samples, those with gaps too."""
    fill: list[float] = []
    for place, how in enumerate(preparation.gaps):
        if how == "median" and median is not None:
            fill.append(median(place))
        else:
            fill.append(float(moments.mean[place]) if how == "mean" else 0.0)
    if fill:  # as if the gaps had held what they are filled with
        filled = torch.tensor(fill, dtype=torch.float64)
        moments = moments + Moments(rows - moments.count, filled, torch.zeros_like(filled))
    scaled = torch.tensor(preparation.scaled)
    std = (moments.squares / moments.count.clamp(min=1)).sqrt()
    mean = moments.mean.where(scaled, torch.zeros(()).double())
    std = std.where(scaled & (std > 0), torch.ones(()).double())
    return Constants(tuple(mean.tolist()), tuple(std.tolist()), tuple(fill))


def with_constants(dataset: Dataset, found: Constants) -> Dataset:
    """Give the data set with these constants."""
    return replace(dataset, mean=found.mean, std=found.std, fill=found.fill)
