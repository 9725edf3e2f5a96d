"""The experiment: cohort → round → evaluation of all clients → record → checkpoint, and how it goes on after a stop."""

from __future__ import annotations

import contextlib
import math
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from coterie import randomness
from coterie.algorithms.base import Info, Weights
from coterie.assembly import Assembly, assemble
from coterie.config import ExperimentConfig, from_mapping
from coterie.errors import AlgorithmError, CheckpointError, ConfigError, Interrupted, RunFolderError
from coterie.evaluation import read
from coterie.rows import Rows
from coterie.scoring import Score
from coterie.storage import EVERYONE, Checkpoint, RunFolder, settled

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
    """

    def __init__(self, config: ExperimentConfig, folder: RunFolder, parts: Assembly) -> None:
        self.config, self.folder, self.parts = config, folder, parts
        self.simulation, self.scorer, self.engine = parts.simulation, parts.scorer, parts.engine
        self.trainers = parts.world.roles.trainers.to(self.engine.device)
        self._honest = torch.tensor(parts.world.roles.honest, device=self.engine.device)
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
        together = settled(
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
        places = {"server": self.simulation.server, "clients": self.simulation.clients.rows}
        found = self.folder.checkpoints.latest(self.engine.device, places)
        if found is None:
            self.folder.rewind(-1)
            return 0
        self._refuse_foreign(found)
        self._put(found.server, found.clients)
        self.completed = self._checkpointed = self.simulation.round = found.round
        if self.simulation.protection is not None:
            self.simulation.protection.replies = torch.tensor(found.extra["replies"], dtype=torch.int64)
            self._replies = found.extra["replies"]
        self.folder.rewind(found.round)
        return found.round

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
        with self._signals(), _enough_memory(), self._kept(), threads(self._threads):
            for round_number in range(self.completed + 1, self.config.rounds + 1):
                mean = self._round(round_number)
                if watch is not None:
                    watch(round_number, mean)
                # After the watcher: what a checkpoint closes has been told, and what comes after it is told again.
                if self._checkpointed < round_number and self._closes(round_number):
                    self._checkpoint()
                self._stop_if_asked()

    def _closes(self, round_number: int) -> bool:
        due = round_number % self.config.checkpoint_every == 0 and self.folder.checkpoints.affordable
        return due or round_number == self.config.rounds

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
        except BaseException:
            with contextlib.suppress(RunFolderError):  # what stopped the run is worth more than a second failure
                self._keep()
            raise

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
        simulation.server = settled(simulation.server)
        trained = time.perf_counter()
        mean = None
        if round_number % self.config.eval_every == 0 or round_number == self.config.rounds:
            scores = self.scorer.scores(round_number)
            self._record(round_number, scores)
            self._record_info(round_number, info, cohort)
            self._record_matrix(round_number)
            mean = self._headline(scores)
        traffic = simulation.traffic
        self.folder.metrics.append_bytes(round_number, up=traffic.up - up, down=traffic.down - down)
        if simulation.protection is not None:
            self._replies = simulation.protection.replies.tolist()
            self._record_epsilon(round_number, simulation.protection.epsilon(self.trainers))
        self.folder.timings.append(round_number, training=trained - began, evaluation=time.perf_counter() - trained)
        self.completed = round_number
        return mean

    def _record(self, round_number: int, scores: list[Score]) -> None:
        for score in scores:
            # A metric that a client does not have (no samples, one class) is left out; a loss that is NaN is not.
            has = self.engine.sizes[score.split][score.clients] > 0
            keep = has if score.metric == "loss" else has & ~score.values.isnan()
            self.folder.metrics.append(
                round_number,
                score.model,
                score.split,
                score.metric,
                score.values[keep].cpu().numpy(),
                score.clients[keep].cpu().numpy(),
            )

    def _record_epsilon(self, round_number: int, epsilon: float) -> None:
        if math.isfinite(epsilon):  # without noise there is no bound
            self.folder.metrics.append(round_number, "federation", "server", "epsilon", [epsilon], [EVERYONE])

    def _record_info(self, round_number: int, info: Info, cohort: Tensor) -> None:
        for name, value in info.items():
            if isinstance(value, Weights):
                self.folder.weights.append(
                    round_number, value.values.cpu().numpy(), value.rows.cpu().numpy(), value.columns.cpu().numpy()
                )
                continue
            each = value.dim() == 1 and len(value) == len(cohort)
            if not each and value.numel() != 1:
                raise AlgorithmError(
                    f"{self.simulation.algorithm.title} reports {name!r} of shape {tuple(value.shape)}: it must be one "
                    f"number, or one for each of the {len(cohort)} clients of the round"
                )
            self.folder.metrics.append(
                round_number,
                "federation",
                "server",
                name,
                value.double().reshape(-1).cpu().numpy(),
                cohort.tolist() if each else [EVERYONE],
            )

    def _record_matrix(self, round_number: int) -> None:
        config, crossing = self.config, self.parts.crossing
        between = config.eval_every * (config.matrix_every or config.rounds)
        if crossing is None or (round_number % between and round_number != config.rounds):
            return
        found = crossing.measure(round_number)
        clients, metrics = found.clients.cpu().numpy(), self.folder.metrics
        self.folder.matrix.append(round_number, found.values.cpu().numpy(), clients)
        readings = read(found.values, config.seed, config.s_acc, found.global_values)
        of_clients = {"l_acc": readings.local, "g_acc": readings.everyone}
        of_clients |= {f"s_acc {fraction}": spread for fraction, spread in readings.synthetic.items()}
        for name, spread in of_clients.items():
            metrics.append(round_number, "personal", "cross", name, spread.values.cpu().numpy(), clients)
        if readings.global_model is not None:
            values = readings.global_model.values.cpu().numpy()
            metrics.append(round_number, "global", "cross", found.metric, values, clients)
        metrics.append(round_number, "federation", "cross", "samples", [found.samples], [EVERYONE])

    def _headline(self, scores: list[Score]) -> float | None:
        for model in ("personal", "global"):
            for score in scores:
                if (score.model, score.split, score.metric) == (model, "test", self.scorer.primary):
                    return float(score.values[torch.isin(score.clients, self._honest)].nanmean())
        return None

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Stop at once inside a round (which is then undone), else when the round's records are complete."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self._closing:
                return
            again = self._stopped_by is not None
            self._stopped_by = number
            if self._in_round or again:
                raise KeyboardInterrupt

        with contextlib.ExitStack() as restore:
            # Only the main thread may set handlers; in another one the caller keeps its own.
            with contextlib.suppress(ValueError):
                for number in (signal.SIGINT, signal.SIGTERM):
                    restore.callback(signal.signal, number, signal.signal(number, stop))
            yield


@contextlib.contextmanager
def _enough_memory() -> Iterator[None]:
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


def begin(config: ExperimentConfig, path: Path, data_dir: Path | None = None) -> Experiment:
    """Begin a new run; what cannot work is refused before its folder is made.

    Parameters
    ----------
    config
        The configuration.
    path
        Its folder, which must not exist or be empty.
    data_dir
        Where data sets lie.

    Returns
    -------
    Experiment
        The experiment, before its first round.

    Raises
    ------
    RunFolderError
        If there is a run in the folder.
    """
    if (path / "config.yaml").exists():  # before the data are loaded; the folder itself looks again, and more closely
        raise RunFolderError(f"{path} holds a run already: choose another --out, or `coterie resume {path}`")
    config = config.model_copy(update={"device": str(config.torch_device())})
    with _enough_memory(), threads(config.threads), contextlib.ExitStack() as on_failure:
        parts = assemble(config, data_dir, None, path)
        folder = RunFolder.create(path, config.plain())
        on_failure.callback(folder.close)
        folder.write_shares(parts.world.holdings())
        folder.write_choices(_choices(parts, data_dir))
        experiment = Experiment(config, folder, parts)
        on_failure.pop_all()
    return experiment


def _choices(parts: Assembly, data_dir: Path | None) -> dict[str, Any]:
    chosen = parts.engine.choices | {"keep": parts.simulation.keeper.keep}
    return chosen | ({} if data_dir is None else {"data_dir": str(data_dir.expanduser().absolute())})


def resume(path: Path, data_dir: Path | None = None) -> Experiment:
    """Open a run that was begun, at its newest checkpoint.

    Parameters
    ----------
    path
        The run's folder.
    data_dir
        Where data sets lie; by default where they lay.

    Returns
    -------
    Experiment
        The experiment.

    Raises
    ------
    RunFolderError
        If the run is finished.
    """
    with contextlib.ExitStack() as on_failure:
        folder = RunFolder.open(path)
        on_failure.callback(folder.close)
        if folder.summary() is not None:
            raise RunFolderError(f"{path} is finished: there is nothing to resume")
        config, choices = from_mapping(folder.config), folder.choices
        if data_dir is None and "data_dir" in choices:
            data_dir = Path(choices["data_dir"])
        with _enough_memory(), threads(config.threads or choices.get("threads")):
            parts = assemble(config, data_dir, choices, path)
            if not choices:
                folder.write_shares(parts.world.holdings())
                folder.write_choices(_choices(parts, data_dir))
            experiment = Experiment(config, folder, parts)
        experiment.restore()
        on_failure.pop_all()
    return experiment
