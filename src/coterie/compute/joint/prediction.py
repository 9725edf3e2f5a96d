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
from coterie.compute.engine import Predict, take
from coterie.compute.joint.asks import OutputsAsk
from coterie.compute.strips import strips
from coterie.memory import gpu_memory
from coterie.rows import Rows

Sizes = npt.NDArray[np.int64]

_BLOCK_ELEMENTS = 2**24  # numbers of the inputs in one block, as for a run alone
_MEMORY_SHARE = 64  # a block may take this part of what a GPU has free
_PLANS = 16  # sets of runs whose sample numbers are kept


@dataclass(frozen=True)
class _Strip:
    """The samples of some models, a row for each, padded to the longest."""

    models: Tensor | None  # which of the block's; None if all, in order
    index: Tensor  # sample numbers [rows, places]


@dataclass(frozen=True)
class _Block:
    """The samples of some runs' models, in strips of models with similar numbers of them."""

    asks: range  # places of the runs among those that asked
    counts: list[int]  # outputs of each
    strips: list[_Strip]
    real: Tensor | None  # where each output lies in the flattened strips; None if all of it are outputs, in order


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
        found = list[Tensor]()
        with torch.no_grad(), self._engine.rounding():
            for block in self._plan(asks):
                rows = _rows([asks[place] for place in block.asks])
                pieces = [self._of_strip(predict, rows, strip) for strip in block.strips]
                flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
                flat = flat if block.real is None else flat.index_select(0, block.real)
                found += flat.split(block.counts)
        return found

    def _of_strip(self, predict: Predict, rows: Rows, strip: _Strip) -> Tensor:
        """Give the outputs for all places of a strip, row after row."""
        samples, net = self._engine.samples, self._engine.row_net
        models = rows if strip.models is None else take(rows, strip.models)
        # Of a strip that is too large the places are taken one part after another.
        width = max(1, self._limit // max(1, len(strip.index) * samples.x[0].numel()))
        pieces = []
        for index in strip.index.split(width, dim=1):
            x, _ = samples.gather(index, index[:, 0], alike=net.reads_channels_once)
            pieces.append(predict(net, models, x))
        return (pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)).flatten(0, 1)

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
        if asks[0].shared:  # one model of each run, for which splits are one after another
            of_runs = [np.array([[self._sizes(ask).sum()]]) for ask in some]
        else:
            of_runs = [self._sizes(ask) for ask in some]
        device, sizes, flat = self._engine.device, np.concatenate(of_runs, 1), [self._flat(ask) for ask in some]
        groups = strips(sizes.sum(0), self._engine.samples.x[0].numel())
        first = np.zeros_like(sizes)  # where the outputs of each model for each split begin
        begin, shapes = 0, list[tuple[int, int]]()
        for models in groups:
            longest = sizes[:, models].max(1)
            width = int(longest.sum())
            within = (np.cumsum(longest) - longest)[:, None] + width * np.arange(len(models))
            first[:, models] = begin + within
            begin += width * len(models)
            shapes.append((len(models), width))
        real = np.concatenate(_places(of_runs, first))
        index = np.zeros(begin, dtype=np.int64)  # padding is the first sample of all
        index[real] = np.concatenate(flat)
        whole = real.size == index.size and bool((np.diff(real) == 1).all())
        made, begin = list[_Strip](), 0
        for models, (rows, width) in zip(groups, shapes, strict=True):
            if not width:  # models of clients that have no samples
                continue
            own = torch.from_numpy(index[begin : begin + rows * width].reshape(rows, width)).to(device)
            made.append(_Strip(None if len(groups) == 1 else torch.from_numpy(models).to(device), own))
            begin += rows * width
        where = None if whole else torch.from_numpy(real).to(device)
        return _Block(part, [len(each) for each in flat], made, where)

    def _flat(self, ask: OutputsAsk) -> Sizes:
        """Give the numbers of a run's samples, split after split and client after client."""
        clients = torch.from_numpy(self._clients(ask)).to(self._engine.device)
        parts = [self._engine.samples.flat_index(clients, split) for split in ask.splits]
        numbers: Sizes = torch.cat(parts).cpu().numpy()
        return numbers


def _places(sizes: Sequence[Sizes], first: Sizes) -> list[Sizes]:
    """Say where each output lies, in the order of runs, splits and models.

    ``sizes`` has for each run how many samples its models have in each split ``[splits, models]``, and ``first`` where
    the outputs of all runs' models begin.
    """
    ends = np.cumsum([each.shape[1] for each in sizes])
    found = []
    for each, end in zip(sizes, ends, strict=True):
        counts, begins = each.ravel(), first[:, end - each.shape[1] : end].ravel()
        found.append(np.repeat(begins - np.cumsum(counts) + counts, counts) + np.arange(counts.sum()))
    return found


def _rows(asks: Sequence[OutputsAsk]) -> Rows:
    if asks[0].shared:
        return {name: torch.stack([ask.rows[name] for ask in asks]) for name in asks[0].rows}
    return {name: torch.cat([ask.rows[name] for ask in asks]) for name in asks[0].rows}
