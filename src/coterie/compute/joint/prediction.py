"""How the models of several runs are applied to their clients' samples in one call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coterie.compute._cache import BoundedCache, Identity
from coterie.compute.batched import BatchedEngine
from coterie.compute.engine import Predict
from coterie.compute.joint.asks import OutputsAsk
from coterie.memory import gpu_memory
from coterie.rows import Rows

Sizes = npt.NDArray[np.int64]

_BLOCK_ELEMENTS = 2**24  # numbers of the inputs in one block, as for a run alone
_MEMORY_SHARE = 64  # a block may take this part of what a GPU has free
_PLANS = 16  # sets of runs whose sample numbers are kept


@dataclass(frozen=True)
class _Block:
    """The samples of some runs' models, a row for each, padded to the longest."""

    asks: range  # places of the runs among those that asked
    counts: list[int]  # outputs of each
    index: Tensor  # sample numbers [rows, places]
    real: Tensor | None  # where each output lies in the flattened block; None if all of it are outputs, in order


class JointPrediction:
    """Applies models of several runs.

    Parameters
    ----------
    engine
        The engine of the federation of all runs' clients.
    firsts
        The number of each run's first client there.
    """

    def __init__(self, engine: BatchedEngine, firsts: Sequence[int]) -> None:
        self._engine, self._firsts = engine, firsts
        self._plans: BoundedCache[tuple[object, ...], list[_Block]] = BoundedCache(_PLANS)
        self._limit = _BLOCK_ELEMENTS
        if engine.device.type == "cuda":
            free, _ = gpu_memory(engine.device)
            self._limit = max(self._limit, free // _MEMORY_SHARE // engine.samples.dtype.itemsize)

    def outputs(self, predict: Predict, asks: Sequence[OutputsAsk]) -> list[Tensor]:
        """Give each run's outputs for its samples, split after split and client after client.

        The asks must be for the same splits, all with one model or all with one for each client.
        """
        samples, found = self._engine.samples, list[Tensor]()
        with torch.no_grad(), self._engine.rounding():
            for block in self._plan(asks):
                some = [asks[place] for place in block.asks]
                pieces = []
                # Of a block that is too large the places are taken one part after another.
                width = max(1, self._limit // max(1, len(block.index) * samples.x[0].numel()))
                rows = _rows(some)
                for index in block.index.split(width, dim=1):
                    x, _ = samples.gather(index, index[:, 0])
                    pieces.append(predict(self._engine.net, rows, x))
                flat = (pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)).flatten(0, 1)
                flat = flat if block.real is None else flat.index_select(0, block.real)
                found += flat.split(block.counts)
        return found

    def _plan(self, asks: Sequence[OutputsAsk]) -> list[_Block]:
        key = asks[0].splits, asks[0].shared, *(Identity(ask.clients) for ask in asks)
        if key not in self._plans:
            self._plans[key] = [self._block(asks, part) for part in self._parts(asks)]
        return self._plans[key]

    def _parts(self, asks: Sequence[OutputsAsk]) -> Iterator[range]:
        """Cut runs into parts whose blocks are small enough, if each has one."""
        if asks[0].shared:
            yield range(len(asks))
            return
        begin, rows, longest = 0, 0, np.zeros(len(asks[0].splits), dtype=np.int64)
        for place, ask in enumerate(asks):
            sizes = self._sizes(ask)
            wider = np.maximum(longest, sizes.max(1))
            numbers = (rows + sizes.shape[1]) * int(wider.sum()) * self._engine.samples.x[0].numel()
            if place > begin and numbers > self._limit:
                yield range(begin, place)
                begin, rows, wider = place, 0, sizes.max(1)
            rows, longest = rows + sizes.shape[1], wider
        yield range(begin, len(asks))

    def _sizes(self, ask: OutputsAsk) -> Sizes:
        """Give how many samples each client has in each split ``[splits, clients]``."""
        clients = self._clients(ask)
        return np.stack([self._engine.host_sizes[split].numpy()[clients] for split in ask.splits])

    def _clients(self, ask: OutputsAsk) -> Sizes:
        numbers: Sizes = ask.clients.cpu().numpy() + self._firsts[ask.run]
        return numbers

    def _block(self, asks: Sequence[OutputsAsk], part: range) -> _Block:
        some = [asks[place] for place in part]
        sizes = [self._sizes(ask) for ask in some]
        counts = [int(each.sum()) for each in sizes]
        flat = [self._flat(ask) for ask in some]
        if asks[0].shared:
            rows, places = _places([np.array([[count]]) for count in counts])
        else:
            rows, places = _places(sizes)
        width = int(places.max()) + 1
        index = np.zeros((int(rows.max()) + 1, width), dtype=np.int64)  # padding is the first sample of all
        index[rows, places] = np.concatenate(flat)
        real = rows * width + places
        device, whole = self._engine.device, real.size == index.size and bool((np.diff(real) == 1).all())
        where = None if whole else torch.from_numpy(real).to(device)
        return _Block(part, counts, torch.from_numpy(index).to(device), where)

    def _flat(self, ask: OutputsAsk) -> Sizes:
        """Give the numbers of a run's samples, split after split and client after client."""
        clients = torch.from_numpy(self._clients(ask)).to(self._engine.device)
        parts = [self._engine.samples.flat_index(clients, split) for split in ask.splits]
        numbers: Sizes = torch.cat(parts).cpu().numpy()
        return numbers


def _places(sizes: Sequence[Sizes]) -> tuple[Sizes, Sizes]:
    """Say in which row and place of a block each sample lies.

    ``sizes`` has for each run how many samples its models have in each split ``[splits, models]``; in the block, splits
    lie side by side, each as wide as the longest. Samples are in the order of runs, splits and models.
    """
    longest = np.max([each.max(1) for each in sizes], axis=0)
    begins = np.cumsum(longest) - longest
    rows, places, first = [], [], 0
    for each in sizes:
        for split, begin in zip(each, begins, strict=True):
            rows.append(np.repeat(np.arange(first, first + len(split)), split))
            places.append(begin + np.arange(split.sum()) - np.repeat(np.cumsum(split) - split, split))
        first += each.shape[1]
    return np.concatenate(rows), np.concatenate(places)


def _rows(asks: Sequence[OutputsAsk]) -> Rows:
    if asks[0].shared:
        return {name: torch.stack([ask.rows[name] for ask in asks]) for name in asks[0].rows}
    return {name: torch.cat([ask.rows[name] for ask in asks]) for name in asks[0].rows}
