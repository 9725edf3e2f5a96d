"""Statistics that a client tells with noise: of bounded values, so that what they tell of it is bounded too.

Of a column with the bounds [a, b], a client holds n values, g of which are there and not gaps. With each of those,
brought into the bounds, as ``t = 2 (x − a) / (b − a) − 1``, it tells::

    first  = Σ t / n            in [−1, 1]
    second = Σ t² / n − 1/2     in [−1/2, 1/2]
    there  = g / n − 1/2        in [−1/2, 1/2], of a column that may have gaps

Whatever the samples, the vector of these, over all columns, is no longer than ``R = √(5/4 · columns + 1/4 · columns
that may have gaps)``. Times ``clip / R`` it is a reply like any other to :func:`coterie.simulation.privacy.protect`:
clipping does not change it, and its noise has the standard deviation ``noise · R`` in units of the three.

Nobody tells how many samples it has, so all clients count the same. From the means of the three over clients, with
``G = there + 1/2``::

    mean of t = first / G,    variance of t = (second + 1/2) / G − (mean of t)²

brought back to where they can be: G into [1/1000, 1], the mean into [−1, 1], the variance to 1 − mean² at most. Where
noise leaves no variance above 0, that of values spread evenly between the bounds, 1/3, stands for it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from coterie.data.dataset import Preparation
from coterie.data.statistics import Moments
from coterie.errors import ConfigError

ROWS = 2**20
"""Rows that each client counts as."""

_LEAST, _EVENLY = 1e-3, 1 / 3
_NO_VARIANCE = 1e-12


class BoundedColumns:
    """The columns of which a preparation needs statistics, with their bounds.

    Parameters
    ----------
    preparation
        What is done to inputs.
    names
        What the columns are called, for error messages; their numbers if empty.
    is_bytes
        Whether inputs are bytes, which count as 0 to 1 and so have bounds.
    """

    def __init__(self, preparation: Preparation, names: tuple[str, ...] = (), is_bytes: bool = False) -> None:
        gaps = preparation.gaps or ("",) * len(preparation.scaled)
        self.count = len(preparation.scaled)
        self.places = [
            place for place, scaled in enumerate(preparation.scaled) if scaled or gaps[place] in ("mean", "median")
        ]
        self.has_gaps = [bool(gaps[place]) for place in self.places]
        bounds = preparation.bounds or (None,) * self.count
        known = [(0.0, 1.0) if is_bytes else bounds[place] for place in self.places]
        missing: list[str | int] = [
            names[place] if names else place for place, each in zip(self.places, known, strict=True) if not each
        ]
        _refuse_unbounded(missing)
        self.low = torch.tensor([each[0] for each in known if each], dtype=torch.float64)
        self.high = torch.tensor([each[1] for each in known if each], dtype=torch.float64)

    @property
    def radius(self) -> float:
        """How long what a client tells can be."""
        return math.sqrt(1.25 * len(self.places) + 0.25 * sum(self.has_gaps))

    def told(self, x: Tensor) -> Tensor:
        """Give what a client with samples ``[N, channels, ...]`` tells, before noise: first, second, there of all."""
        gaps = torch.tensor(self.has_gaps, dtype=torch.bool)
        sums = torch.zeros(3, len(self.places), dtype=torch.float64)
        rest = [axis for axis in range(x.dim()) if axis != 1]
        shape = (1, -1, *(1,) * (x.dim() - 2))
        values = 0
        for piece in x.split(4096):
            mine = piece[:, self.places].double()
            mine = mine / 255.0 if x.dtype == torch.uint8 else mine
            here = ~mine.isnan()
            low, high = self.low.view(shape), self.high.view(shape)
            t = (2 * (mine.clamp(low, high) - low) / (high - low) - 1).nan_to_num(0.0)
            sums += torch.stack([t.sum(rest), t.square().sum(rest), here.sum(rest).double()])
            values += mine.numel() // max(1, mine.shape[1])
        if not values:  # who has nothing tells what stands in the middle
            return torch.zeros(2 * len(self.places) + int(gaps.sum()), dtype=torch.float64)
        first, second, there = sums / values
        return torch.cat([first, second - 0.5, there[gaps] - 0.5])

    def moments(self, mean: Tensor, clients: int) -> tuple[Moments, int]:
        """Give the moments, and the rows, that follow from the mean of what so many clients told."""
        width, gaps = len(self.places), torch.tensor(self.has_gaps, dtype=torch.bool)
        share = torch.ones(width, dtype=torch.float64)
        share[gaps] = (mean[2 * width :] + 0.5).clamp(_LEAST, 1.0)
        middle = (mean[:width] / share).clamp(-1.0, 1.0)
        variance = torch.minimum((mean[width : 2 * width] + 0.5) / share - middle.square(), 1 - middle.square())
        variance = variance.where(variance > _NO_VARIANCE, torch.tensor(_EVENLY, dtype=torch.float64))
        rows, half = clients * ROWS, (self.high - self.low) / 2
        found = Moments(*torch.zeros(3, self.count, dtype=torch.float64).unbind())
        found.count.fill_(rows)
        found.count[self.places] = share * rows
        found.mean[self.places] = self.low + (middle + 1) * half
        found.squares[self.places] = share * rows * variance * half.square()
        return found, rows

    def apart(self, told: Tensor) -> dict[int, dict[str, float]]:
        """Take what a client told apart: by the place of a column, its first, second and, with gaps, there."""
        width, there = len(self.places), iter(told[2 * len(self.places) :].tolist())
        return {
            place: {"first": float(told[at]), "second": float(told[width + at])}
            | ({"there": next(there)} if self.has_gaps[at] else {})
            for at, place in enumerate(self.places)
        }

    def together(self, parts: Mapping[int, Mapping[str, float | None]]) -> Tensor:
        """Undo :meth:`apart`."""
        firsts, seconds, theres = (
            [parts[place].get(part) for place in self.places] for part in ("first", "second", "there")
        )
        theres = [value for value, gaps in zip(theres, self.has_gaps, strict=True) if gaps]
        return torch.tensor([*firsts, *seconds, *theres], dtype=torch.float64)


def _refuse_unbounded(columns: list[str | int]) -> None:
    if columns:
        raise ConfigError(
            f"column {columns[0]!r} has no bounds, without which its statistics cannot be told with noise: write "
            "bounds: [LOWEST, HIGHEST] into the file of columns=, for every number and date; or use scope local"
        )
