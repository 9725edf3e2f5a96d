"""The rounds of an experiment: cohort → round → evaluation of all clients → record → checkpoint."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType

import torch
from torch import Tensor

from coterie import randomness
from coterie.config import ExperimentConfig
from coterie.errors import CheckpointError, ConfigError, Interrupted, RunFolderError
from coterie.rows import Rows
from coterie.runs.builder import Assembly
from coterie.runs.records import Recording
from coterie.runs.storage import Checkpoint, RunFolder, as_restored
from coterie.simulation.accuracy_matrix import Matrix

Watcher = Callable[[int, float | None], None]
"""Told after each round: the round's number, and the mean of the primary metric when it was evaluated."""


def draw_cohort(seed: int, round_number: int, trainers: Tensor, participation: float) -> Tensor:
    """Draw the clients of a round.

    Parameters
    ----------
    seed
        The experiment's seed.
    round_number
        The round.
    trainers
        Clients that may take part.
    participation
        Fraction of them to draw, at least one.

    Returns
    -------
    Tensor
        Clients, in increasing order.
    """
    count = max(1, round(participation * len(trainers)))
    if count >= len(trainers):
        return trainers
    drawn = randomness.stream(seed, "cohort", round_number).choice(len(trainers), size=count, replace=False)
    return trainers[torch.from_numpy(drawn).sort().values.to(trainers.device)]


class Experiment(Recording):
    """An experiment in its folder.

    Parameters
    ----------
    config
        The configuration.
    folder
        The run's folder, open for writing.
    parts
        What it computes with.
    """

    def __init__(self, config: ExperimentConfig, folder: RunFolder, parts: Assembly) -> None:
        super().__init__(config, folder, parts)
        self.trainers = parts.population.roles.trainers.to(self.engine.device)
        self._threads = torch.get_num_threads()
        self._put(self.simulation.server, self.simulation.clients.rows)
        self.completed = 0  # the last round whose records are complete
        self._checkpointed = 0
        self._in_round = self._closing = False
        self._stopped_by: int | None = None
        self._replies: list[int] = []  # that each client had sent after the last complete round, where that counts

    def _put(self, server: Rows, clients: Rows) -> None:
        # A resumed run has its tensors contiguous and apart from one another, so every run has.
        states = {"server": server, "clients": clients}
        together = as_restored(
            {f"{owner}/{name}": value for owner, state in states.items() for name, value in state.items()}
        )
        self.simulation.server, self.simulation.clients.rows = (
            {name: together[f"{owner}/{name}"] for name in state} for owner, state in states.items()
        )

    def restore(self) -> int:
        """Go back to the newest checkpoint; drop what was recorded after it.

        Returns
        -------
        int
            The last round that is kept, 0 if there is no checkpoint.
        """
        found = self._latest()
        if found is None:
            self._write(lambda: self.folder.rewind(-1))
            return 0
        self._refuse_foreign(found)
        self._put(found.server, found.clients)
        self.completed = self._checkpointed = self.simulation.round = found.round
        if self.simulation.protection is not None:
            self.simulation.protection.replies = torch.tensor(found.extra["replies"], dtype=torch.int64)
            self._replies = found.extra["replies"]
        self._write(lambda: self.folder.rewind(found.round))
        return found.round

    def _latest(self) -> Checkpoint | None:
        places = {"server": self.simulation.server, "clients": self.simulation.clients.rows}
        return self.folder.checkpoints.latest(self.engine.device, places)

    def _write(self, work: Callable[[], None]) -> None:
        """Do what only whoever writes the run's folder can fail in."""
        work()

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

    def run(self, watch: Watcher | None = None) -> None:
        """Play all rounds that are left; whatever stops it, what is done is kept.

        A stop by the user is a :class:`~coterie.errors.Interrupted`.

        Parameters
        ----------
        watch
            Told after each round.
        """
        with self._signals(), enough_memory(), self._kept(), threads(self._threads):
            for round_number in range(self.completed + 1, self.config.rounds + 1):
                mean = self._round(round_number)
                if watch is not None:
                    self._write(partial(watch, round_number, mean))
                # After the watcher: what a checkpoint closes has been told, and what comes after it is told again.
                if self._checkpointed < round_number and self._closes(round_number):
                    self._checkpoint()
                self._stop_if_asked()

    def _closes(self, round_number: int) -> bool:
        every = self.config.checkpoint_every
        due = (every is None or round_number % every == 0) and self._affordable()
        return due or round_number == self.config.rounds

    def _affordable(self) -> bool:
        checkpoints = self.folder.checkpoints
        return checkpoints.due if self.config.checkpoint_every is None else checkpoints.affordable

    def _stop_if_asked(self) -> None:
        if self._stopped_by is not None and self.completed < self.config.rounds:
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:
            self._keep()
            raise Interrupted(self.folder.path, self._checkpointed, self._stopped_by or signal.SIGINT) from None
        except BaseException as error:
            self._part_with(error)
            with contextlib.suppress(RunFolderError):  # what stopped the run is worth more than a second failure
                self._keep()
            raise

    def _part_with(self, error: BaseException) -> None:
        """Do what is to be done before what is done so far is kept."""

    def _keep(self) -> None:
        self._closing = True
        self.simulation.rollback()
        # After a stop between a round and the end of its records, state and records do not belong together: then the
        # last checkpoint stands, and the rounds after it are played again.
        if self.simulation.round == self.completed > self._checkpointed:
            self._checkpoint()
        self.folder.flush()

    def _checkpoint(self) -> None:
        simulation = self.simulation
        extra = self.parts.fingerprint | ({} if simulation.protection is None else {"replies": self._replies})
        self.folder.checkpoint(self.completed, simulation.server, simulation.clients.rows, extra)
        self._checkpointed = self.completed

    def _round(self, round_number: int) -> float | None:
        simulation = self.simulation
        began = time.perf_counter()
        seed, share = self.config.seed, self.config.participation
        cohort, following = (draw_cohort(seed, round_number + later, self.trainers, share) for later in (0, 1))
        simulation.expect(following if round_number < self.config.rounds else None)
        down, up = simulation.traffic.down, simulation.traffic.up
        self._in_round = True
        info = simulation.play_round(cohort, round_number)
        self._in_round = False
        simulation.server = as_restored(simulation.server)
        trained = time.perf_counter()
        scores, matrix = None, None
        if round_number % self.config.eval_every == 0 or round_number == self.config.rounds:
            scores = self.scorer.scores(round_number)
            matrix = self._measure_matrix(round_number)
        if simulation.protection is not None:
            self._replies = simulation.protection.replies.tolist()
        traffic = simulation.traffic

        def records() -> None:
            if scores is not None:
                self._record(round_number, scores)
                self._record_info(round_number, info, cohort)
            if matrix is not None:
                self._record_matrix(round_number, matrix)
            self.folder.metrics.append_bytes(round_number, up=traffic.up - up, down=traffic.down - down)
            if simulation.protection is not None:
                self._record_epsilon(round_number, simulation.protection.epsilon(self.trainers))
            self.folder.timings.append(round_number, training=trained - began, evaluation=time.perf_counter() - trained)

        self._write(records)
        self.completed = round_number
        return None if scores is None else self._headline(scores)

    def _measure_matrix(self, round_number: int) -> Matrix | None:
        config, crossing = self.config, self.parts.crossing
        between = config.eval_every * (config.matrix_every or config.rounds)
        if crossing is None or (round_number % between and round_number != config.rounds):
            return None
        return crossing.measure(round_number)

    @property
    def leads(self) -> bool:
        """Whether this process writes the run's folder."""
        return True

    def conclude(self, work: Callable[[], None]) -> None:
        """Do what is left to do after the last round.

        Parameters
        ----------
        work
            What to do, where the run's folder is written.
        """
        self._write(work)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Stop at once inside a round (which is then undone), else when the round's records are complete."""

        def stop(number: int, frame: FrameType | None) -> None:
            if not self._closing:
                self._asked_to_stop(number)

        with contextlib.ExitStack() as restore:
            # Only the main thread may set handlers; in another one the caller keeps its own.
            with contextlib.suppress(ValueError):
                for number in (signal.SIGINT, signal.SIGTERM):
                    restore.callback(signal.signal, number, signal.signal(number, stop))
            yield

    def _asked_to_stop(self, number: int) -> None:
        again = self._stopped_by is not None
        self._stopped_by = number
        if self._in_round or again:
            raise KeyboardInterrupt


@contextlib.contextmanager
def enough_memory() -> Iterator[None]:
    """Say in a sentence that there is too little memory.

    Yields
    ------
    None
        While the context is open.

    Raises
    ------
    ConfigError
        If there is.
    MemoryError
        As it was raised, if it has another reason.
    RuntimeError
        As it was raised, if it has another reason.
    """
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
    """Compute with so many CPU threads, then with as many as before.

    Parameters
    ----------
    count
        How many, ``None`` to leave it as it is.

    Yields
    ------
    None
        While the context is open, PyTorch uses that many.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
