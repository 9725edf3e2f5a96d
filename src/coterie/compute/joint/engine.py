"""An engine for several runs: what they ask for alike is one call.

The clients of all runs are numbered one run after another, and are the clients of one federation. Of these the batched
engine computes some rows, as it does for a single run; it draws each row's random numbers from its own run's streams.
So a run's rows are what they would be alone, to the rounding of a matrix product.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coterie import randomness
from coterie.algorithms.base import ClientContext, Minibatches, Task
from coterie.algorithms.contract import check_rows
from coterie.compute._cache import BoundedCache, Identity
from coterie.compute.batched import BatchedEngine
from coterie.compute.engine import Call, Predict, finished
from coterie.compute.finiteness import Finiteness
from coterie.compute.joint.asks import OutputsAsk, TaskAnswer, TaskAsk
from coterie.compute.joint.prediction import JointPrediction
from coterie.compute.joint.repeats import Repeats
from coterie.compute.joint.samples import join_samples
from coterie.compute.joint.tasks import JointContext, JointTask
from coterie.compute.nets.row_net import agrees
from coterie.compute.samples import Samples
from coterie.rows import Rows
from coterie.rows.host_copies import on_device, on_host, to_device

Numbers = npt.NDArray[np.int64]

_TASKS = 64  # joint tasks that are kept: the recordings of their steps hang on them


@dataclass(frozen=True)
class JointCall(Call):
    """The calls of several runs.

    Parameters
    ----------
    asks
        What they ask.
    contexts
        What the clients of each know about themselves.
    """

    asks: tuple[TaskAsk, ...] = ()
    contexts: tuple[ClientContext, ...] = ()

    @functools.cached_property
    def runs(self) -> Numbers:
        """The runs that ask."""
        return np.array([ask.run for ask in self.asks])

    @functools.cached_property
    def exchanges(self) -> Numbers:
        """The number of each one's exchange within its round."""
        return np.array([ask.call.exchange for ask in self.asks], dtype=np.int64)


class _FederatedRuns(BatchedEngine):
    """The batched engine over the clients of all runs, with each run's own streams."""

    # So that a row's last bits do not depend on which runs it is computed with: a study that is stopped, and goes on
    # with some of its runs, ends with the same numbers.
    even_batches = True
    fewest_rows = 2

    def __init__(self, engines: Sequence[BatchedEngine], samples: Samples) -> None:
        first = engines[0]
        chunks = [engine.chunk for engine in engines]
        super().__init__(
            first.problem,
            samples,
            first.seed,
            kernel=first.kernel,
            convolution=first.convolution,
            chunk=min(chunk for chunk in chunks if chunk) if all(chunks) else None,
            compile_steps=first.compile_steps,
            record=first.record,
            precision=first.precision,
        )
        self.all_threads = first.all_threads
        self.seeds = [engine.seed for engine in engines]
        counts = [engine.samples.clients for engine in engines]
        self.firsts = np.cumsum([0, *counts])  # the number of each run's first client among all

    def _asks_of(self, clients: Tensor, call: JointCall) -> Numbers:
        """Give for each client the place of its run's ask."""
        found: Numbers = np.searchsorted(call.runs, np.searchsorted(self.firsts, clients.numpy(), side="right") - 1)
        return found

    def key(self, purpose: str, clients: Tensor, call: Call, fold: int = 0) -> Tensor:
        """Return a stream key for each client, from its own run's stream."""
        assert isinstance(call, JointCall)
        numbers, runs, place = clients.numpy(), call.runs, self._asks_of(clients, call)
        base = [
            randomness.stream_base(self.seeds[ask.run], f"{ask.call.purpose} {purpose}", ask.call.round)
            for ask in call.asks
        ]
        found = randomness.keys_of(np.array(base, dtype=np.int64)[place], numbers - self.firsts[runs[place]])
        return torch.from_numpy(randomness.fold_in(randomness.fold_in(found, call.exchanges[place]), fold))

    def epochs(self, over: Minibatches, clients: Tensor, call: Call, fold: int) -> Tensor:
        """Return each client's number of epochs, as its own run's task has it."""
        assert isinstance(call, JointCall)
        asked = self._asks_of(clients, call)
        found = torch.empty_like(clients)
        for place, ask in enumerate(call.asks):
            mine = torch.from_numpy(np.flatnonzero(asked == place))
            if len(mine):
                own = ask.task.folds()[fold].over
                assert isinstance(own, Minibatches)
                found[mine] = super().epochs(own, clients[mine], call, fold)
        return found

    def client_context(self, clients: Tensor, call: Call, host: Tensor | None = None) -> ClientContext:
        """Return what clients know about themselves, run by run."""
        assert isinstance(call, JointCall) and host is not None
        numbers = host.numpy()

        def parts() -> list[tuple[int, Tensor, ClientContext]]:
            found = []
            for place, (ask, context) in enumerate(zip(call.asks, call.contexts, strict=True)):
                begin, end = self.firsts[ask.run : ask.run + 2]
                (mine,) = np.nonzero((numbers >= begin) & (numbers < end))
                if len(mine):
                    within = torch.searchsorted(on_host(ask.clients), torch.from_numpy(numbers[mine] - begin))
                    own = _part_of(context, to_device(within, self.device))
                    found.append((place, to_device(torch.from_numpy(mine), self.device), own))
            return found

        shared = dict.fromkeys(("clients", "sizes", "validation_sizes", "class_counts", "key"), clients)
        return JointContext(**shared, round=0, net=self.net, seed=self.seed, parts=parts)

    def contexts(self, asks: Sequence[TaskAsk], clients: Tensor, call: JointCall) -> tuple[ClientContext, ...]:
        """Give what the clients of each ask know about themselves: looked up once for all."""
        whole = {
            "sizes": self.sizes["train"][clients],
            "validation_sizes": self.sizes["validation"][clients],
            "class_counts": self.samples.class_counts[clients],
            "key": to_device(self.key("task", on_host(clients), call), self.device),
        }
        counts = [ask.clients.shape[0] for ask in asks]
        split = {name: value.split(counts) for name, value in whole.items()}
        return tuple(
            ClientContext(
                clients=ask.clients,
                round=ask.call.round,
                net=self.net,
                seed=self.seeds[ask.run],
                **{name: pieces[place] for name, pieces in split.items()},
            )
            for place, ask in enumerate(asks)
        )


def _part_of(context: ClientContext, places: Tensor) -> ClientContext:
    names = ("clients", "sizes", "validation_sizes", "class_counts", "key")
    return dataclasses.replace(context, **{name: getattr(context, name)[places] for name in names})


class JointEngine:
    """Computes for several runs at once.

    Parameters
    ----------
    engines
        The runs' engines, which must fit together (:func:`fit`).
    """

    def __init__(self, engines: Sequence[BatchedEngine]) -> None:
        self._all = _FederatedRuns(engines, join_samples([engine.samples for engine in engines]))
        self._firsts = [int(first) for first in self._all.firsts[:-1]]
        self._tasks: BoundedCache[tuple[Identity, ...], JointTask] = BoundedCache(_TASKS)
        self._repeats = Repeats(engines)
        self._prediction = JointPrediction(self._all, self._firsts)

    def run(self, asks: Sequence[TaskAsk]) -> list[TaskAnswer]:
        """Run tasks of one :func:`~coterie.compute.joint.tasks.signature`, of different runs in increasing order."""
        device = self._all.device
        numbers = [on_host(ask.clients).numpy() + self._firsts[ask.run] for ask in asks]
        clients = on_device(torch.from_numpy(np.concatenate(numbers)), device)
        call = JointCall(0, asks=tuple(asks))
        contexts = self._all.contexts(asks, clients, call)
        works = []
        for ask, context in zip(asks, contexts, strict=True):
            works.append(ask.task.start(context, ask.state, ask.message))
            check_rows("what start gives", works[-1], ask.clients.shape[0])
        ends: dict[int, Rows] = {}
        together = list[tuple[Tensor, Sequence[Tensor]]]()
        first = self._repeats.find(asks, works)
        groups = _alike({place: work for place, work in enumerate(works) if first[place] == place})
        for places in groups:
            some = [asks[place] for place in places]
            counts = [ask.clients.shape[0] for ask in some]
            task = self._joint_task([ask.task for ask in some])
            work = {name: torch.cat([works[place][name] for place in places]) for name in works[places[0]]}
            work |= task.columns(counts, device)
            mine = clients
            if len(places) < len(asks):
                mine = on_device(torch.from_numpy(np.concatenate([numbers[place] for place in places])), device)
            own = tuple(contexts[place] for place in places)
            done, _ = self._all.run(task, mine, work, {}, JointCall(0, asks=tuple(some), contexts=own))
            pieces = {name: value.split(counts) for name, value in done.items()}
            together += [(value, pieces[name]) for name, value in done.items()]
            for number, place in enumerate(places):
                ends[place] = {name: each[number] for name, each in pieces.items()}
        # Copied before the first task ends: it may change its rows in place, and so may a run what it is answered.
        for place, other in enumerate(first):
            if other != place:
                ends[place] = {name: value.clone() for name, value in ends[other].items()}
        answers = [
            finished(ask.task, context, ends[place])
            for place, (ask, context) in enumerate(zip(asks, contexts, strict=True))
        ]
        finite = _finite(answers, together)
        return [TaskAnswer(*answer, finite) for answer in answers]

    def outputs(self, predict: Predict, asks: Sequence[OutputsAsk]) -> list[Tensor]:
        """Apply models of different runs, with the same splits and rows of the same shapes."""
        return self._prediction.outputs(predict, asks)

    def _joint_task(self, tasks: Sequence[Task]) -> JointTask:
        key = tuple(map(Identity, tasks))
        if key not in self._tasks:
            self._tasks[key] = JointTask(tasks)
        return self._tasks[key]


def _finite(answers: Iterable[tuple[Rows, Rows]], together: Sequence[tuple[Tensor, Sequence[Tensor]]]) -> Finiteness:
    """Have all answers looked at: most are pieces of a matrix, of which the whole is."""
    left = {id(value): value for both in answers for rows in both for value in rows.values()}
    wholes = [whole for whole, pieces in together if [1 for piece in pieces if left.pop(id(piece), None) is not None]]
    return Finiteness([value for value in (*wholes, *left.values()) if value.is_floating_point() and len(value)])


def _alike(works: Mapping[int, Rows]) -> list[list[int]]:
    """Group the places of working rows that can be put in one matrix."""
    found: dict[Hashable, list[int]] = {}
    for place, work in works.items():
        shapes = tuple(sorted((name, tuple(value.shape[1:]), value.dtype) for name, value in work.items()))
        found.setdefault(shapes, []).append(place)
    return list(found.values())


def fit(engine: BatchedEngine) -> Hashable:
    """Give what engines must have in common to compute together, beside nets that :func:`same_net` finds equal."""
    samples, problem = engine.samples, engine.problem
    scaling = (samples.scale, samples.shift) if samples.x.dtype == torch.uint8 else ()
    return (
        (str(problem.module), problem.layout.names, problem.layout.shapes, problem.statistics.names),
        (problem.loss, problem.start.dtype, str(engine.device)),
        (tuple(samples.x.shape[1:]), samples.x.dtype, samples.y.dtype, samples.class_counts.shape[1], samples.dtype),
        # Clients that are scaled by statistics of their own are told apart by their samples, which no other run has.
        id(samples) if samples.statistics_of is not None else None,
        id(samples.x) if samples.pages is not None else None,  # nor are different files put together in memory
        (samples.noise is None, str([value.flatten().tolist() for value in scaling])),
        (engine.kernel, engine.convolution, engine.compile_steps, engine.record, engine.precision),
    )


def same_net(one: BatchedEngine, other: BatchedEngine) -> bool:
    """Say whether two models are the same but for their parameters: what else a module holds may depend on its seed."""
    return agrees(one.row_net, other.row_net, one.probe(), 1e-6)
