"""Which samples each row sees at each step, as one table for all rows."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from coterie import randomness
from coterie.algorithms.base import Minibatches, Whole
from coterie.compute.engine import Call, Engine


@dataclass(frozen=True)
class Schedule:
    """The steps of a fold for the rows of a chunk, longest first.

    Parameters
    ----------
    order
        Places of the rows in the chunk, by decreasing number of steps; ``None`` if they lie so already.
    totals
        Steps of each row, in that order.
    index
        Sample numbers ``[draws, steps, rows, samples]``; padding repeats some sample of the data set.
    weight
        Weight of each sample in its row's mean ``[steps, rows, samples]``: one over its real samples, 0 for
        padding.
    share
        Which fraction of the row's samples a step sees ``[steps, rows]``.
    """

    order: Tensor | None
    totals: list[int]
    index: Tensor
    weight: Tensor
    share: Tensor

    def segments(self) -> list[tuple[int, int, int]]:
        """Cut the steps where rows drop out."""
        cuts = sorted(set(self.totals))
        segments, begin = [], 0
        for end in cuts:
            if end > begin:
                active = sum(total >= end for total in self.totals)
                segments.append((begin, end, active))
                begin = end
        return segments


def few_widths(samples: int) -> int:
    """Round a number of samples up to one of few: four to an octave, so that at most a fifth of them is padding.

    Examples
    --------
    >>> [few_widths(samples) for samples in (0, 1, 7, 9, 33, 200)]
    [0, 1, 7, 10, 40, 224]
    """
    step = 1 << max(0, (samples - 1).bit_length() - 3) if samples else 1
    return -(-samples // step) * step


@dataclass(frozen=True)
class _Measures:
    """The numbers that decide the tables' shapes."""

    steps: int
    size: int
    width: int
    longest: int
    epochs: int
    draws: int
    shuffled: bool


Replay = Callable[[Hashable, Callable[..., tuple[Tensor, ...]], tuple[Tensor, ...]], tuple[Tensor, ...]]
"""Computes a function of tensors on the device, perhaps from a recording for these shapes."""


def at_once(
    key: Hashable, function: Callable[..., tuple[Tensor, ...]], given: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Compute a function without a recording."""
    return function(*given)


def make_schedule(
    engine: Engine,
    over: Minibatches | Whole,
    clients: Tensor,
    call: Call,
    fold: int,
    *,
    padded: bool = False,
    replay: Replay = at_once,
) -> Schedule:
    """Work out a fold's schedule: what is one number a row on the host, the tables on the engine's device."""
    split = "train" if isinstance(over, Minibatches) else over.split
    sizes = engine.host_sizes[split].numpy()[clients.numpy()]
    longest = int(sizes.max()) if len(sizes) else 0
    room = few_widths(longest) if padded else longest
    size = over.size or max(longest, 1)
    per_epoch = (sizes + size - 1) // size
    if isinstance(over, Whole):
        totals, draws = per_epoch, 1
    else:
        steps, draws = over.steps, over.draws
        epochs = engine.epochs(over, clients, call, fold).numpy()
        totals = epochs * per_epoch if steps is None else np.full_like(sizes, steps)
    order = np.argsort(-totals, kind="stable")
    sorted_already = bool((order[:-1] < order[1:]).all())
    who, sizes, totals, per_epoch = clients.numpy()[order], sizes[order], totals[order], per_epoch[order]
    longest_run = int(totals[0]) if len(totals) else 0

    per_epoch = np.maximum(per_epoch, 1)
    last = np.maximum((totals - 1) // per_epoch, 0)  # a row's last epoch
    passes = int(last.max()) + 1 if len(last) else 1
    measures = _Measures(
        few_widths(longest_run) if padded else longest_run,
        size,
        min(over.size or room, room),
        room,
        passes,
        draws,
        isinstance(over, Minibatches),
    )
    # One transfer: a column for each number of a row, then its keys.
    numbers = [np.stack([sizes, per_epoch, who, last], 1)]
    if measures.shuffled:
        base = engine.key("batches", torch.from_numpy(who), call, fold).numpy()[:, None]
        each = randomness.fold_in(base, np.arange(draws))[:, :, None]
        numbers.append(randomness.fold_in(each, np.arange(passes)).reshape(len(who), -1))
    table = torch.from_numpy(np.concatenate(numbers, 1)).to(engine.device)
    ragged = engine.samples.splits[split]
    make = partial(_tables, measures, ragged.flat, ragged.offsets, engine.samples.dtype)
    index, weight, share = replay((split, measures, table.shape), make, (table,))
    return Schedule(
        None if sorted_already else torch.from_numpy(order).to(engine.device),
        totals.tolist(),
        index[:, :longest_run],
        weight[:longest_run],
        share[:longest_run],
    )


def _tables(
    measures: _Measures, flat: Tensor, offsets: Tensor, dtype: torch.dtype, table: Tensor
) -> tuple[Tensor, ...]:
    """Compute a schedule's tables from a row of numbers for each row; nothing here waits for the device."""
    sizes, per, clients, last = table[:, :4].split(1, dim=1)
    size, width, longest = measures.size, measures.width, measures.longest
    begin = offsets[clients].unsqueeze(-1)
    step = torch.arange(measures.steps, device=table.device)
    epoch = torch.minimum(torch.div(step, per, rounding_mode="floor"), last)  # [rows, steps]
    place = (step - epoch * per).unsqueeze(-1) * size + torch.arange(width, device=table.device)
    counts = (sizes - place[..., 0]).clamp(0, size) if width else torch.zeros_like(epoch)
    place = torch.minimum(place, (sizes - 1).clamp_min(0).unsqueeze(-1))
    tables = []
    for draw in range(measures.draws):
        within = place
        if measures.shuffled:
            keys = table[:, 4 + draw * measures.epochs : 4 + (draw + 1) * measures.epochs]
            shuffled = randomness.permutations(keys, sizes, longest)  # [rows, epochs, longest]
            at = (epoch.unsqueeze(-1) * longest + place).flatten(1)
            within = shuffled.flatten(1).gather(1, at).view(place.shape)
        tables.append(flat[(begin + within).clamp_max(max(len(flat) - 1, 0))].transpose(0, 1))
    counts = counts.T
    real = torch.arange(width, device=table.device) < counts.unsqueeze(-1)
    weight = real.to(dtype) / counts.to(dtype).clamp_min(1).unsqueeze(-1)
    share = counts.to(dtype) / sizes.squeeze(1).clamp_min(1)
    return torch.stack(tables).contiguous(), weight.contiguous(), share.contiguous()
