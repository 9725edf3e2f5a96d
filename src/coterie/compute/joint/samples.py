"""The samples of several runs as those of one federation; what is equal is held once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from coterie.compute.samples import Samples, Split
from coterie.data.partitions import Ragged


class SampleStore:
    """Holds inputs and targets of several runs, equal ones once: most runs of a study deal out the same data set."""

    def __init__(self) -> None:
        self._held: list[Samples] = []

    def hold(self, samples: Samples) -> Samples:
        """Give the same samples, with the inputs and targets of an earlier run where they are equal."""
        x = next((one.x for one in self._held if _equal(one.x, samples.x)), samples.x)
        y = next((one.y for one in self._held if _equal(one.y, samples.y)), samples.y)
        samples = replace(samples, x=x, y=y)
        self._held.append(samples)
        return samples


def _equal(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return bool(torch.equal(one, other))


def join_samples(runs: Sequence[Samples]) -> Samples:
    """Make one federation of several runs' clients, the first run's first.

    All must have samples of one shape and type, scaled alike, and either all or none noise that is redrawn.
    """
    distinct: dict[tuple[int, int], int] = {}  # where the samples of each pair of inputs and targets begin
    parts: list[Samples] = []
    end = 0
    for one in runs:
        if (id(one.x), id(one.y)) not in distinct:
            distinct[id(one.x), id(one.y)] = end
            parts.append(one)
            end += len(one.y)
    begins = [distinct[id(one.x), id(one.y)] for one in runs]
    splits: tuple[Split, ...] = ("train", "validation", "test")
    noise = [one.noise for one in runs if one.noise is not None]
    return replace(
        runs[0],
        x=parts[0].x if len(parts) == 1 else torch.cat([one.x for one in parts]),
        y=parts[0].y if len(parts) == 1 else torch.cat([one.y for one in parts]),
        splits={split: _join([one.splits[split] for one in runs], begins) for split in splits},
        class_counts=torch.cat([one.class_counts for one in runs]),
        noise=torch.cat(noise) if noise else None,
    )


def _join(runs: Sequence[Ragged], begins: Sequence[int]) -> Ragged:
    flat = torch.cat([one.flat + begin for one, begin in zip(runs, begins, strict=True)])
    sizes = torch.cat([one.sizes for one in runs])
    return Ragged(flat, torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]))
