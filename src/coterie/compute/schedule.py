"""Which samples each row sees at each step, as tables for all rows of a chunk.

The ``loop`` engine makes the same batches one after another (:meth:`coterie.compute.loop.LoopEngine._minibatches`),
from the same keys; read it first.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coterie import randomness
from coterie.algorithms.base import FullPass, Minibatches
from coterie.compute.engine import Call, Engine
from coterie.compute.samples import Split
from coterie.rows.host_copies import to_device

Indices = npt.NDArray[np.int64]


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
        """Cut the steps where rows are done; a segment is its first step, one past its last, and the rows left."""
        cuts = sorted(set(self.totals))
        segments, begin = [], 0
        for end in cuts:
            if end > begin:
                active = sum(total >= end for total in self.totals)
                segments.append((begin, end, active))
                begin = end
        return segments


def padded_size(samples: int) -> int:
    """Round up to one of four numbers to an octave: few sizes serve all cohorts, and at most a fifth is padding."""
    # 0, 1, 7, 10, 40, 224 for 0, 1, 7, 9, 33, 200
    step = 1 << max(0, (samples - 1).bit_length() - 3) if samples else 1
    return -(-samples // step) * step


def even_width(samples: int) -> int:
    """Round up to a multiple of 8, or to one of two numbers to an octave: the width of a batch, whoever it is next to.

    Finer ones would leave few rows to be computed at once, and with coarser ones more of a batch would be padding.
    """
    # 8, 8, 16, 32, 48, 64, 96 for 0, 8, 9, 25, 33, 49, 65
    step = 1 << max(3, (samples - 1).bit_length() - 2) if samples else 8
    return max(1, -(-samples // step)) * step


Compute = Callable[[Hashable, Callable[..., tuple[Tensor, ...]], tuple[Tensor, ...]], tuple[Tensor, ...]]
"""Calls a function of tensors, given with a key that names it and all shapes; perhaps by replaying a CUDA graph."""


def call_directly(
    key: Hashable, function: Callable[..., tuple[Tensor, ...]], given: tuple[Tensor, ...]
) -> tuple[Tensor, ...]:
    """Call the function itself."""
    return function(*given)


@dataclass(frozen=True)
class _RowSteps:
    """One number for each row, in the schedule's order: longest first."""

    order: Indices  # places of the rows in the chunk
    clients: Indices
    sizes: Indices  # samples
    per_epoch: Indices  # steps of an epoch
    totals: Indices  # steps of the fold

    @property
    def longest(self) -> int:
        return int(self.totals[0]) if len(self.totals) else 0

    @property
    def last_epoch(self) -> Indices:
        # A row without samples has no steps. It counts as one step an epoch, so that nothing is divided by zero.
        return np.maximum((self.totals - 1) // np.maximum(self.per_epoch, 1), 0)


@dataclass(frozen=True)
class _TableSizes:
    """The numbers that decide the tables' shapes: with the same ones a recording serves again."""

    steps: int
    size: int  # samples of a full batch
    width: int  # samples that a batch has room for
    longest: int  # samples of the largest client
    epochs: int
    draws: int
    shuffled: bool


def split_of(over: Minibatches | FullPass) -> Split:
    """Give the split that a pass is over."""
    return "train" if isinstance(over, Minibatches) else over.split


def make_schedule(
    engine: Engine,
    over: Minibatches | FullPass,
    clients: Tensor,
    call: Call,
    fold: int,
    *,
    padded: bool = False,
    compute: Compute = call_directly,
) -> Schedule:
    """Make the schedule of a fold for the clients of a chunk, which are given on the host.

    With ``padded`` the tables are a little larger than the longest batch and run need, so that they have few shapes.
    """
    split = split_of(over)
    sizes = engine.host_sizes[split].numpy()[clients.numpy()]
    largest = int(sizes.max()) if len(sizes) else 0
    size = over.size or max(largest, 1)
    rows = _row_steps(engine, over, clients, sizes, size, call, fold)
    room = padded_size(largest) if padded else largest
    widest = largest
    if engine.even_batches and not padded and split == "train":
        widest = even_width(largest)  # which all rows of the chunk have in common
    elif engine.even_batches:
        widest = int(engine.host_sizes[split].max())
    width = padded_size(widest) if padded else widest
    last = rows.last_epoch
    shape = _TableSizes(
        steps=padded_size(rows.longest) if padded else rows.longest,
        size=size,
        width=min(over.size or (room if padded else width), width),
        longest=room,
        epochs=int(last.max()) + 1 if len(last) else 1,
        draws=over.draws if isinstance(over, Minibatches) else 1,
        shuffled=isinstance(over, Minibatches),
    )
    # What is one number a row is computed by NumPy, where an operation takes a microsecond and a launch takes ten. All
    # goes to the device in one transfer: a column for each number of a row, then its keys.
    numbers = [np.stack([rows.sizes, np.maximum(rows.per_epoch, 1), rows.clients, last], 1)]
    if shape.shuffled:
        base = engine.key("batches", torch.from_numpy(rows.clients), call, fold).numpy()[:, None]
        each = randomness.fold_in(base, np.arange(shape.draws))[:, :, None]
        numbers.append(randomness.fold_in(each, np.arange(shape.epochs)).reshape(len(rows.clients), -1))
    table = to_device(torch.from_numpy(np.concatenate(numbers, 1)), engine.device)
    ragged = engine.samples.splits[split]
    make = partial(_tables, shape, ragged.flat, ragged.offsets, engine.samples.dtype)
    index, weight, share = compute((split, shape, table.shape), make, (table,))
    sorted_already = bool((rows.order[:-1] < rows.order[1:]).all())
    return Schedule(
        None if sorted_already else to_device(torch.from_numpy(rows.order), engine.device),
        rows.totals.tolist(),
        index[:, : rows.longest],
        weight[: rows.longest],
        share[: rows.longest],
    )


def _row_steps(
    engine: Engine, over: Minibatches | FullPass, clients: Tensor, sizes: Indices, size: int, call: Call, fold: int
) -> _RowSteps:
    per_epoch = (sizes + size - 1) // size
    if isinstance(over, FullPass):
        totals = per_epoch
    elif over.steps is None or engine.most_passes is not None:
        totals = engine.epochs(over, clients, call, fold).numpy() * per_epoch
    else:
        totals = np.full_like(sizes, over.steps)
    order = np.argsort(-totals, kind="stable")
    return _RowSteps(order, clients.numpy()[order], sizes[order], per_epoch[order], totals[order])


def _tables(shape: _TableSizes, flat: Tensor, offsets: Tensor, dtype: torch.dtype, table: Tensor) -> tuple[Tensor, ...]:
    """Compute a schedule's tables from the numbers of each row, without waiting for the device."""
    sizes, per_epoch, clients, last = table[:, :4].split(1, dim=1)
    size, width, longest = shape.size, shape.width, shape.longest
    begin = offsets[clients].unsqueeze(-1)
    step = torch.arange(shape.steps, device=table.device)
    # Steps after a row's last one stay in its last epoch: they are never taken, but must point at some sample.
    epoch = torch.minimum(torch.div(step, per_epoch, rounding_mode="floor"), last)  # [rows, steps]
    place = (step - epoch * per_epoch).unsqueeze(-1) * size + torch.arange(width, device=table.device)
    counts = (sizes - place[..., 0]).clamp(0, size) if width else torch.zeros_like(epoch)
    place = torch.minimum(place, (sizes - 1).clamp_min(0).unsqueeze(-1))
    tables = []
    for draw in range(shape.draws):
        within = place
        if shape.shuffled:
            keys = table[:, 4 + draw * shape.epochs : 4 + (draw + 1) * shape.epochs]
            shuffled = randomness.permutations(keys, sizes, longest)  # [rows, epochs, longest]
            at = (epoch.unsqueeze(-1) * longest + place).flatten(1)
            within = shuffled.flatten(1).gather(1, at).view(place.shape)
        tables.append(flat[(begin + within).clamp_max(max(len(flat) - 1, 0))].transpose(0, 1))
    counts = counts.T
    real = torch.arange(width, device=table.device) < counts.unsqueeze(-1)
    weight = real.to(dtype) / counts.to(dtype).clamp_min(1).unsqueeze(-1)
    share = counts.to(dtype) / sizes.squeeze(1).clamp_min(1)
    return torch.stack(tables).contiguous(), weight.contiguous(), share.contiguous()
