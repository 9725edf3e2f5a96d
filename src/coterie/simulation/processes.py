"""The processes that compute a run: this one alone, unless the run is sharded.

A simulation and an experiment have one object that says which clients are computed here, and how what was found for
them becomes everybody's. :class:`OneProcess` has nothing to share out and nobody to agree with;
:class:`~coterie.simulation.sharded.ShardedProcesses` has the same methods over several processes.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from coterie import data
from coterie.algorithms.base import State
from coterie.compute.engine import Engine
from coterie.compute.samples import Samples
from coterie.data import Dataset
from coterie.rows import Rows, take_rows
from coterie.rows.placement import Keep, Placement
from coterie.simulation.exchange import Exchange
from coterie.simulation.measurement import Measured, Measurement, measured

Result = TypeVar("Result")


class OneProcess:
    """All clients are computed in this process."""

    count: int = 1
    leads: bool = True
    """Whether this process writes the run's folder and prints."""

    # ---------------------------------------------------------------------------------------- which clients are where

    def mine(self, clients: Tensor) -> Tensor:
        """Give those of some clients that are computed in this process."""
        return clients

    def own_part(self, clients: Tensor, rows: Rows) -> tuple[Tensor, Rows]:
        """Give :meth:`mine` of some clients, and their rows of a tensor that has one for each of these."""
        return clients, rows

    def rows_of_mine(self, rows: Tensor, clients: Tensor) -> Tensor:
        """Copy the rows of :meth:`mine` from a tensor of the server's with a row per client of the federation."""
        return take_rows(rows, clients)

    def gathered(self, values: Tensor, clients: Tensor) -> Tensor:
        """Put together what all processes found for clients; ``values`` has a column for each of :meth:`mine`."""
        return values

    # ----------------------------------------------------------------------------------------- how the work is set up

    def placement(self, keep: Keep, device: torch.device, scratch: str | os.PathLike[str] | None) -> Placement:
        """Make what places the rows of all clients."""
        return Placement(keep, device, scratch)

    def connect(self, local: Exchange) -> Exchange:
        """Make an exchange that reaches all clients, from one that reaches those of this process."""
        return local

    def load(self, name: str, *, data_dir: Path | None = None, seed: int = 0) -> Dataset:
        """Load a data set; runs that play together read one that all of them use once."""
        return data.load(name, data_dir=data_dir, seed=seed)

    def once(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """Make something that a key decides, and that nobody changes; runs that play together make it once."""
        return make()

    def lately(self, key: Hashable, make: Callable[[], Result]) -> Result:
        """Make something that a key decides, and that nobody changes; runs in one round make it once."""
        return make()

    def hold(self, samples: Samples) -> Samples:
        """Give the same samples, as they are held in this process."""
        return samples

    def share(self, engine: Engine) -> Engine:
        """Give what the run asks in place of its engine; runs that play together share one."""
        return engine

    def measure(self, engine: Engine, wanted: Measurement) -> Measured:
        """Measure models on the samples of clients of this process."""
        return measured(engine, [wanted], [wanted.outputs(engine)])[0]

    def are_finite(self, values: Sequence[Tensor], clients: Tensor) -> bool:
        """Say whether numbers that a round with these clients made have finite sums: all are, if so."""
        return all(math.isfinite(value.sum().item()) for value in values)

    def clock(self) -> float:
        """Give the seconds by which the run's rounds are timed, from some beginning."""
        return time.perf_counter()

    def align(self, engine: Engine) -> None:
        """Let all processes' engines compute in the same way."""

    def device(self, name: str, resolve: Callable[[], torch.device]) -> torch.device:
        """Give the device that this process computes on, where the configuration says ``name``."""
        return resolve()

    def common_device(self, name: str, resolve: Callable[[], torch.device]) -> str:
        """Give what the run's configuration says of the devices of all processes."""
        return str(resolve())

    # ------------------------------------------------------------------------------------------- working side by side

    def together(self, work: Callable[[], Result], stoppable: bool = False) -> Result:
        """Do this process's part of something; where one process fails, all raise what it raised."""
        return work()

    def write(self, work: Callable[[], None]) -> None:
        """Let the process that leads write the run's folder; where it fails, all raise what it raised."""
        work()

    def beside(self, work: Callable[[], None]) -> None:
        """Let the process that leads do something with the run's folder alone, while other runs may go on."""
        self.write(work)

    def told(self, work: Callable[[], Result]) -> Result:
        """Give all processes what the first one's ``work`` gives."""
        return work()

    def any(self, flag: bool) -> bool:
        """Say whether something holds in any process."""
        return flag

    def agree(self, complaint: str, numbers: Sequence[int]) -> None:
        """Raise the complaint if the processes have different numbers."""

    def agree_on_server(self, server: State) -> None:
        """See that all processes have the same new server state."""

    def session(self) -> contextlib.AbstractContextManager[None]:
        """Give the context in which all processes play a round or an evaluation."""
        return contextlib.nullcontext()

    def checkpoint(self, work: Callable[[], None], placement: Placement) -> None:
        """Let the process that leads write a checkpoint, for which it may need rows of the others."""
        self.beside(work)

    # ------------------------------------------------------------------------------------------- stopping and failing

    @property
    def reachable(self) -> bool:
        """Whether this process can still do something together with the others."""
        return True

    def part_with(self, error: BaseException) -> None:
        """Leave the others behind if they do not raise the same."""

    def stops_by(self, asked: Callable[[], bool]) -> None:
        """Learn how to find out whether the user has asked for a stop within a round."""

    def may_stop_now(self, in_round: bool, again: bool) -> bool:
        """Say whether a signal may interrupt what this process does just now."""
        return in_round or again


ONE_PROCESS = OneProcess()
