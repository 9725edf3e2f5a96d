"""Where runs that play together meet: each in a thread of its own, of which one at a time goes on.

A run goes on until it asks the engine for something, or ends. When all have, what they ask alike is computed in one
call, and they go on, one after the other. So whatever a run does is done in an order that does not depend on chance,
and no two runs are ever at work at the same time, but for what each writes to its own folder.

On a GPU they do so in two parties. While the device computes what the one has asked for, the runs of the other take up
what they were answered, and come to ask again.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from coterie import signals
from coterie.algorithms.base import Task
from coterie.algorithms.contract import checked_predict
from coterie.compute._cache import BoundedCache, Identity
from coterie.compute.joint import (
    JointEngine,
    OutputsAsk,
    PredictAsk,
    SampleStore,
    TaskAnswer,
    TaskAsk,
    fit,
    same_net,
    signature,
)
from coterie.data.shelf import DatasetShelf
from coterie.errors import Interrupted
from coterie.rows.host_copies import LateRead
from coterie.simulation.measurement import Measured, Measurement, Targets, measured, targets_end_to_end
from coterie.simulation.processes import OneProcess
from coterie.studies.joint.seat import FiniteAsk, MeasureAsk, Seat, WriteAsk

_PENS = max(2, min(8, os.cpu_count() or 1))  # runs that write at a time: more would only wait for the interpreter
_TARGETS = 16  # sets of runs whose targets are kept end to end
PARTIES = 2  # that take turns at a GPU, unless it is said otherwise
_LATELY = 1024  # things that runs of one round have in common, and tasks of which it is known which are alike
_FEWEST = 4  # runs of a party: fewer would leave too little to be computed at once


class Common:
    """What runs have in common that play together, or one meeting after another.

    Attributes
    ----------
    store
        The samples of all runs.
    datasets
        The data sets that they come from.
    made
        What else was made once for all.
    """

    def __init__(self) -> None:
        self.store, self.datasets = SampleStore(), DatasetShelf()
        self.made: dict[Hashable, Any] = {}


class Meeting:
    """Runs that play together.

    Parameters
    ----------
    common
        What they have in common, ``None`` if nobody has met before.
    parties
        How many parties take turns at a GPU.

    Attributes
    ----------
    stopped_by
        The signal by which the user asked for a stop, ``None`` if there was none.
    common
        What they have in common.
    made_lately
        What was made for runs that are in the same round.
    pens
        Held by whoever writes its folder.
    """

    as_on_a_gpu: bool = False
    """Whether models are applied together on a CPU too, for their evaluation, and what is finite is asked together."""

    def __init__(self, common: Common | None = None, parties: int = PARTIES) -> None:
        self.stopped_by: int | None = None
        self.common = common or Common()
        self.made_lately: BoundedCache[Hashable, Any] = BoundedCache(_LATELY)
        self.pens = threading.BoundedSemaphore(_PENS)
        self._seats: list[Seat] = []
        self._engines: dict[Seat, tuple[JointEngine, int]] = {}
        self._parties, self._at_once, self._undoable = parties, False, False
        # By the targets themselves, which are held so that another object cannot have the same address.
        self._targets: dict[tuple[int, ...], tuple[list[Targets], tuple[Tensor, Tensor]]] = {}
        self._signatures: BoundedCache[Identity, int] = BoundedCache(_LATELY)
        self._numbered: dict[Hashable, int] = {}
        self._widest: int | None = None  # rows that were computed together before memory ran out

    def seat(self, body: Callable[[OneProcess], None]) -> Seat:
        """Let a run begin, up to what it first asks for."""
        found = Seat(self, body)
        self._seats.append(found)
        self._go_on(found)
        return found

    def play(self) -> Iterator[Seat]:
        """Let all runs go on to their ends; give each one that has ended."""
        if not self._engines:
            self._meet()
        told: set[Seat] = set()
        parties = [self._rounds_of(seats) for seats in self._divided()]
        while parties:
            party = parties.pop(0)
            for waits in party:
                yield from self._newly_ended(told)
                if waits:
                    parties.append(party)
                    break
        yield from self._newly_ended(told)

    def _newly_ended(self, told: set[Seat]) -> Iterator[Seat]:
        for seat in self._seats:
            if seat.ended and seat not in told:
                told.add(seat)
                yield seat

    def _divided(self) -> list[list[Seat]]:
        """Divide the runs among those that take turns at a GPU."""
        first = next((seat.engine for seat in self._seats if seat.engine is not None), None)
        on_gpu = self.as_on_a_gpu or (first is not None and first.device.type == "cuda")
        count = max(1, min(self._parties, len(self._seats) // _FEWEST)) if on_gpu else 1
        return [self._seats[number::count] for number in range(count)]

    def _rounds_of(self, seats: Sequence[Seat]) -> Iterator[bool]:
        """Let the runs of a party go on to their ends, step by step; say before each whether it must be waited for."""
        while True:
            waiting = [seat for seat in seats if seat.ask is not None]
            if not waiting:
                return
            first = min(map(_stage, waiting))
            turn = [seat for seat in waiting if _stage(seat) == first]
            reading = _LateAnswers(turn) if isinstance(turn[0].ask, FiniteAsk) else None
            yield reading is not None or isinstance(turn[0].ask, WriteAsk)
            self._answer(turn, reading)
            for seat in turn:
                self._go_on(seat)

    def _go_on(self, seat: Seat) -> None:
        seat.go_on()
        # The user's wish, or that of whoever ends the process, holds for all; any other failure is the run's own.
        if isinstance(seat.error, Interrupted) or (seat.error is not None and not isinstance(seat.error, Exception)):
            self.stopped_by = self.stopped_by or signal.SIGINT

    def close(self) -> None:
        """Have every run that has not ended keep what it has done, and end."""
        if all(seat.ended for seat in self._seats):
            return
        self._at_once = True
        self.stopped_by = self.stopped_by or signal.SIGINT
        for _ in self.play():
            pass

    # ------------------------------------------------------------------------------------------------------- answering

    def _meet(self) -> None:
        """Find the runs whose engines fit together."""
        groups: dict[Hashable, list[Seat]] = {}
        for seat in self._seats:
            if seat.engine is not None:
                groups.setdefault(fit(seat.engine), []).append(seat)
        for seats in groups.values():
            engines = {seat: seat.engine for seat in seats if seat.engine is not None}
            first = next(iter(engines.values()))
            distinct = {id(engine): engine for engine in engines.values()}
            fits = {key: engine is first or same_net(first, engine) for key, engine in distinct.items()}
            joined = {seat: engine for seat, engine in engines.items() if fits[id(engine)]}
            if len(joined) > 1:
                engine = JointEngine(list(joined.values()))
                self._engines |= {seat: (engine, place) for place, seat in enumerate(joined)}

    def _answer(self, seats: Sequence[Seat], reading: _LateAnswers | None) -> None:
        writing = [(seat, seat.ask) for seat in seats if isinstance(seat.ask, WriteAsk)]
        for seat, ask in writing:  # whatever the user wishes: what is being written is written to its end
            ask.done.wait()
            seat.seconds += ask.seconds
            seat.answer(None)
        if writing:
            return
        if self.stopped_by is not None and (self._at_once or _in_round(seats[0])):
            for seat in seats:
                seat.refuse(KeyboardInterrupt())
            return
        if reading is not None:
            reading.give()
            return
        for alike in self._grouped(seats):
            try:
                self._undoable = _in_round(alike[0])  # the only time at which a signal is raised here
                self._compute(alike)
                self._undoable = False
            except KeyboardInterrupt:
                for seat in alike:
                    seat.refuse(KeyboardInterrupt())

    def _grouped(self, seats: Sequence[Seat]) -> list[list[Seat]]:
        """Group runs whose asks are alike."""
        found: dict[Hashable, list[Seat]] = {}
        for seat in seats:
            key: Hashable = id(seat)
            if seat in self._engines and isinstance(seat.ask, TaskAsk):
                key = id(self._engines[seat][0]), self._kind(seat.ask.task)
            elif seat in self._engines and isinstance(seat.ask, MeasureAsk):
                key = id(self._engines[seat][0]), seat.ask.wanted.alike
            found.setdefault(key, []).append(seat)
        return list(found.values())

    def _kind(self, task: Task) -> int:
        """Give a number that tasks of one signature have in common: a run asks for the same task in every round."""
        key = Identity(task)
        if key not in self._signatures:
            self._signatures[key] = self._numbered.setdefault(signature(task), len(self._numbered))
        return self._signatures[key]

    def _compute(self, seats: Sequence[Seat]) -> None:
        """Answer what some runs ask alike, in one call; where that fails, in two, and so on to each run by itself."""
        rows = sum(map(_rows, seats))
        if len(seats) > 1 and self._widest is not None and rows > self._widest:
            self._halved(seats)
            return
        began = time.perf_counter()
        try:
            found = [_alone(seats[0])] if len(seats) == 1 else self._together(seats)
        except Exception as error:
            if len(seats) == 1:
                seats[0].refuse(error)
                return
            if _lacks_memory(error):
                self._widest = rows // 2
            self._halved(seats)
            return
        seconds = time.perf_counter() - began
        for seat, answer in zip(seats, found, strict=True):
            seat.seconds += seconds * _rows(seat) / max(rows, 1)
            seat.answer(answer)

    def _halved(self, seats: Sequence[Seat]) -> None:
        half = len(seats) // 2
        self._compute(seats[:half])
        self._compute(seats[half:])

    def _together(self, seats: Sequence[Seat]) -> list[Any]:
        engine, _ = self._engines[seats[0]]
        asks = [seat.ask for seat in seats]
        wanted = [ask.wanted for ask in asks if isinstance(ask, MeasureAsk)]
        if wanted:
            return list(self._measured(seats, wanted))
        places = [self._engines[seat][1] for seat in seats]
        tasks = [
            TaskAsk(at, ask.task, ask.clients, ask.state, ask.message, ask.call)
            for ask, at in zip(asks, places, strict=True)
            if isinstance(ask, TaskAsk)
        ]
        with torch.no_grad():
            return list(engine.run(tasks))

    def _measured(self, seats: Sequence[Seat], wanted: Sequence[Measurement]) -> list[Measured]:
        own = [seat.engine for seat in seats if seat.engine is not None]
        if own[0].device.type == "cpu" and not self.as_on_a_gpu:
            # Applied together they would take as long, for a CPU takes one row after another, and would be padded to
            # other widths, which can decide a last bit.
            outputs = [one.outputs(engine) for one, engine in zip(wanted, own, strict=True)]
        else:
            engine = self._engines[seats[0]][0]
            asks = [
                OutputsAsk(self._engines[seat][1], one.rows, one.targets.clients, one.targets.here, one.shared)
                for seat, one in zip(seats, wanted, strict=True)
            ]
            outputs = engine.outputs(checked_predict(wanted[0].algorithm.predict), asks)
        key = tuple(id(one.targets) for one in wanted)
        if key not in self._targets:
            targets = [one.targets for one in wanted]
            self._targets[key] = targets, targets_end_to_end(targets)
            while len(self._targets) > _TARGETS:
                del self._targets[next(iter(self._targets))]
        return measured(own[0], wanted, outputs, self._targets[key][1])

    # ------------------------------------------------------------------------------------------------------- stopping

    @contextlib.contextmanager
    def signals(self) -> Iterator[None]:
        """Stop when the user asks for it: at once within a round, else when the records of a round are complete."""

        def stop(number: int, frame: FrameType | None) -> None:
            self._at_once = self.stopped_by is not None
            self.stopped_by = number
            if self._undoable:
                self._undoable = False
                raise KeyboardInterrupt

        with signals.handled(stop, signal.SIGINT, signal.SIGTERM):
            yield


def _in_round(seat: Seat) -> bool:
    return isinstance(seat.ask, TaskAsk) and seat.ask.call.purpose == "round"


def _stage(seat: Seat) -> tuple[bool, int]:
    """Say what comes first: the end of a round, evaluations before rounds, and of a round the last exchanges.

    So runs wait for each other at the beginning of a round, whatever they asked for in the one before. While some
    write, all others have come to ask for something or write too.
    """
    if isinstance(seat.ask, FiniteAsk | WriteAsk):
        return False, -2 if isinstance(seat.ask, FiniteAsk) else -1
    if not isinstance(seat.ask, TaskAsk) or seat.ask.call.purpose != "round":
        return False, 0
    return True, -seat.ask.call.exchange


class _LateAnswers:
    """Answers to runs that ask what is finite: all that is read from a device in a round.

    What fails here fails for all of them.
    """

    def __init__(self, seats: Sequence[Seat]) -> None:
        began = time.perf_counter()
        self._asks = [(seat, seat.ask) for seat in seats if isinstance(seat.ask, FiniteAsk)]
        distinct = {id(one): one for _, ask in self._asks for one in ask.others}
        self._others = [(one, total) for one in distinct.values() if (total := one.total) is not None]
        self._found: LateRead | Exception
        sums = [one for _, ask in self._asks for one in ask.sums]
        try:
            self._found = LateRead(self._finite([*sums, *(total for _, total in self._others)]))
        except Exception as error:
            self._found = error
        self._seconds = time.perf_counter() - began

    def _finite(self, sums: Sequence[Tensor]) -> Tensor:
        """Say of each sum whether it is finite, in few operations: those of one type are put together."""
        kinds: dict[torch.dtype, list[int]] = {}
        for place, one in enumerate(sums):
            kinds.setdefault(one.dtype, []).append(place)
        self._order = [place for places in kinds.values() for place in places]
        found = [torch.stack([sums[place] for place in places]).isfinite() for places in kinds.values()]
        return torch.cat(found) if found else torch.zeros(0, dtype=torch.bool)

    def give(self) -> None:
        """Wait for the device, and answer."""
        began = time.perf_counter()
        try:
            if isinstance(self._found, Exception):
                raise self._found
            found = self._found.values()
        except Exception as error:
            for seat, _ in self._asks:
                seat.refuse(error)
            return
        known = dict(zip(self._order, found.tolist(), strict=True))
        answers = iter([known[place] for place in range(len(known))])
        seconds = (self._seconds + time.perf_counter() - began) / len(self._asks)
        for seat, ask in self._asks:
            seat.seconds += seconds
            seat.answer(all(list(itertools.islice(answers, len(ask.sums)))))
        for (one, _), finite in zip(self._others, answers, strict=True):
            one.settle(finite)


def _alone(seat: Seat) -> Any:
    ask, engine = seat.ask, seat.engine
    assert engine is not None
    if isinstance(ask, TaskAsk):
        with torch.no_grad():
            return TaskAnswer(*engine.run(ask.task, ask.clients, ask.state, ask.message, ask.call))
    if isinstance(ask, MeasureAsk):
        return measured(engine, [ask.wanted], [ask.wanted.outputs(engine)])[0]
    assert isinstance(ask, PredictAsk)
    return engine.predict_all(ask.predict, ask.rows, ask.clients, ask.splits, ask.shared)


def _rows(seat: Seat) -> int:
    return 1 if seat.ask is None else len(seat.ask.clients)


def _lacks_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
