"""The fast engine: all rows of a cohort in one computation.

Rows are sorted by the size of their data, so that a row that is done drops out and nothing more is computed for it.
They are cut into chunks: on a GPU as many rows as fit into its memory, on a CPU as many as stay in its cache through
all their steps.

The way of a step on a GPU: :meth:`BatchedEngine.run` sorts and cuts the rows;
:func:`~coterie.compute.schedule.make_schedule` says which samples each row sees at each step;
:class:`~coterie.compute.cuda_graphs.RecordedFold` records the method's step once and replays it; within it
:meth:`~coterie.compute.nets.stacked.StackedNet.descend_` walks the model's graph and launches the kernels.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from coterie import randomness
from coterie.algorithms.base import Batch, Fold, Minibatches, Net, Task
from coterie.algorithms.contract import check_rows, checked_step
from coterie.compute._cache import BoundedCache, Identity
from coterie.compute._prediction import BatchedPrediction
from coterie.compute.autotune import Times, convolution_times
from coterie.compute.cuda_graphs import GraphCache, RecordedFold
from coterie.compute.engine import Call, Engine, Predict, finished, in_client_order, join, pick, take, widest_batch
from coterie.compute.nets.folded import FoldedNet
from coterie.compute.nets.layers import Convolution
from coterie.compute.nets.row_net import RowNet, VmapNet
from coterie.compute.nets.sound_net import sound_net
from coterie.compute.nets.stacked import Kernel
from coterie.compute.sample_costs import bytes_of_sample
from coterie.compute.samples import Samples, Split
from coterie.compute.schedule import Schedule, call_directly, even_width, make_schedule, split_of
from coterie.memory import gpu_memory
from coterie.models.own_buffers import moving_buffers
from coterie.models.problem import Problem
from coterie.rows import Rows, matrix_units
from coterie.rows.host_copies import on_host, to_device

_CPU_CHUNK_BYTES = 2**23  # of rows and samples, which then stay in a CPU's cache through all steps of the rows
_CPU_CHUNK_ROWS = 128
_CPU_ACTIVATION_BYTES = 2**28  # of a model that is mostly frozen
_GPU_CHUNK_ROWS = 4096  # at most, where the rows are so small that memory does not bound them
_GPU_MEMORY = 0.6  # of what is free; the rest is for the server's half and the buffers of recordings
_RECORDED_FOLDS = 16


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
    batch
        The largest batches that clients take, for a model whose activations are counted; 0 for all of a client's
        samples.
    """

    name = "batched"
    fewest_rows: int = 1
    """Rows that take a step at least: one by itself is multiplied by another routine, which rounds otherwise."""

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
        batch: int = 0,
    ) -> None:
        super().__init__(problem, samples, seed)
        on_cpu = self.device.type == "cpu"
        self.convolution: Convolution = convolution or "auto"
        self.kernel: Kernel = kernel or "stacked"
        self.measured: Times = {}
        self._net = self._make_net()
        # Of a model that has far more to compute with than to train, the rows say nothing about its activations.
        counted = isinstance(self._net, FoldedNet)
        self._sample_bytes = bytes_of_sample(self._net, problem.start, self.probe()) if counted else 0
        self.chunk = chunk or self._memory_chunk(batch or int(self.host_sizes["train"].max()))
        self.compile_steps = compile_steps
        # Which samples are padding decides what a module that changes its own buffers is given: the host must look.
        fixed = samples.on_device and not moving_buffers(problem.module)
        self.record = ((not on_cpu) if record is None else record) and fixed
        self.precision = precision
        self._graphs = GraphCache()
        self._recorded: BoundedCache[tuple[Hashable, ...], RecordedFold] = BoundedCache(_RECORDED_FOLDS)
        self._prediction = BatchedPrediction(samples, self.sizes, self.host_sizes, self._samples_at_once())

    def _make_net(self) -> RowNet:
        net = sound_net(self.problem.module, self.problem.layout, self.probe(), self.kernel, self.convolution)
        self.kernel = "vmap" if isinstance(net, VmapNet) else self.kernel
        return net

    def measure(self, batch: int) -> None:
        """Time all ways to compute convolutions, with batches of this size (0: all samples), and use the fastest."""
        on_cpu = self.device.type == "cpu"
        self.measured = convolution_times(
            self.problem,
            self.samples,
            batch,
            record=self.record,
            precision=self.precision,
            chunk=self.chunk if on_cpu else None,
            threads=self.threads,
        )
        if self.measured:
            way, rows = next(iter(self.measured))
            self.convolve(way)
            self.chunk = rows if on_cpu else self.chunk  # on a GPU the chunk is what fits into its memory

    def convolve(self, convolution: Convolution) -> None:
        """Compute convolutions in another way from now on."""
        self.convolution = convolution
        self._net = self._make_net()

    @property
    def net(self) -> Net:
        """The model."""
        return self._net

    @property
    def row_net(self) -> RowNet:
        """The model, as what it is here."""
        return self._net

    @property
    def choices(self) -> dict[str, Any]:
        """What decides the last bits of a result: kernels, chunks, threads."""
        own: dict[str, Any] = {"kernel": self.kernel, "convolution": self.convolution, "chunk": self.chunk}
        own |= {"compile": self.compile_steps, "record": self.record, "precision": self.precision}
        seconds = {f"{way}, {rows} at once": found for (way, rows), found in self.measured.items()}
        return super().choices | own | ({"measured_seconds": seconds} if seconds else {})

    def rounding(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a GPU rounds products as the engine was configured to."""
        return matrix_units.rounded(self.precision)

    def probe(self) -> Tensor:
        """Give a few samples to try nets on."""
        index = torch.arange(6, device=self.device).remainder(len(self.samples.y)).view(2, 3)
        return self.samples.gather(index, torch.zeros(2, dtype=torch.int64, device=self.device))[0]

    def _samples_at_once(self) -> int | None:
        """Return how many samples are predicted at once, where their activations are counted."""
        if not self._sample_bytes:
            return None
        room = _CPU_ACTIVATION_BYTES
        if self.device.type != "cpu":
            room = gpu_memory(self.device)[1] // 4  # of all, so that a resumed run does the same
        return max(1, room // self._sample_bytes)

    def _memory_chunk(self, batch: int) -> int | None:
        if self.device.type == "cpu":
            if not self._sample_bytes:
                return None
            return max(1, min(_CPU_CHUNK_ROWS, _CPU_ACTIVATION_BYTES // (batch * self._sample_bytes)))
        row = self.problem.layout.size * self.problem.start.element_size()
        free, _ = gpu_memory(self.device)
        # A row takes about 16 times its parameters: these, their gradient, the new ones, two slots of an optimiser, the
        # centre of a proximal term, and activations of about the same size.
        activations = 2 * batch * self._sample_bytes  # and as much for the gradients that come back through them
        return int(max(1, min(_GPU_CHUNK_ROWS, _GPU_MEMORY * free // (16 * row + activations))))

    def run(self, task: Task, clients: Tensor, state: Rows, message: Rows, call: Call) -> tuple[Rows, Rows]:
        """Run a task for some clients, all rows of a chunk at once."""
        host = on_host(clients)  # where what is one number a client is computed: a launch takes longer than the work
        order = torch.argsort(self.host_sizes["train"][host], descending=True, stable=True)
        pieces = self._chunks(task, order, self.host_sizes["train"][host[order]])
        with self.rounding():
            as_they_are = len(pieces) == 1 and torch.equal(pieces[0], torch.arange(len(order)))
            if as_they_are and not self._too_few(len(order)):
                with self._threads_of_step(task, host):
                    return self._run_chunk(task, clients, host, state, message, call)
            chunks = to_device(order, self.device).split([len(piece) for piece in pieces])
            parts = [
                self._run_some(task, places, clients, host[piece], state, message, call)
                for places, piece in zip(chunks, pieces, strict=True)
            ]
        # Most methods keep the model that they send: the same tensor is put together once.
        joined: dict[tuple[Identity, ...], Tensor] = {}
        changes = in_client_order([change for change, _ in parts], chunks, joined)
        return changes, in_client_order([reply for _, reply in parts], chunks, joined)

    @property
    def _fixed_shapes(self) -> bool:
        """Whether a step serves again only for tables of the same shapes: one that is recorded or compiled."""
        return self.record or self.compile_steps

    def _chunks(self, task: Task, order: Tensor, sizes: Tensor) -> list[Tensor]:
        """Cut rows that are sorted by size into those that are computed at once."""
        chunk = self.chunk or self._cache_chunk(task)
        if not self.even_batches or self._fixed_shapes or not len(order):
            return list(order.split(chunk))
        batches = [fold.over.size for fold in task.folds() if split_of(fold.over) == "train"]
        most = max(batches, default=1) if all(batches) else int(sizes.max())
        widths = np.array([even_width(size) for size in sizes.clamp_max(most).tolist()])
        ends = [*(np.flatnonzero(np.diff(widths)) + 1).tolist(), len(order)]
        begins = [0, *ends[:-1]]
        return [piece for begin, end in zip(begins, ends, strict=True) for piece in order[begin:end].split(chunk)]

    def _too_few(self, rows: int) -> bool:
        """Say whether rows are fewer than are to be computed at once, where that is not settled by other means."""
        return 0 < rows < self.fewest_rows and self.chunk != 1 and not self._fixed_shapes

    def _run_some(
        self, task: Task, places: Tensor, clients: Tensor, host: Tensor, state: Rows, message: Rows, call: Call
    ) -> tuple[Rows, Rows]:
        """Run a task for the clients at some places, of which there may have to be more than asked for."""
        only = self._too_few(len(places))
        if only:
            places, host = places.repeat(self.fewest_rows), host.repeat(self.fewest_rows)
        with self._threads_of_step(task, host):
            both = self._run_chunk(task, clients[places], host, take(state, places), pick(message, places), call)
        return (take(both[0], slice(0, 1)), take(both[1], slice(0, 1))) if only else both

    def _cache_chunk(self, task: Task) -> int:
        """Return how many rows stay in a CPU's cache, with their samples, through all their steps."""
        largest = widest_batch(task, 256)
        if self._convolves:
            # A CPU convolves one row after another in any case (from 1 to 10 rows at once made no difference), and with
            # large batches the activations of a single row fill the cache.
            return 10 if largest <= 16 else 1
        sample = self.samples.x[0].numel() * self.problem.start.element_size()
        row = self.problem.layout.size * self.problem.start.element_size()
        return max(1, min(_CPU_CHUNK_ROWS, _CPU_CHUNK_BYTES // (row + largest * sample)))

    @functools.cached_property
    def _convolves(self) -> bool:
        return any(isinstance(part, nn.Conv2d) for part in self.problem.module.modules())

    @property
    def _row_after_row(self) -> bool:
        """Whether a CPU puts the samples of one row after another through the model, and not those of all rows."""
        return self._convolves and self.convolution in ("auto", "single")

    def _threads_of_step(self, task: Task, host: Tensor) -> contextlib.AbstractContextManager[None]:
        """Return a context with as many CPU threads as a step for some clients pays for."""
        if self.device.type != "cpu" or not len(host):
            return contextlib.nullcontext()
        rows = len(host)
        if self._row_after_row:
            rows = 1
        elif self.even_batches:  # whoever is computed with it
            rows = self.chunk or self._cache_chunk(task)
        return self.threads(rows * widest_batch(task, even_width(int(self.host_sizes["train"][host].max()))))

    def _run_chunk(
        self, task: Task, clients: Tensor, host: Tensor, state: Rows, message: Rows, call: Call
    ) -> tuple[Rows, Rows]:
        context = self.client_context(clients, call, host)
        work = task.start(context, state, message)
        check_rows("what start gives", work, len(clients))
        for number, fold in enumerate(task.folds()):
            # A recorded or compiled step takes one width of batches. Padded tables have few widths, so that a cohort
            # with another largest client finds a recording that was made before.
            compute = self._graphs if self.record else call_directly
            schedule = make_schedule(self, fold.over, host, call, number, padded=self._fixed_shapes, compute=compute)
            dropout = None
            if isinstance(fold.over, Minibatches) and (self._net.uses_dropout or self.samples.noise is not None):
                dropout = to_device(self.key("dropout", host, call, number), self.device)
            work = self._fold(task, fold, number, schedule, work, clients, dropout)
            if fold.then is not None:
                work = fold.then(context, work)
                check_rows("what then gives", work, len(clients))
        return finished(task, context, work)

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
        if self._fixed_shapes:
            recorded = self._recorded_fold(task, fold, number, schedule, work)
            work = recorded.play(schedule, work, clients, dropout, self.before_step)
            return work if schedule.order is None else take(work, torch.argsort(schedule.order))
        draws, _, rows, width = schedule.index.shape
        x = self.samples.x
        # Memory for every batch of the fold: taken anew, it would cost page faults at every step.
        memory = [x.new_empty(rows * width, *x.shape[1:]) for _ in range(draws)]
        done: list[Rows] = []
        step = checked_step(fold.step)
        left = taken = rows
        for begin, end, active in schedule.segments():
            if active < left:
                stay = min(max(active, self.fewest_rows), taken)
                over = take(work, slice(active, left))
                done.append({name: value.clone() for name, value in over.items()} if stay > active else over)
                work = take(work, slice(0, stay))  # longest rows first, so that those that are done are the last ones
                left, taken = active, stay
            for at in range(begin, end):
                batches = list(self._batches(schedule, at, taken, clients, dropout, memory, split_of(fold.over)))
                self.before_step()
                work = step(work, *batches)
        work = join([work if taken == left else take(work, slice(0, left)), *reversed(done)])
        return work if schedule.order is None else take(work, torch.argsort(schedule.order))

    def _batches(
        self,
        schedule: Schedule,
        at: int,
        active: int,
        clients: Tensor,
        dropout: Tensor | None,
        memory: list[Tensor],
        split: Split,
    ) -> Iterator[Batch]:
        draws = len(schedule.index)
        for draw in range(draws):
            key = None if dropout is None else randomness.fold_in(dropout[:active], at * draws + draw)
            x, y = self.samples.gather(schedule.index[draw, at, :active], clients[:active], key, memory[draw])
            weight, share, alike = schedule.weight[at, :active], schedule.share[at, :active], None
            if self.samples.class_weights is not None:
                alike = weight
                weight, share = self.samples.class_weights.apply(clients[:active], y, weight, share, split)
            yield Batch(self._net, self.problem.loss, x, y, weight, share, key, alike)

    def _recorded_fold(self, task: Task, fold: Fold, number: int, schedule: Schedule, work: Rows) -> RecordedFold:
        """Return the recording of a fold for rows and batches of these shapes, which serves all rounds of the task."""
        shapes = tuple((name, tuple(value.shape), value.dtype) for name, value in work.items())
        draws, steps, _, width = schedule.index.shape
        key = (Identity(task), number, draws, width, shapes)
        recorded = self._recorded.get(key)
        if recorded is None or recorded.capacity < steps:
            step = torch.compile(fold.step, dynamic=False) if self.compile_steps else fold.step
            capacity = 1 << (steps - 1).bit_length() if steps else 0  # so that a slightly longer round has room too
            where = self._net, self.problem.loss, self.samples, split_of(fold.over)
            alike = not self.compile_steps and self._net.reads_channels_once
            recorded = RecordedFold(*where, capacity, checked_step(step), alike)
        self._recorded[key] = recorded  # even if it was there: what was used last is dropped last
        return recorded

    def predict(self, predict: Predict, rows: Rows, clients: Tensor, split: Split, shared: bool = False) -> Tensor:
        """Apply each client's model to its own samples."""
        return self.predict_all(predict, rows, clients, (split,), shared)[0]

    def predict_all(
        self, predict: Predict, rows: Rows, clients: Tensor, splits: tuple[Split, ...], shared: bool = False
    ) -> list[Tensor]:
        """Apply each client's model to its own samples of several splits, in one pass where they fit into one block."""
        with torch.no_grad(), self.rounding(), self.threads(self._samples_of_prediction(clients, splits, shared)):
            if shared:
                return self._prediction.of_one_model(predict, self._net, rows, clients, splits)
            found = self._prediction.of_clients(predict, self._net, rows, clients, splits, self.chunk)
            return [self._no_outputs() if outputs is None else outputs for outputs in found]

    def _samples_of_prediction(self, clients: Tensor, splits: tuple[Split, ...], shared: bool) -> int:
        """Return how many samples of some clients are put through a model at once, as the work of a CPU is reckoned."""
        if self.device.type != "cpu":
            return 0
        samples = sum(int(self.host_sizes[split][clients].sum()) for split in splits)
        return samples // max(1, len(clients)) if self._row_after_row and not shared else samples

    def _no_outputs(self) -> Tensor:
        shape = self.problem.module(self.probe()[0]).shape[1:]
        return self.problem.start.new_empty(0, *shape)
