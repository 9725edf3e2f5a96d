"""Which samples each row sees at each step, as one table for all rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie import randomness
from coterie.algorithms.base import Minibatches, Whole
from coterie.engines.base import Call, Engine


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
    counts
        Real samples ``[steps, rows]``.
    sizes
        The rows' samples in the split ``[rows]``.
    """

    order: Tensor | None
    totals: list[int]
    index: Tensor
    counts: Tensor
    sizes: Tensor

    def segments(self) -> list[tuple[int, int, int]]:
        """Cut the steps where rows drop out.

        Returns
        -------
        list of tuple
            First step, one past the last, and how many rows are left, for each segment.
        """
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

    Parameters
    ----------
    samples
        Samples that are needed.

    Returns
    -------
    int
        At least as many.

    Examples
    --------
    >>> [few_widths(samples) for samples in (0, 1, 7, 9, 33, 200)]
    [0, 1, 7, 10, 40, 224]
    """
    step = 1 << max(0, (samples - 1).bit_length() - 3) if samples else 1
    return -(-samples // step) * step


def make_schedule(
    engine: Engine, over: Minibatches | Whole, clients: Tensor, call: Call, fold: int, *, padded: bool = False
) -> Schedule:
    """Work out a fold's schedule: what is one number a row on the host, the tables on the engine's device.

    Parameters
    ----------
    engine
        Whose samples and streams.
    over
        The data of the fold.
    clients
        The clients of the chunk ``[rows]``, on the host.
    call
        When and why.
    fold
        Number of the fold within the task.
    padded
        Make the table a little wider than the longest batch, so that few widths serve all cohorts.

    Returns
    -------
    Schedule
        The table.
    """
    split = "train" if isinstance(over, Minibatches) else over.split
    ragged, sizes, device = engine.samples.splits[split], engine.host_sizes[split][clients], engine.device
    longest = int(sizes.max()) if len(sizes) else 0
    room = few_widths(longest) if padded else longest
    width = min(over.size or room, room)
    size = over.size or max(longest, 1)
    per_epoch = torch.div(sizes + size - 1, size, rounding_mode="floor")
    if isinstance(over, Whole):
        totals, draws = per_epoch, 1
    else:
        steps, draws = over.steps, over.draws
        epochs = engine.epochs(over, clients, call, fold)
        totals = epochs * per_epoch if steps is None else torch.full_like(sizes, steps)
    order = torch.argsort(totals, descending=True, stable=True)
    sorted_already = torch.equal(order, torch.arange(len(order)))
    clients, sizes, totals, per_epoch = clients[order], sizes[order], totals[order], per_epoch[order]
    longest_run = int(totals[0]) if len(totals) else 0

    per_epoch = per_epoch.clamp_min(1)
    last = torch.div(totals - 1, per_epoch, rounding_mode="floor").clamp_min(0)  # a row's last epoch
    rows = torch.stack([sizes, per_epoch, clients, last]).to(device).unsqueeze(-1)  # one transfer
    on_device, per = rows[0], rows[1]
    begin = ragged.offsets[rows[2]].unsqueeze(-1)
    step = torch.arange(longest_run, device=device)
    epoch = torch.minimum(torch.div(step, per, rounding_mode="floor"), rows[3])  # [rows, steps]
    place = (step - epoch * per).unsqueeze(-1) * size + torch.arange(width, device=device)
    counts = (on_device - place[..., 0]).clamp(0, size) if width else torch.zeros_like(epoch)
    place = torch.minimum(place, (on_device - 1).clamp_min(0).unsqueeze(-1))
    tables = []
    for draw in range(draws):
        within = place
        if isinstance(over, Minibatches):
            base = randomness.fold_in(engine.key("batches", clients, call, fold), draw).unsqueeze(1)
            key = randomness.fold_in(base, torch.arange(int(last.max()) + 1)).to(device)
            shuffled = randomness.permutations(key, on_device, longest)  # [rows, epochs, longest]
            flat = (epoch.unsqueeze(-1) * longest + place).flatten(1)
            within = shuffled.flatten(1).gather(1, flat).view(place.shape)
        tables.append(ragged.flat[(begin + within).clamp_max(max(len(ragged.flat) - 1, 0))].transpose(0, 1))
    return Schedule(
        None if sorted_already else order.to(device),
        totals.tolist(),
        torch.stack(tables).contiguous(),
        counts.T.contiguous(),
        on_device.squeeze(-1),
    )
