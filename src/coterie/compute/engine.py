"""What an engine is: it runs the client's half for some clients, and applies models to their samples."""

from __future__ import annotations

import abc
import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from coterie import randomness
from coterie.algorithms.base import ClientContext, Minibatches, Net, Task
from coterie.algorithms.contract import check_pair, check_rows
from coterie.compute import cpu_threads
from coterie.compute._cache import Identity
from coterie.compute.finiteness import Finiteness
from coterie.compute.nets.row_net import ModuleNet
from coterie.compute.sample_costs import multiplications_of_sample
from coterie.compute.samples import Samples, Split
from coterie.models.problem import Problem
from coterie.rows import Rows
from coterie.rows.host_copies import on_host, to_device

Predict = Callable[[Net, Rows, Tensor], Tensor]
"""From a net, parameter rows and samples to outputs: :meth:`coterie.algorithms.base.Algorithm.predict`."""


@dataclass(frozen=True)
class Call:
    """When and why a task is run; decides which random numbers it draws.

    Parameters
    ----------
    round
        The round, counted from 1.
    purpose
        What the task is part of, for instance ``"round"`` or ``"personalise"``.
    exchange
        Its number within the round.
    """

    round: int
    purpose: str = "round"
    exchange: int = 0


class Engine(abc.ABC):
    """Runs tasks and models for the clients of a federation.

    Parameters
    ----------
    problem
        What is learnt.
    samples
        The federation's samples.
    seed
        The experiment's seed.
    """

    name: str
    even_batches: bool = False
    """Whether the width of a client's batches is its own, whoever is computed with it: where steps are recorded that of
    the largest of the federation, else one that its number of samples decides."""

    def __init__(self, problem: Problem, samples: Samples, seed: int) -> None:
        self.problem, self.samples, self.seed = problem, samples, seed
        splits: tuple[Split, ...] = ("train", "validation", "test")
        self.sizes = {split: samples.sizes(split) for split in splits}
        self.host_sizes = {split: sizes.cpu() for split, sizes in self.sizes.items()}
        self.most_passes: int | None = None  # over a client's samples in a task, where only its messages matter
        self.all_threads = False  # of the CPU compute, however small the work
        self.before_step: Callable[[], None] = go_on  # of a task; what it raises gives the task up
        self._put_off: list[tuple[Finiteness, Callable[[], None]]] = []

    @property
    @abc.abstractmethod
    def net(self) -> Net:
        """The model."""

    @property
    def device(self) -> torch.device:
        """The device that computes."""
        return self.samples.y.device

    @functools.cached_property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of what the model gives for one sample."""
        index = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        with torch.no_grad():
            sample = self.samples.gather(index, index[0])[0]
            return tuple(self.problem.module(sample[0]).shape[1:])

    @property
    def choices(self) -> dict[str, Any]:
        """What decides the last bits of a result: kernels, chunks, threads."""
        return {"engine": self.name, "threads": torch.get_num_threads(), "device": str(self.device)}

    def rounding(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a GPU rounds products, also the server's, as the engine was configured to."""
        return contextlib.nullcontext()

    def threads(self, samples: int) -> contextlib.AbstractContextManager[None]:
        """Return a context with as many CPU threads as it pays to put so many samples through the model with."""
        if self.device.type != "cpu" or self.all_threads:
            return contextlib.nullcontext()
        return cpu_threads.paid_by(samples * self._multiplications)

    @functools.cached_property
    def _multiplications(self) -> int:
        """About how many multiplications the model takes for a sample."""
        index = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        net = ModuleNet(self.problem.module, self.problem.layout)
        return multiplications_of_sample(net, self.problem.start, self.samples.gather(index, index[0])[0])

    @abc.abstractmethod
    def run(self, task: Task, clients: Tensor, state: Rows, message: Rows, call: Call) -> tuple[Rows, Rows]:
        """Run a task for some clients, in increasing order, on a row of state and of message for each.

        Returns what changes in their state, and their replies, in the order of ``clients``.
        """

    def examine(self, look_closely: Callable[[], None]) -> None:
        """Have what :meth:`run` gave last looked at for numbers that are not finite: now, or in :meth:`settle`."""
        look_closely()

    def settle(self) -> None:
        """Look closely at what :meth:`examine` put off and may not be finite, before any of it counts."""
        put_off, self._put_off = self._put_off, []
        for finite, look_closely in put_off:
            if not finite.known:
                look_closely()

    @abc.abstractmethod
    def predict(self, predict: Predict, rows: Rows, clients: Tensor, split: Split, shared: bool = False) -> Tensor:
        """Apply each client's model to its own samples of a split.

        ``rows`` has a row for each client, or is one model without a client axis if ``shared``. Returns the outputs
        ``[samples of all these clients, ...]``, client after client.
        """

    def predict_all(
        self, predict: Predict, rows: Rows, clients: Tensor, splits: tuple[Split, ...], shared: bool = False
    ) -> list[Tensor]:
        """Do what :meth:`predict` does for several splits, in each of which some client has samples."""
        return [self.predict(predict, rows, clients, split, shared) for split in splits]

    def client_context(self, clients: Tensor, call: Call, host: Tensor | None = None) -> ClientContext:
        """Return what clients know about themselves; ``host`` are their numbers on the host, if the caller has them."""
        return ClientContext(
            clients=clients,
            round=call.round,
            sizes=self.sizes["train"][clients],
            validation_sizes=self.sizes["validation"][clients],
            class_counts=self.samples.class_counts[clients],
            key=to_device(self.key("task", on_host(clients) if host is None else host, call), clients.device),
            net=self.net,
            seed=self.seed,
        )

    def key(self, purpose: str, clients: Tensor, call: Call, fold: int = 0) -> Tensor:
        """Return a stream key for each client, for one purpose within a call and a fold."""
        key = randomness.keys(self.seed, f"{call.purpose} {purpose}", call.round, clients)
        if key.device.type != "cpu":
            return randomness.fold_in(randomness.fold_in(key, call.exchange), fold)
        return torch.from_numpy(randomness.fold_in(randomness.fold_in(key.numpy(), call.exchange), fold))

    def epochs(self, over: Minibatches, clients: Tensor, call: Call, fold: int) -> Tensor:
        """Return each client's number of epochs, drawn where a range is given."""
        if self.most_passes is not None:
            return torch.full_like(clients, self.most_passes)
        if isinstance(over.epochs, int):
            return torch.full_like(clients, over.epochs)
        low, high = over.epochs
        drawn = randomness.uniform(self.key("epochs", clients, call, fold), 1).squeeze(-1)
        return low + (drawn * (high - low + 1)).long()


def go_on() -> None:
    """Let a step be taken."""


def widest_batch(task: Task, samples: int) -> int:
    """Give how many samples a step of a task takes at most, of a client that has so many."""
    return max((min(fold.over.size or samples, samples) for fold in task.folds()), default=0)


def finished(task: Task, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
    """End a task, and see that what it gives are rows of its clients."""
    both = task.finish(context, work)
    check_pair("finish", both, "what changes in the state and the reply")
    count = context.clients.shape[0]
    check_rows("the state that finish changes", both[0], count)
    check_rows("the reply that finish gives", both[1], count)
    return both


def take(rows: Rows, index: Tensor | slice) -> Rows:
    """Return some rows of every name; a slice gives views."""
    return {name: value[index] for name, value in rows.items()}


def pick(message: Rows, places: Tensor) -> Rows:
    """Return some rows of a message; what all clients get alike is one row with stride 0 and is not copied."""
    return {
        name: value[:1].expand(len(places), *value.shape[1:])
        if value.shape[0] > 1 and value.stride(0) == 0
        else value[places]
        for name, value in message.items()
    }


def join(pieces: list[Rows]) -> Rows:
    """Put rows with the same names one after another."""
    if len(pieces) == 1:
        return pieces[0]
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def in_client_order(parts: list[Rows], chunks: tuple[Tensor, ...], joined: dict[tuple[Identity, ...], Tensor]) -> Rows:
    """Put the rows of all chunks together in the order of the clients; what is in ``joined`` already is used again."""
    out: Rows = {}
    for name in parts[0]:
        pieces = [part[name] for part in parts]
        key = tuple(map(Identity, pieces))
        if key not in joined:
            whole = pieces[0].new_empty(sum(map(len, pieces)), *pieces[0].shape[1:])
            for places, piece in zip(chunks, pieces, strict=True):
                whole.index_copy_(0, places, piece)
            joined[key] = whole
        out[name] = joined[key]
    return out
