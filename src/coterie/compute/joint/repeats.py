"""Which runs ask for the very same: FedAvg and FedAvg with fine-tuning train alike in every round.

Runs of one seed begin alike, and some stay alike: those whose methods differ in what they do with a model beside its
training. The steps of such runs are taken once. Two asks are the same where everything is that steps depend on: the
engine (and with it samples, model and seed), the exchange, the clients, the task as far as its steps look at it, and
every number of the rows that the steps begin with.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch

from coterie.compute.batched import BatchedEngine
from coterie.compute.joint.asks import TaskAsk
from coterie.compute.joint.tasks import numbers_of, signature
from coterie.rows import Rows
from coterie.rows.host_copies import on_host


class Repeats:
    """Finds asks that repeat another's.

    Runs that were seen to differ in an exchange of one kind are not compared in later ones: to compare numbers on a GPU
    is to wait for it.

    Parameters
    ----------
    engines
        The runs' engines.
    """

    def __init__(self, engines: Sequence[BatchedEngine]) -> None:
        self._engines = [id(engine) for engine in engines]  # held by the joint engine, as long as this is
        self._apart: set[Hashable] = set()

    def find(self, asks: Sequence[TaskAsk], works: Sequence[Rows]) -> list[int]:
        """Give for each ask the place of the one whose steps are its own, too: the first of those that are the same.

        Parameters
        ----------
        asks
            Asks for tasks of one signature.
        works
            The rows that their steps begin with.

        Returns
        -------
        list
            Places among the asks.
        """
        found: list[int] = []
        for place in range(len(asks)):
            earlier = (other for other in range(place) if found[other] == other)
            found.append(next((other for other in earlier if self._same(asks, works, other, place)), place))
        return found

    def _same(self, asks: Sequence[TaskAsk], works: Sequence[Rows], one: int, other: int) -> bool:
        first, second = asks[one], asks[other]
        if self._engines[first.run] != self._engines[second.run] or first.call != second.call:
            return False
        if first.clients.shape != second.clients.shape or not _steps_alike(first, second):
            return False
        pair = first.run, second.run, first.call.purpose, first.call.exchange
        if pair in self._apart:
            return False
        same = torch.equal(on_host(first.clients), on_host(second.clients)) and _equal(works[one], works[other])
        if not same:
            self._apart.add(pair)
        return same


def _steps_alike(one: TaskAsk, other: TaskAsk) -> bool:
    """Say whether two tasks of one signature take the same steps from the same rows."""
    if one.task is other.task or signature(one.task, whole=True) == signature(other.task, whole=True):
        return True
    folds, others = one.task.folds(), other.task.folds()
    # What follows a pass may look at fields that no step does, and passes may be of different lengths.
    apart = any(fold.then is not None for fold in folds) or [f.over for f in folds] != [f.over for f in others]
    return not apart and numbers_of(one.task) == numbers_of(other.task)


def _equal(one: Rows, other: Rows) -> bool:
    if one.keys() != other.keys():
        return False
    return all(
        value.dtype == other[name].dtype and value.shape == other[name].shape and torch.equal(value, other[name])
        for name, value in one.items()
    )
