"""Steps that are recorded once as CUDA graphs and replayed.

On a GPU the steps of federated learning are short, and most of their time would go into launching kernels: a round of
an MLP took 25 ms without recordings and 10 with them. So the rows, the tables of samples and the step's number live in
fixed buffers; one step is recorded and replayed for every step of every round. Rows that are done would change the
shape. Their result is copied out, and a few rows more than are left go on; these padding rows compute what nobody
reads. That keeps the number of recordings to the logarithm of the number of rows. Recordings of steps share their
memory: no two are ever played at the same time, and what a step gives lies in the buffers.

On a CPU the same code runs without recording, which is how its logic is tested.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import warnings
import weakref
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from coterie import kernels, randomness
from coterie.algorithms.base import Batch, Net
from coterie.compute._cache import BoundedCache
from coterie.compute.engine import go_on, join, take
from coterie.compute.samples import Samples, Split
from coterie.compute.schedule import Schedule, padded_size
from coterie.errors import CoterieWarning
from coterie.rows import Rows

Output = TypeVar("Output")

_GRAPHS = 16  # recordings of small functions that are kept
_SHAPES = 4 * _GRAPHS  # shapes that are remembered, so that the second of a kind is recorded
_ALIGNED_WIDTH = 64  # float32 numbers to 256 bytes
_WARM_UPS = 2
_FEW_ROWS = 32


def padded_rows(rows: int, most: int) -> int:
    """Round a number of rows up to one of four to an octave, few rows to a power of two, but not beyond ``most``.

    With powers of two alone a third of all rows was padding where clients have different amounts of data; of few rows a
    step takes about as long whatever their number.
    """
    # 1, 2, 4, 8, 16, 32, 40, 56, 160 for 1, 2, 3, 5, 9, 17, 33, 50, 129
    if rows <= _FEW_ROWS:
        return min(most, 1 << max(0, rows - 1).bit_length())
    return min(most, padded_size(rows))


def _aligned(like: Tensor) -> Tensor:
    """Return memory for rows that begin on 256-byte boundaries, as a GPU's fastest matrix products need them."""
    # An MLP's round went from 5.75 to 4.84 ms (TF32). For narrow rows the padding would be a large part of the memory.
    if like.dim() != 2 or like.shape[1] < 16 * _ALIGNED_WIDTH:
        return torch.empty_like(like, memory_format=torch.contiguous_format)
    width = -(-like.shape[1] // _ALIGNED_WIDTH) * _ALIGNED_WIDTH
    return like.new_empty(len(like), width)[:, : like.shape[1]]


class GraphCache:
    """Calls functions of small tensors by replaying CUDA graphs, one for each function and shape.

    The results lie in the graph's own memory, so they must be used before the next call.
    """

    def __init__(self) -> None:
        self._graphs: BoundedCache[Hashable, tuple[tuple[Tensor, ...], tuple[Tensor, ...], Any]]
        self._graphs = BoundedCache(_GRAPHS)
        self._seen: BoundedCache[Hashable, None] = BoundedCache(_SHAPES)

    def __call__(
        self, key: Hashable, function: Callable[..., tuple[Tensor, ...]], given: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Call a function that does not wait for the device; ``key`` names the function and all shapes."""
        if not given[0].is_cuda:
            return function(*given)
        if key not in self._graphs:
            first = key not in self._seen
            self._seen[key] = None
            if first:  # a shape that never comes again is not worth a recording
                return function(*given)
            inputs = tuple(value.clone() for value in given)
            _warm_up(lambda: function(*inputs))
            graph, outputs = _capture(lambda: function(*inputs))
            self._graphs[key] = inputs, outputs, graph
        inputs, outputs, graph = self._graphs[key]
        for own, value in zip(inputs, given, strict=True):
            own.copy_(value)
        graph.replay()
        return outputs


def recorded(function: Callable[[], Any], record: bool) -> Callable[[], Any]:
    """Return a function that replays what ``function`` does on fixed memory of a GPU; itself if ``record`` is false."""
    if not record:
        return function
    _warm_up(function)
    return _replay_of(function)


def _replay_of(function: Callable[[], Any]) -> Callable[[], Any]:
    """Record a function that has warmed up; what cannot be recorded is called as it is, with a warning.

    A model cannot be recorded that reads from the device in ``forward``, or copies to it.
    """
    try:
        graph, _ = _capture(function, _memory_of_steps(torch.cuda.current_device()))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        warnings.warn(
            f"a step of this model cannot be recorded as a CUDA graph ({str(error).partition(chr(10))[0].strip()}): "
            "its operations are launched one by one every time, which takes longer. In forward it may not read from "
            "the device (.item, .cpu) or copy to it (.to, torch.tensor of a list): what is always the same can be a "
            "buffer",
            CoterieWarning,
            stacklevel=2,
        )
        return function
    return graph.replay


def _warm_up(function: Callable[[], Any]) -> None:
    """Run a function on a side stream, so that libraries take their workspaces before it is recorded."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UPS):
            function()
    torch.cuda.current_stream().wait_stream(side)


class _SharedMemory:
    """The memory that recordings share, each of which may write over what another one left there."""

    def __init__(self) -> None:
        self._name: Any = None
        self._users: weakref.WeakSet[Any] = weakref.WeakSet()

    @property
    def name(self) -> Any:
        """What PyTorch knows it by: another one when all recordings in it are gone, with which it went."""
        if not self._users:
            self._name = torch.cuda.graph_pool_handle()
        return self._name

    def used_by(self, graph: Any) -> None:
        """Take note of a recording."""
        self._users.add(graph)

    def forget(self) -> None:
        """Share other memory from now on: a recording that failed leaves PyTorch recording into this one."""
        self._users = weakref.WeakSet()


@functools.cache
def _memory_of_steps(device: int) -> _SharedMemory:
    return _SharedMemory()


def _capture(
    function: Callable[[], Output], shared: _SharedMemory | None = None
) -> tuple[torch.cuda.CUDAGraph, Output]:
    """Record what a function does; its results lie in the graph's own memory, or in one that it shares."""
    graph = torch.cuda.CUDAGraph()
    try:
        with _recorded_as(graph, None if shared is None else shared.name):
            result = function()
    except BaseException:
        if shared is not None:
            shared.forget()
        raise
    if shared is not None:
        shared.used_by(graph)
    return graph, result


@contextlib.contextmanager
def _recorded_as(graph: torch.cuda.CUDAGraph, memory: Any) -> Iterator[None]:
    # The garbage collector may find the graphs of an engine that is gone, and to destroy a graph while another one is
    # recorded makes the recording fail. It did, in one of 897 tests.
    collects = gc.isenabled()
    gc.disable()
    try:
        # Another thread may be fetching the next cohort's rows; with the default mode its work would end the recording.
        with torch.cuda.graph(graph, pool=memory, capture_error_mode="thread_local"):
            yield
    finally:
        if collects:
            gc.enable()


@dataclass
class RecordedFold:
    """The buffers of one fold and its recorded steps, for one shape of rows and batches.

    Parameters
    ----------
    net
        The model.
    per_sample
        Loss of each sample.
    samples
        The federation's samples.
    split
        Which of them the fold passes over.
    capacity
        Steps that the tables have room for.
    step
        Computes one step: :attr:`coterie.algorithms.base.Fold.step`, or a compiled form of it.
    alike
        Whether the model reads channels that are one in memory as they are.
    """

    net: Net
    per_sample: Callable[[Tensor, Tensor], Tensor]
    samples: Samples
    split: Split
    capacity: int
    step: Callable[..., Rows]
    alike: bool = False
    _buffers: Rows = field(default_factory=dict)
    _work: Rows = field(default_factory=dict)
    _replays: dict[int, Callable[[], None]] = field(default_factory=dict)

    def play(
        self,
        schedule: Schedule,
        work: Rows,
        clients: Tensor,
        dropout: Tensor | None,
        before_step: Callable[[], None] = go_on,
    ) -> Rows:
        """Run the fold on rows that lie in the schedule's order, and return the new rows."""
        rows = len(clients)
        segments = schedule.segments()
        if not segments:
            return work
        self._load(schedule, work, clients, dropout)
        missing = {padded_rows(active, rows) for _, _, active in segments} - self._replays.keys()
        for size in sorted(missing, reverse=True):
            self._replays[size] = self._record(size)
        if missing:  # to warm up is to take steps: begin again from the rows that were given
            self._load(schedule, work, clients, dropout)
        done: list[Rows] = []
        left = rows
        for begin, end, active in segments:
            if active < left:
                done.append({name: value[active:left].clone() for name, value in self._work.items()})
                left = active
            replay = self._replays[padded_rows(active, rows)]
            for _ in range(begin, end):
                before_step()
                replay()
        last = {name: value[:left].clone() for name, value in self._work.items()}
        return join([last, *reversed(done)])

    # A recorded step reads and writes fixed addresses, so that whatever a round brings is copied into the same buffers.
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
        # The step's number lies on the device and is counted there: a recording cannot be given a number by the host.
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
            x, y = self.samples.gather(index[draw], clients, key, alike=self.alike)
            given_weight, given_share, alike = weight, share, None
            if self.samples.class_weights is not None:
                alike = weight
                given_weight, given_share = self.samples.class_weights.apply(clients, y, weight, share, self.split)
            batches.append(Batch(self.net, self.per_sample, x, y, given_weight, given_share, key, alike))
        given = take(self._work, slice(0, rows))
        for name, value in self.step(given, *batches).items():
            if value is not given[name]:  # descend_ has changed it in place
                given[name].copy_(value)
        at.add_(1)

    def _record(self, rows: int) -> Callable[[], None]:
        if not self.samples.y.is_cuda or not self.samples.on_device:
            return lambda: self._one_step(rows)
        with kernels.rehearsal():
            self._one_step(rows, rewound=True)
        _warm_up(lambda: self._one_step(rows, rewound=True))
        self._buffers["at"].zero_()
        return _replay_of(lambda: self._one_step(rows))
