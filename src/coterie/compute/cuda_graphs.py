"""Folds on buffers that stay where they are, so that a step can be recorded once and played again.

On a GPU the steps of federated learning are short, and most of their time would go into launching kernels. So the rows,
the table of samples and the step's number live in fixed buffers; one step is recorded as a CUDA graph and replayed for
every step of every round. Rows that are done would change the shape: their result is copied out, and the graph goes on
with the next power of two of rows, whose padding rows compute what nobody reads. That keeps the number of recordings
to the logarithm of the number of rows.

On a CPU the same code runs without the recording, which is how its logic is tested.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from coterie import randomness
from coterie.algorithms.base import Batch, Fold, Net
from coterie.compute.cache import BoundedCache
from coterie.compute.engine import join, take
from coterie.compute.samples import Samples
from coterie.compute.schedule import Schedule
from coterie.rows import Rows

Result = TypeVar("Result")

_HELD = 16
"""Recordings of small functions that are kept."""


def bucket(rows: int, most: int) -> int:
    """Give the next power of two, but no more than there are."""
    return min(most, 1 << max(0, rows - 1).bit_length())


def _aligned(like: Tensor) -> Tensor:
    """Give memory for rows that begin on 256-byte boundaries: a GPU's fastest matrix products need aligned rows."""
    if like.dim() != 2 or like.shape[1] < 1024:
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    width = -(-like.shape[1] // 64) * 64
    return like.new_empty(len(like), width)[:, : like.shape[1]]


class Replays:
    """Functions of small tensors on a GPU, recorded for the shapes that come again.

    What a call gives lies in the recording's own memory: it is to be used before the next call.
    """

    def __init__(self) -> None:
        self._held: BoundedCache[Hashable, tuple[tuple[Tensor, ...], tuple[Tensor, ...], Any]] = BoundedCache(_HELD)
        self._seen: BoundedCache[Hashable, None] = BoundedCache(4 * _HELD)

    def __call__(
        self, key: Hashable, function: Callable[..., tuple[Tensor, ...]], given: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Compute a function, from a recording if this key was seen before."""
        if not given[0].is_cuda:
            return function(*given)
        if key not in self._held:
            first = key not in self._seen
            self._seen[key] = None
            if first:  # shapes that never come again are not worth a recording
                return function(*given)
            inputs = tuple(value.clone() for value in given)
            with _warmed(lambda: function(*inputs)):
                graph, outputs = _captured(lambda: function(*inputs))
            self._held[key] = inputs, outputs, graph
        inputs, outputs, graph = self._held[key]
        for own, value in zip(inputs, given, strict=True):
            own.copy_(value)
        graph.replay()
        return outputs


def _captured(function: Callable[[], Result]) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Record what a function does; what it gives lies in the recording's own memory."""
    graph = torch.cuda.CUDAGraph()
    with _recorded_as(graph):
        result = function()
    return graph, result


@contextlib.contextmanager
def _recorded_as(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    # An older engine's recordings may wait in a cycle for the garbage collector, and giving one up in the middle of
    # another would break that.
    collects = gc.isenabled()
    gc.disable()
    try:
        # Another thread may be fetching the next cohort's rows: what it does on the device is none of the recording's.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            yield
    finally:
        if collects:
            gc.enable()


def recorded(function: Callable[[], Any], record: bool) -> Callable[[], Any]:
    """Give a function that does the same from a recording."""
    if not record:
        return function
    with _warmed(function):
        graph, _ = _captured(function)
    return graph.replay


@contextlib.contextmanager
def _warmed(function: Callable[[], Any]) -> Iterator[None]:
    """Run a function on a side stream first: libraries take their workspaces outside of the recording."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            function()
    torch.cuda.current_stream().wait_stream(side)
    yield


@dataclass
class Recording:
    """The buffers of one fold, and its recorded steps.

    Parameters
    ----------
    net
        The model.
    per_sample
        Loss of each sample.
    samples
        The federation's samples.
    fold
        The fold.
    capacity
        Steps that the tables have room for.
    step
        Computes one step: :attr:`Fold.step`, or a compiled form of it.
    """

    net: Net
    per_sample: Callable[[Tensor, Tensor], Tensor]
    samples: Samples
    fold: Fold
    capacity: int
    step: Callable[..., Rows]
    _buffers: Rows = field(default_factory=dict)
    _work: Rows = field(default_factory=dict)
    _replays: dict[int, Callable[[], None]] = field(default_factory=dict)

    def play(self, schedule: Schedule, work: Rows, clients: Tensor, dropout: Tensor | None) -> Rows:
        """Run the fold."""
        rows = len(clients)
        segments = schedule.segments()
        if not segments:
            return work
        self._load(schedule, work, clients, dropout)
        missing = {bucket(active, rows) for _, _, active in segments} - self._replays.keys()
        for size in sorted(missing, reverse=True):
            self._replays[size] = self._record(size)
        if missing:
            self._load(schedule, work, clients, dropout)
        done: list[Rows] = []
        left = rows
        for begin, end, active in segments:
            if active < left:
                done.append({name: value[active:left].clone() for name, value in self._work.items()})
                left = active
            replay = self._replays[bucket(active, rows)]
            for _ in range(begin, end):
                replay()
        last = {name: value[:left].clone() for name, value in self._work.items()}
        return join([last, *reversed(done)])

    def _load(self, schedule: Schedule, work: Rows, clients: Tensor, dropout: Tensor | None) -> None:
        steps = len(schedule.share)
        given = {
            "index": schedule.index,
            "weight": schedule.weight,
            "share": schedule.share,
            "clients": clients,
        } | ({} if dropout is None else {"dropout": dropout})
        if not self._buffers:
            for name, value in given.items():
                shape = list(value.shape)
                if name in ("index", "weight", "share"):
                    shape[1 if name == "index" else 0] = self.capacity
                self._buffers[name] = torch.zeros(shape, dtype=value.dtype, device=value.device)
            self._buffers["at"] = torch.zeros(1, dtype=torch.int64, device=clients.device)
            self._work = {name: _aligned(value) for name, value in work.items()}
        for name, value in given.items():
            target = self._buffers[name]
            if name == "index":
                target[:, :steps].copy_(value)
            else:
                target[: len(value)].copy_(value)
        self._buffers["at"].zero_()
        for name, value in work.items():
            self._work[name].copy_(value)

    def _one_step(self, rows: int, rewound: bool = False) -> None:
        at = self._buffers["at"]
        if rewound:
            at.zero_()
        index = self._buffers["index"].index_select(1, at)[:, 0, :rows]
        weight = self._buffers["weight"].index_select(0, at)[0, :rows]
        share = self._buffers["share"].index_select(0, at)[0, :rows]
        clients = self._buffers["clients"][:rows]
        batches = []
        for draw in range(len(index)):
            key = None
            if "dropout" in self._buffers:
                key = randomness.fold_in(self._buffers["dropout"][:rows], at * len(index) + draw)
            x, y = self.samples.gather(index[draw], clients, key)
            batches.append(Batch(self.net, self.per_sample, x, y, weight, share, key))
        given = take(self._work, slice(0, rows))
        for name, value in self.step(given, *batches).items():
            if value is not given[name]:
                given[name].copy_(value)
        at.add_(1)

    def _record(self, rows: int) -> Callable[[], None]:
        if not self.samples.y.is_cuda:
            return lambda: self._one_step(rows)
        with _warmed(lambda: self._one_step(rows, rewound=True)):
            self._buffers["at"].zero_()
            graph, _ = _captured(lambda: self._one_step(rows))
        return graph.replay
