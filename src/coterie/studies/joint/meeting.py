"""Where runs that play together meet: each in a thread of its own, of which one at a time goes on.

A run goes on until it asks the engine for something, or ends. When all have, what they ask alike is computed in one
call, and they go on, one after the other. So whatever a run does is done in an order that does not depend on chance,
and no two runs are ever at work at the same time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from types import FrameType
from typing import Any

import torch

from coterie.compute.batched import BatchedEngine
from coterie.compute.engine import Engine
from coterie.compute.joint import GuestEngine, JointEngine, PredictAsk, SampleStore, TaskAsk, fit, same_net, signature
from coterie.compute.samples import Samples
from coterie.errors import Interrupted
from coterie.rows import matrix_units
from coterie.simulation.exchange import Exchange, LocalExchange
from coterie.simulation.processes import OneProcess

AnyAsk = TaskAsk | PredictAsk


class Seat:
    """One run's place in a meeting.

    Parameters
    ----------
    meeting
        The meeting.
    body
        Plays the run to its end.

    Attributes
    ----------
    ask
        What the run waits for, ``None`` before it has begun and after its end.
    ended
        Whether it has.
    error
        What it ended with, ``None`` if all is well.
    seconds
        How long the run itself was at work, with its share of what was computed together.
    engine
        The engine that it would have alone.
    state_bytes
        Bytes of its clients' states.
    """

    def __init__(self, meeting: Meeting, body: Callable[[OneProcess], None]) -> None:
        self.ask: AnyAsk | None = None
        self.ended = False
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.engine: BatchedEngine | None = None
        self.state_bytes = 0
        self._meeting, self._body = meeting, body
        self._answer: Any = None
        self._refusal: BaseException | None = None
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        self._since: float | None = None
        self._thread = threading.Thread(target=self._play, daemon=True)

    # ----------------------------------------------------------------------------------------- called by the meeting

    def go_on(self) -> None:
        """Let the run go on until it asks for something or ends."""
        switches = matrix_units.switches()
        self._since = time.perf_counter()
        if not self._thread.ident:
            self._thread.start()
        self._go.release()
        self._back.acquire()
        self.seconds += time.perf_counter() - self._since
        self._since = None
        matrix_units.switch_to(switches)

    def answer(self, found: Any) -> None:
        """Answer what was asked; the run reads it when it goes on."""
        self.ask, self._answer = None, found

    def refuse(self, error: BaseException) -> None:
        """Have the ask raise an error."""
        self.ask, self._refusal = None, error

    # --------------------------------------------------------------------------------------------- called by the run

    def wait_for(self, ask: AnyAsk) -> Any:
        """Ask for something, and give what it is answered with."""
        switches = matrix_units.switches()
        self.ask = ask
        self._back.release()
        self._go.acquire()
        matrix_units.switch_to(switches)
        answer, refusal, self._answer, self._refusal = self._answer, self._refusal, None, None
        if refusal is not None:
            raise refusal
        return answer

    def clock(self) -> float:
        """Give the seconds that this run has been at work."""
        return self.seconds + (0.0 if self._since is None else time.perf_counter() - self._since)

    def _play(self) -> None:
        self._go.acquire()
        try:
            self._body(SeatedProcess(self._meeting, self))
        except BaseException as error:
            self.error = error
        finally:
            self.ended = True
            self.engine = None
            self._back.release()


class SeatedProcess(OneProcess):
    """The process, as a run sees it that plays together with others."""

    def __init__(self, meeting: Meeting, seat: Seat) -> None:
        self._meeting, self._seat = meeting, seat

    def hold(self, samples: Samples) -> Samples:
        """Hold samples once that several runs have."""
        return self._meeting.store.hold(samples)

    def share(self, engine: Engine) -> Engine:
        """Let the run ask the meeting instead of its own engine."""
        if not isinstance(engine, BatchedEngine):
            return engine
        self._seat.engine = engine
        return GuestEngine(engine, self._seat.wait_for)

    def connect(self, local: Exchange) -> Exchange:
        """Look how large the clients' states are."""
        if isinstance(local, LocalExchange):
            rows = local.clients.rows.values()
            self._seat.state_bytes = sum(value.numel() * value.element_size() for value in rows)
        return local

    def any(self, flag: bool) -> bool:
        """Say whether the user has asked for a stop."""
        return flag or self._meeting.stopped_by is not None

    def clock(self) -> float:
        """Give the seconds that the run has been at work."""
        return self._seat.clock()


class Meeting:
    """Runs that play together.

    Attributes
    ----------
    stopped_by
        The signal by which the user asked for a stop, ``None`` if there was none.
    store
        The samples of all runs.
    """

    def __init__(self) -> None:
        self.stopped_by: int | None = None
        self.store = SampleStore()
        self._seats: list[Seat] = []
        self._engines: dict[Seat, tuple[JointEngine, int]] = {}
        self._at_once = self._undoable = False
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
        while True:
            for seat in self._seats:
                if seat.ended and seat not in told:
                    told.add(seat)
                    yield seat
            waiting = [seat for seat in self._seats if seat.ask is not None]
            if not waiting:
                return
            first = min(map(_stage, waiting))
            turn = [seat for seat in waiting if _stage(seat) == first]
            self._answer(turn)
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
            joined = {seat: engine for seat, engine in engines.items() if engine is first or same_net(first, engine)}
            if len(joined) > 1:
                engine = JointEngine(list(joined.values()))
                self._engines |= {seat: (engine, place) for place, seat in enumerate(joined)}

    def _answer(self, seats: Sequence[Seat]) -> None:
        if self.stopped_by is not None and (self._at_once or _in_round(seats[0])):
            for seat in seats:
                seat.refuse(KeyboardInterrupt())
            return
        for alike in _grouped(seats, self._engines):
            try:
                self._undoable = _in_round(alike[0])  # the only time at which a signal is raised here
                self._compute(alike)
                self._undoable = False
            except KeyboardInterrupt:
                for seat in alike:
                    seat.refuse(KeyboardInterrupt())

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
        asks = []
        for seat in seats:
            assert isinstance(seat.ask, TaskAsk)
            asks.append(dataclasses.replace(seat.ask, run=self._engines[seat][1]))
        with torch.no_grad():
            return list(engine.run(asks))

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

        with contextlib.ExitStack() as restore:
            # Only the main thread may set handlers; in another one the caller keeps its own.
            with contextlib.suppress(ValueError):
                for number in (signal.SIGINT, signal.SIGTERM):
                    restore.callback(signal.signal, number, signal.signal(number, stop))
            yield


def _in_round(seat: Seat) -> bool:
    return isinstance(seat.ask, TaskAsk) and seat.ask.call.purpose == "round"


def _stage(seat: Seat) -> tuple[bool, int]:
    """Say what comes first: evaluations before rounds, and the last exchanges of a round before the first.

    So runs wait for each other at the beginning of a round, whatever they asked for in the one before.
    """
    if not isinstance(seat.ask, TaskAsk) or seat.ask.call.purpose != "round":
        return False, 0
    return True, -seat.ask.call.exchange


def _grouped(seats: Sequence[Seat], engines: dict[Seat, tuple[JointEngine, int]]) -> list[list[Seat]]:
    """Group runs whose asks are alike."""
    found: dict[Hashable, list[Seat]] = {}
    for seat in seats:
        key: Hashable = id(seat)
        if isinstance(seat.ask, TaskAsk) and seat in engines:
            key = id(engines[seat][0]), signature(seat.ask.task)
        found.setdefault(key, []).append(seat)
    return list(found.values())


def _alone(seat: Seat) -> Any:
    ask, engine = seat.ask, seat.engine
    assert engine is not None
    if isinstance(ask, TaskAsk):
        with torch.no_grad():
            return engine.run(ask.task, ask.clients, ask.state, ask.message, ask.call)
    assert ask is not None
    return engine.predict_all(ask.predict, ask.rows, ask.clients, ask.splits, ask.shared)


def _rows(seat: Seat) -> int:
    return 1 if seat.ask is None else len(seat.ask.clients)


def _lacks_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
