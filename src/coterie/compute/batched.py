"""The fast engine: all rows of a cohort in one computation.

Rows are sorted by how much data they have, so that those that are done drop out and nothing is computed for them, and
cut into chunks: on a GPU as many rows as fit its memory, on a CPU as many as stay in its cache through all their steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coterie import randomness
from coterie.algorithms.base import Batch, Fold, Minibatches, Net, Task
from coterie.compute.autotune import Times, convolution_times
from coterie.compute.cache import BoundedCache
from coterie.compute.cuda_graphs import Recording, Replays
from coterie.compute.engine import Call, Engine, Predict, join, pick, take
from coterie.compute.nets.layers import Convolution
from coterie.compute.nets.row_nets import Kernel, ModuleNet, RowNet, VmapNet, agrees, make_net
from coterie.compute.samples import Samples, Split
from coterie.compute.schedule import Schedule, at_once, make_schedule
from coterie.models.problem import Problem
from coterie.rows import Rows, matrix_units

_CPU_CHUNK_BYTES = 2**23
_PREDICT_ELEMENTS = 2**24
_RECORDINGS = 16
_TABLES = 8


@dataclass(frozen=True)
class _Table:
    """The samples of some clients in a block, split after split, each padded to the longest of them."""

    clients: Tensor
    index: Tensor  # of samples [clients, places]
    real: tuple[Tensor, ...]  # which places of the flat block are samples of each split


class BatchedEngine(Engine):
    """Runs all clients of a chunk at once.

    Parameters
    ----------
    problem
        What is learnt.
    samples
        The federation's samples.
    seed
        The experiment's seed.
    kernel
        How the model is applied to rows; ``None`` chooses for the model and device.
    convolution
        How convolutions are computed; ``None`` chooses.
    chunk
        Rows computed at once; ``None`` chooses.
    compile_steps
        Compile the clients' steps with ``torch.compile``; takes a while at the start.
    record
        Run steps on fixed buffers, recorded as CUDA graphs on a GPU; ``None`` does so on a GPU.
    precision
        How a GPU rounds what it multiplies.
    """

    name = "batched"

    def __init__(
        self,
        problem: Problem,
        samples: Samples,
        seed: int,
        *,
        kernel: Kernel | None = None,
        convolution: Convolution | None = None,
        chunk: int | None = None,
        compile_steps: bool = False,
        record: bool | None = None,
        precision: matrix_units.Precision = "float32",
    ) -> None:
        super().__init__(problem, samples, seed)
        on_cpu = self.device.type == "cpu"
        self.convolution: Convolution = convolution or "auto"
        self.kernel: Kernel = kernel or "stacked"
        self.measured: Times = {}
        self._net = self._make_net()
        self.chunk = chunk or self._memory_chunk()
        self.compile_steps = compile_steps
        self.record = (not on_cpu) if record is None else record
        self.precision = precision
        self._replays = Replays()
        self._recordings: BoundedCache[tuple[Hashable, ...], tuple[Task, Recording]] = BoundedCache(_RECORDINGS)
        self._tables: BoundedCache[tuple[tuple[Split, ...], int], _Table] = BoundedCache(_TABLES)
        self._flats: BoundedCache[tuple[tuple[Split, ...], int], tuple[Tensor, list[Tensor]]] = BoundedCache(_TABLES)

    def _make_net(self) -> RowNet:
        module, layout = self.problem.module, self.problem.layout
        net = make_net(module, layout, self.kernel, self.convolution)
        if not isinstance(net, ModuleNet | VmapNet) and not agrees(net, ModuleNet(module, layout), self._probe(), 1e-4):
            net = VmapNet(module, layout)
        if isinstance(net, VmapNet):
            self.kernel = "vmap"
        return net

    def measure(self, batch: int) -> None:
        """Find out how convolutions are the fastest, and compute them so from now on."""
        on_cpu = self.device.type == "cpu"
        self.measured = convolution_times(
            self.problem,
            self.samples,
            batch,
            record=self.record,
            precision=self.precision,
            chunk=self.chunk if on_cpu else None,
        )
        if self.measured:
            way, rows = next(iter(self.measured))
            self.convolve(way)
            self.chunk = rows if on_cpu else self.chunk  # on a GPU as many as its memory has room for

    def convolve(self, convolution: Convolution) -> None:
        """Compute convolutions in another way."""
        self.convolution = convolution
        self._net = self._make_net()

    @property
    def net(self) -> Net:
        """The model."""
        return self._net

    @property
    def choices(self) -> dict[str, Any]:
        """What decides the last bits of a result: kernels, chunks, threads."""
        own: dict[str, Any] = {"kernel": self.kernel, "convolution": self.convolution, "chunk": self.chunk}
        own |= {"compile": self.compile_steps, "record": self.record, "precision": self.precision}
        seconds = {f"{way}, {rows} at once": found for (way, rows), found in self.measured.items()}
        return super().choices | own | ({"measured_seconds": seconds} if seconds else {})

    def rounding(self) -> contextlib.AbstractContextManager[None]:
        """Let products be rounded as this engine was told."""
        return matrix_units.rounded(self.precision)

    def _probe(self) -> Tensor:
        index = torch.arange(6, device=self.device).remainder(len(self.samples.y)).view(2, 3)
        return self.samples.gather(index, torch.zeros(2, dtype=torch.int64, device=self.device))[0]

    def _memory_chunk(self) -> int | None:
        if self.device.type == "cpu":
            return None
        row = self.problem.layout.size * self.problem.start.element_size()
        free, _ = torch.cuda.mem_get_info(self.device)
        # Parameters, gradient, new parameters, an optimiser's two slots, the centre, and activations of that order.
        return int(max(1, min(4096, 0.6 * free // (16 * row))))

    def run(self, task: Task, clients: Tensor, state: Rows, message: Rows, call: Call) -> tuple[Rows, Rows]:
        """Run a task."""
        host = clients.cpu()
        order = torch.argsort(self.host_sizes["train"][host], descending=True, stable=True)
        chunk = self.chunk or self._cache_chunk(task)
        with self.rounding():
            if len(host) <= chunk and torch.equal(order, torch.arange(len(order))):
                return self._run_chunk(task, clients, host, state, message, call)
            chunks = order.to(self.device).split(chunk)
            parts = [
                self._run_chunk(task, clients[places], mine, take(state, places), pick(message, places), call)
                for places, mine in zip(chunks, host[order].split(chunk), strict=True)
            ]
        known: dict[tuple[int, ...], Tensor] = {}  # a model that is kept and also sent is put together once
        changes = _scattered([change for change, _ in parts], chunks, known)
        return changes, _scattered([reply for _, reply in parts], chunks, known)

    def _cache_chunk(self, task: Task) -> int:
        """As many rows as stay in a CPU's cache with their samples through all their steps."""
        largest = max((min(fold.over.size or 256, 256) for fold in task.folds()), default=0)
        if any(isinstance(part, nn.Conv2d) for part in self.problem.module.modules()):
            # Convolutions go one row after another in any case, and a larger batch's activations fill the cache.
            return 10 if largest <= 16 else 1
        sample = self.samples.x[0].numel() * self.problem.start.element_size()
        row = self.problem.layout.size * self.problem.start.element_size()
        return max(1, min(128, _CPU_CHUNK_BYTES // (row + largest * sample)))

    def _run_chunk(
        self, task: Task, clients: Tensor, host: Tensor, state: Rows, message: Rows, call: Call
    ) -> tuple[Rows, Rows]:
        context = self.client_context(clients, call, host)
        work = task.start(context, state, message)
        for number, fold in enumerate(task.folds()):
            # A recording is for one width: whatever the cohort's largest client, it must find one that was made.
            fixed = self.record or self.compile_steps
            schedule = make_schedule(
                self, fold.over, host, call, number, padded=fixed, replay=self._replays if self.record else at_once
            )
            dropout = None
            if isinstance(fold.over, Minibatches) and (self._net.draws or self.samples.noise is not None):
                dropout = self.key("dropout", host, call, number).to(self.device)
            work = self._fold(task, fold, number, schedule, work, clients, dropout)
            if fold.then is not None:
                work = fold.then(context, work)
        return task.finish(context, work)

    def _fold(
        self,
        task: Task,
        fold: Fold,
        number: int,
        schedule: Schedule,
        work: Rows,
        clients: Tensor,
        dropout: Tensor | None,
    ) -> Rows:
        if schedule.order is not None:
            work, clients = take(work, schedule.order), clients[schedule.order]
            dropout = None if dropout is None else dropout[schedule.order]
        if self.record or self.compile_steps:
            recording = self._recording(task, fold, number, schedule, work)
            work = recording.play(schedule, work, clients, dropout)
            return work if schedule.order is None else take(work, torch.argsort(schedule.order))
        draws, _, rows, width = schedule.index.shape
        x = self.samples.x
        memory = [x.new_empty(rows * width, *x.shape[1:]) for _ in range(draws)]
        done: list[Rows] = []
        for begin, end, active in schedule.segments():
            rows = len(next(iter(work.values())))
            if active < rows:
                done.append(take(work, slice(active, rows)))
                work = take(work, slice(0, active))
            for at in range(begin, end):
                batches = list(self._batches(schedule, at, active, clients, dropout, memory))
                work = fold.step(work, *batches)
        work = join([work, *reversed(done)])
        return work if schedule.order is None else take(work, torch.argsort(schedule.order))

    def _batches(
        self,
        schedule: Schedule,
        at: int,
        active: int,
        clients: Tensor,
        dropout: Tensor | None,
        memory: list[Tensor],
    ) -> Iterator[Batch]:
        draws = len(schedule.index)
        for draw in range(draws):
            key = None if dropout is None else randomness.fold_in(dropout[:active], at * draws + draw)
            x, y = self.samples.gather(schedule.index[draw, at, :active], clients[:active], key, memory[draw])
            yield Batch(
                self._net, self.problem.loss, x, y, schedule.weight[at, :active], schedule.share[at, :active], key
            )

    def _recording(self, task: Task, fold: Fold, number: int, schedule: Schedule, work: Rows) -> Recording:
        """Give the recording of this fold for so many rows: one for all rounds, as long as it is the same task."""
        shapes = tuple((name, tuple(value.shape), value.dtype) for name, value in work.items())
        draws, steps, _, width = schedule.index.shape
        key = (id(task), number, draws, width, shapes)
        held = self._recordings.get(key)
        if held is None or held[1].capacity < steps:
            step = torch.compile(fold.step, dynamic=False) if self.compile_steps else fold.step
            room = 1 << (steps - 1).bit_length() if steps else 0  # so that a slightly longer round finds room too
            held = (task, Recording(self._net, self.problem.loss, self.samples, fold, room, step))
        self._recordings[key] = held  # with the task, so that its id stays its own
        return held[1]

    def predict(self, predict: Predict, rows: Rows, clients: Tensor, split: Split, shared: bool = False) -> Tensor:
        """Apply each client's model to its own samples."""
        return self.predict_all(predict, rows, clients, (split,), shared)[0]

    def predict_all(
        self, predict: Predict, rows: Rows, clients: Tensor, splits: tuple[Split, ...], shared: bool = False
    ) -> list[Tensor]:
        """Apply models to several splits in one pass, where they fit together."""
        with torch.no_grad(), self.rounding():
            if shared:
                return self._predict_shared(predict, rows, clients, splits)
            if len(clients) <= (self.chunk or 128) and (table := self._table(clients, splits)) is not None:
                x, _ = self.samples.gather(table.index, clients)
                outputs = predict(self._net, rows, x).flatten(0, 1)
                return [outputs.index_select(0, real) for real in table.real]
            return [self._predict_each(predict, rows, clients, split) for split in splits]

    def _predict_shared(self, predict: Predict, rows: Rows, clients: Tensor, splits: tuple[Split, ...]) -> list[Tensor]:
        parts = self._flat(clients, splits)
        model = {name: value.unsqueeze(0) for name, value in rows.items()}
        block = max(1, _PREDICT_ELEMENTS // max(1, self.samples.x[0].numel()))
        pieces = []
        for part in torch.cat(parts).split(min(block, 4096)):
            x, _ = self.samples.gather(part.unsqueeze(0), clients[:1])
            pieces.append(predict(self._net, model, x)[0])
        outputs = torch.cat(pieces)
        return list(outputs.split([len(part) for part in parts]))

    def _flat(self, clients: Tensor, splits: tuple[Split, ...]) -> list[Tensor]:
        """Give the numbers of the samples of each split, client after client; for the same clients made once."""
        held = self._flats.get((splits, id(clients)))
        if held is None:
            held = clients, [self.samples.flat_index(clients, split) for split in splits]
            self._flats[splits, id(clients)] = held  # with the clients, so that their id stays their own
        return held[1]

    def _predict_each(self, predict: Predict, rows: Rows, clients: Tensor, split: Split) -> Tensor:
        chunk = self.chunk or 128
        together = len(clients) <= chunk
        sizes = self.sizes[split][clients]
        starts = sizes.cumsum(0) - sizes
        out: Tensor | None = None
        # Clients of similar size go into one block, so that little of it is padding; where there is one block for all,
        # the models stay where they are.
        everyone = torch.arange(len(clients), device=self.device)
        order = everyone if together else torch.argsort(sizes, descending=True, stable=True)
        for places in order.split(chunk):
            longest = int(sizes[places].max())
            if longest == 0:
                break
            step = max(1, min(longest, _PREDICT_ELEMENTS // max(1, len(places) * self.samples.x[0].numel())))
            model = rows if together else take(rows, places)
            for begin in range(0, longest, step):
                place = torch.arange(begin, min(begin + step, longest), device=self.device)
                real = place < sizes[places].unsqueeze(1)
                index, within = self._padded(clients[places], split, sizes[places].unsqueeze(1), place)
                x, _ = self.samples.gather(index, clients[places])
                outputs = predict(self._net, model, x)
                if out is None:
                    out = outputs.new_empty(int(sizes.sum()), *outputs.shape[2:])
                out[(starts[places].unsqueeze(1) + within)[real]] = outputs[real]
        if out is None:
            width = self.problem.module(self._probe()[0]).shape[1:]
            out = self.problem.start.new_empty(0, *width)
        return out

    def _padded(self, clients: Tensor, split: Split, sizes: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Give the samples at some places of each client, and those places; the last one again where there is none."""
        ragged = self.samples.splits[split]
        within = torch.minimum(place.expand(len(clients), -1), (sizes - 1).clamp_min(0))
        flat = (ragged.offsets[clients].unsqueeze(1) + within).clamp_max(max(0, len(ragged.flat) - 1))
        return ragged.flat[flat], within

    def _table(self, clients: Tensor, splits: tuple[Split, ...]) -> _Table | None:
        """Give the samples of clients that fit into one block, padded to the longest; made once for the same."""
        held = self._tables.get((splits, id(clients)))
        if held is not None:
            return held
        host = clients.cpu()
        sizes = [self.host_sizes[split][host] for split in splits]
        longest = [int(each.max()) for each in sizes]
        width = sum(longest)
        if not width or len(clients) * width * self.samples.x[0].numel() > _PREDICT_ELEMENTS:
            return None
        index, real, begin = [], [], 0
        for split, each, most in zip(splits, sizes, longest, strict=True):
            size, place = each.to(self.device).unsqueeze(1), torch.arange(most, device=self.device)
            index.append(self._padded(clients, split, size, place)[0])
            row, column = (place < size).nonzero(as_tuple=True)
            real.append(row * width + begin + column)
            begin += most
        table = _Table(clients, torch.cat(index, 1), tuple(real))
        self._tables[splits, id(clients)] = table  # with the clients, so that their id stays their own
        return table


def _scattered(parts: list[Rows], chunks: tuple[Tensor, ...], known: dict[tuple[int, ...], Tensor]) -> Rows:
    """Put the rows of all chunks together in the order of the clients."""
    out: Rows = {}
    for name in parts[0]:
        pieces = [part[name] for part in parts]
        seen = tuple(map(id, pieces))
        if seen not in known:
            whole = pieces[0].new_empty(sum(map(len, pieces)), *pieces[0].shape[1:])
            for places, piece in zip(chunks, pieces, strict=True):
                whole.index_copy_(0, places, piece)
            known[seen] = whole
        out[name] = known[seen]
    return out
