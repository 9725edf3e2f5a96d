"""An experiment: rounds with checkpoints in a run's folder, whatever stops them, and a summary at the end."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FrameType
from typing import Any

import torch

from coterie import signals
from coterie.config import ExperimentConfig
from coterie.errors import CheckpointError, ConfigError, Interrupted, RunFolderError
from coterie.rows import Rows, nbytes
from coterie.runs.builder import Assembly
from coterie.runs.rounds import Rounds
from coterie.runs.storage import Checkpoint, RunFolder, as_restored
from coterie.runs.summary import summary_of

Watcher = Callable[[int, float | None], None]
"""Told after each round: the round's number, and the mean of the primary metric when it was evaluated."""


class Experiment:
    """An experiment in its folder.

    Parameters
    ----------
    config
        The configuration.
    folder
        The run's folder, open for writing.
    parts
        What it computes with.
    rounds
        How its rounds are played and recorded.

    Attributes
    ----------
    completed
        The last round whose records are complete.
    """

    def __init__(self, config: ExperimentConfig, folder: RunFolder, parts: Assembly, rounds: Rounds) -> None:
        self.config, self.folder, self.parts, self.rounds = config, folder, parts, rounds
        self.simulation, self.processes = parts.simulation, parts.simulation.processes
        self._threads = torch.get_num_threads()
        self._put(self.simulation.server, self.simulation.clients.rows)
        self.completed = self._checkpointed = 0
        self._closing = False
        self._stopped_by: int | None = None
        held = nbytes(self.simulation.server) + nbytes(self.simulation.clients.rows)
        folder.checkpoints.timed_by(self.processes.clock, held)
        self.processes.stops_by(lambda: self._stopped_by is not None and self.rounds.in_round)

    @property
    def leads(self) -> bool:
        """Whether this process writes the run's folder."""
        return self.processes.leads

    def _put(self, server: Rows, clients: Rows) -> None:
        # A resumed run has its tensors contiguous and apart from one another, so every run has.
        states = {"server": server, "clients": clients}
        together = as_restored(
            {f"{owner}/{name}": value for owner, state in states.items() for name, value in state.items()}
        )
        self.simulation.server, self.simulation.clients.rows = (
            {name: together[f"{owner}/{name}"] for name in state} for owner, state in states.items()
        )

    # ------------------------------------------------------------------------------------------------------- restoring

    def restore(self) -> int:
        """Go back to the newest checkpoint and drop what was recorded after it; give its round, 0 if there is none."""
        found = self.processes.together(self._latest)
        complaint = f"the ranks find different checkpoints in {self.folder.path}: all must see the same folder"
        self.processes.agree(complaint, [-1 if found is None else found.round])
        if found is None:
            self.processes.write(lambda: self.folder.rewind(-1))
            return 0
        self._refuse_foreign(found)
        self._put(found.server, found.clients)
        self.completed = self._checkpointed = self.simulation.round = found.round
        self.rounds.restore(found)
        self.processes.write(lambda: self.folder.rewind(found.round))
        return found.round

    def _latest(self) -> Checkpoint | None:
        places = {"server": self.simulation.server, "clients": self.simulation.clients.rows}
        return self.folder.checkpoints.latest(self.parts.engine.device, places)

    def _refuse_foreign(self, found: Checkpoint) -> None:
        for what, digest in self.parts.fingerprint.items():
            if found.extra.get(what) != digest:
                raise CheckpointError(
                    f"the {what} is not what the run in {self.folder.path} began with: put the old {what} back, or "
                    "begin a new run"
                )
        for whose, state, now in (
            ("server", found.server, self.simulation.server),
            ("clients", found.clients, self.simulation.clients.rows),
        ):
            old, new = ({name: (value.shape, value.dtype) for name, value in each.items()} for each in (state, now))
            if old != new:
                raise CheckpointError(
                    f"the {whose} state in {self.folder.path} was written by another version of "
                    f"{self.simulation.algorithm.title}: use the version that began the run"
                )

    # --------------------------------------------------------------------------------------------------------- playing

    def run(self, watch: Watcher | None = None) -> None:
        """Play all rounds that are left; whatever stops it, what is done is kept.

        A stop by the user is a :class:`~coterie.errors.Interrupted`.

        Parameters
        ----------
        watch
            Told after each round.
        """
        with self._signals(), enough_memory(), self._kept(), threads(self._threads):
            self.rounds.begin(self.completed)
            for round_number in range(self.completed + 1, self.config.rounds + 1):
                mean = self.rounds.play(round_number, partial(self._close, round_number))
                self.completed = round_number
                if watch is not None:
                    self.processes.together(partial(watch, round_number, mean))
                # After the watcher: what a checkpoint closes has been told, and what comes after it is told again.
                if self._checkpointed < round_number and self._checkpoint_is_due(round_number):
                    self.checkpoint()
                self._stop_if_asked()

    def finish(self, tell: Callable[[Mapping[str, Any]], None]) -> None:
        """Write the summary, which says that the run is finished, and tell it."""
        summary: dict[str, Any] = {}

        def close() -> None:
            summary.update(
                summary_of(
                    self.config,
                    self.folder.metrics.columns(),
                    metric=self.parts.scorer.primary,
                    rounds=self.completed,
                    seconds=self.folder.timings.total(),
                    clients=self.parts.population.roles.honest,
                    measured=self.rounds.measured,
                )
            )
            self.folder.finish(summary)

        self.processes.beside(close)
        self.processes.write(lambda: tell(summary))

    # --------------------------------------------------------------------------------------------------- checkpointing

    def checkpoint(self) -> None:
        """Write the state after the last complete round."""

        def write() -> None:
            server, clients, more = self.rounds.state()
            self.folder.checkpoint(self.completed, server, clients, self.parts.fingerprint | more)

        self.processes.checkpoint(write, self.simulation.placement)
        self._checkpointed = self.completed

    def _close(self, round_number: int) -> None:
        self.completed = round_number
        self.checkpoint()

    def _checkpoint_is_due(self, round_number: int) -> bool:
        every, checkpoints = self.config.checkpoint_every, self.folder.checkpoints
        if round_number == self.config.rounds:
            return True
        if every is None:
            return self.processes.told(lambda: checkpoints.due)
        return round_number % every == 0 and self.processes.told(lambda: checkpoints.affordable)

    # -------------------------------------------------------------------------------------------------------- stopping

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self.keep()
            raise Interrupted(self.folder.path, self._checkpointed, self._stopped_by or signal.SIGINT) from None
        except BaseException as error:
            self.processes.part_with(error)
            with contextlib.suppress(RunFolderError):  # what stopped the run is worth more than a second failure
                self.keep()
            raise

    def keep(self) -> None:
        """Keep what is done when the run stops."""
        self._closing = True
        self.simulation.recover()
        # After a stop between a round and the end of its records, state and records do not belong together: then the
        # last checkpoint stands, and the rounds after it are played again. A checkpoint needs all processes.
        if self.processes.reachable and self.simulation.round == self.completed > self._checkpointed:
            self.checkpoint()
        if self.leads:
            self.folder.flush()

    def _stop_if_asked(self) -> None:
        if self.processes.any(self._stopped_by is not None) and self.completed < self.config.rounds:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Stop at once inside a round (which is then undone), else when the round's records are complete."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self._closing:
                return
            again, self._stopped_by = self._stopped_by is not None, number
            if self.processes.may_stop_now(self.rounds.in_round, again):
                raise KeyboardInterrupt

        with signals.handled(stop, signal.SIGINT, signal.SIGTERM):
            yield


@contextlib.contextmanager
def enough_memory() -> Iterator[None]:
    """Turn a lack of memory into a :class:`~coterie.errors.ConfigError` that says what to do."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # PyTorch has no type of its own for a CPU without memory
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise ConfigError(
                "there is too little memory: begin anew with --keep disk, a smaller --chunk or model, or fewer clients"
            ) from error
        raise


@contextlib.contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Compute with so many CPU threads, then with as many as before; ``None`` changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
