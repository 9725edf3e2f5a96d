"""A run's place among others: the thread that it plays in, and what it finds there in place of its engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from coterie.compute.batched import BatchedEngine
from coterie.compute.engine import Engine
from coterie.compute.finiteness import Finiteness
from coterie.compute.joint import GuestEngine, PredictAsk, TaskAsk
from coterie.compute.samples import Samples
from coterie.data import Dataset
from coterie.rows import matrix_units
from coterie.simulation.exchange import Exchange, LocalExchange
from coterie.simulation.measurement import Measured, Measurement
from coterie.simulation.processes import OneProcess

if TYPE_CHECKING:
    from coterie.studies.joint.meeting import Meeting

Result = TypeVar("Result")


@dataclass(frozen=True)
class MeasureAsk:
    """Models of a run that are to be measured."""

    wanted: Measurement

    @property
    def clients(self) -> Tensor:
        """The clients on whose samples they are measured."""
        return self.wanted.targets.clients


@dataclass(frozen=True)
class FiniteAsk:
    """Sums that a run wants to know to be finite, of a round with some clients, and what else is to be looked at."""

    sums: tuple[Tensor, ...]
    clients: Tensor
    others: tuple[Finiteness, ...] = ()


class WriteAsk:
    """A run that writes its folder, in its own thread while others go on; it is answered when that is done.

    Attributes
    ----------
    done
        Set when it is.
    seconds
        How long it took.
    clients
        None, for whom nothing is computed.
    """

    def __init__(self) -> None:
        self.done, self.seconds = threading.Event(), 0.0
        self.clients: tuple[()] = ()


AnyAsk = TaskAsk | PredictAsk | MeasureAsk | FiniteAsk | WriteAsk


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
    engine, guest
        The engine that it would have alone, and what it has in its place.
    state_bytes
        Bytes of its clients' states.
    """

    def __init__(self, meeting: Meeting, body: Callable[[OneProcess], None]) -> None:
        self.ask: AnyAsk | None = None
        self.ended = False
        self.error: BaseException | None = None
        self.seconds = 0.0
        self.engine: BatchedEngine | None = None
        self.guest: GuestEngine | None = None
        self.state_bytes = 0
        self._meeting, self._body = meeting, body
        self._answer: Any = None
        self._refusal: BaseException | None = None
        self._go, self._back = threading.Lock(), threading.Lock()
        self._go.acquire()
        self._back.acquire()
        # How products were rounded when the run went on, and when it came to ask for something.
        self._found = self._left = matrix_units.switches()
        self._since: float | None = None
        self._beside: float | None = None
        self._thread = threading.Thread(target=self._play, daemon=True)

    # ----------------------------------------------------------------------------------------- called by the meeting

    def go_on(self) -> None:
        """Let the run go on until it asks for something or ends."""
        self._found = matrix_units.switches()
        self._since = time.perf_counter()
        if not self._thread.ident:
            self._thread.start()
        self._go.release()
        self._back.acquire()
        self.seconds += time.perf_counter() - self._since
        self._since = None
        matrix_units.switch(self._left, self._found)

    def answer(self, found: Any) -> None:
        """Answer what was asked; the run reads it when it goes on."""
        self.ask, self._answer = None, found

    def refuse(self, error: BaseException) -> None:
        """Have the ask raise an error."""
        self.ask, self._refusal = None, error

    # --------------------------------------------------------------------------------------------- called by the run

    def wait_for(self, ask: AnyAsk) -> Any:
        """Ask for something, and give what it is answered with."""
        switches = self._left = matrix_units.switches()
        self.ask = ask
        self._back.release()
        self._go.acquire()
        matrix_units.switch(self._found, switches)
        answer, refusal, self._answer, self._refusal = self._answer, self._refusal, None, None
        if refusal is not None:
            raise refusal
        return answer

    def go_beside(self, work: Callable[[], None]) -> None:
        """Do something that needs nothing of others and changes nothing of theirs, while they go on."""
        switches, ask = matrix_units.switches(), WriteAsk()
        self._left = switches
        self.ask = ask
        self._back.release()
        failed: BaseException | None = None
        with self._meeting.pens:
            began = self._beside = time.perf_counter()
            try:
                work()
            except BaseException as error:
                failed = error
            ask.seconds, self._beside = time.perf_counter() - began, None
        ask.done.set()
        self._go.acquire()
        matrix_units.switch(self._found, switches)
        if failed is not None:
            raise failed

    def clock(self) -> float:
        """Give the seconds that this run has been at work."""
        now = time.perf_counter()
        return self.seconds + sum(now - since for since in (self._since, self._beside) if since is not None)

    def _play(self) -> None:
        self._go.acquire()
        try:
            self._body(SeatedProcess(self._meeting, self))
        except BaseException as error:
            self.error = error
        finally:
            self.ended = True
            self.engine = self.guest = None
            self._left = matrix_units.switches()
            self._back.release()


class SeatedProcess(OneProcess):
    """The process, as a run sees it that plays together with others."""

    def __init__(self, meeting: Meeting, seat: Seat) -> None:
        self._meeting, self._seat = meeting, seat

    def load(self, name: str, *, data_dir: Path | None = None, seed: int = 0) -> Dataset:
        """Load a data set, or give the one that an earlier run loaded."""
        return self._meeting.common.datasets.load(name, data_dir=data_dir, seed=seed)

    def once(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """Make something that a key decides, or give what an earlier run made."""
        made = self._meeting.common.made
        if key not in made:
            made[key] = make()
        found: Result = made[key]
        return found

    def lately(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """Make something that a key decides, or give what another run made in this round."""
        made = self._meeting.made_lately
        if key not in made:
            made[key] = make()
        found: Result = made[key]
        return found

    def hold(self, samples: Samples) -> Samples:
        """Hold samples once that several runs have."""
        return self._meeting.common.store.hold(samples)

    def share(self, engine: Engine) -> Engine:
        """Let the run ask the meeting instead of its own engine."""
        if not isinstance(engine, BatchedEngine):
            return engine
        self._seat.engine, self._seat.guest = engine, GuestEngine(engine, self._seat.wait_for)
        return self._seat.guest

    def connect(self, local: Exchange) -> Exchange:
        """Look how large the clients' states are."""
        if isinstance(local, LocalExchange):
            rows = local.clients.rows.values()
            self._seat.state_bytes = sum(value.numel() * value.element_size() for value in rows)
        return local

    def measure(self, engine: Engine, wanted: Measurement) -> Measured:
        """Have models measured together with those of others."""
        if not isinstance(engine, GuestEngine):
            return super().measure(engine, wanted)
        found: Measured = self._seat.wait_for(MeasureAsk(wanted))
        return found

    def are_finite(self, values: Sequence[Tensor], clients: Tensor) -> bool:
        """Say whether numbers have finite sums: a GPU is asked once for all runs, when it has all it has to do."""
        guest = self._seat.guest
        if guest is None or (guest.device.type == "cpu" and not self._meeting.as_on_a_gpu):
            return super().are_finite(values, clients)
        sums = tuple(value.sum() for value in values)
        found: bool = self._seat.wait_for(FiniteAsk(sums, clients, tuple(guest.unsettled)))
        return found

    def beside(self, work: Callable[[], None]) -> None:
        """Write the run's folder while others go on, who may write theirs."""
        self._seat.go_beside(work)

    def any(self, flag: bool) -> bool:
        """Say whether the user has asked for a stop."""
        return flag or self._meeting.stopped_by is not None

    def clock(self) -> float:
        """Give the seconds that the run has been at work."""
        return self._seat.clock()
