"""The rounds of a run in this process, or in several: cohort → round → evaluation of all clients → records."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from coterie import randomness
from coterie.config import ExperimentConfig
from coterie.rows import Rows
from coterie.rows.host_copies import on_device, on_host
from coterie.runs.builder import Assembly
from coterie.runs.records import Recorder
from coterie.runs.storage import Checkpoint, RunFolder, as_restored
from coterie.runs.storage.kept_models import KeptModels
from coterie.simulation.accuracy_matrix import Matrix


class Rounds(Protocol):
    """How the rounds of an experiment are played and recorded.

    Attributes
    ----------
    in_round
        Whether a round is played just now: a stop then undoes it.
    measured
        Whether there must be something to sum up at the end; nodes may keep what they measure to themselves.
    """

    in_round: bool
    measured: bool

    def begin(self, completed: int) -> None:
        """Make up for what a stop left undone after the last complete round."""
        ...

    def play(self, round_number: int, close: Callable[[], None]) -> float | None:
        """Play a round and record it; give the mean of the primary metric where it was evaluated.

        ``close`` writes the round's checkpoint, for rounds that need it before anything else happens.
        """
        ...

    def state(self) -> tuple[Rows, Rows, dict[str, Any]]:
        """Give what a checkpoint of the last round holds: the server's state, the clients', and what else is needed."""
        ...

    def restore(self, found: Checkpoint) -> None:
        """Take over what :meth:`state` gave besides the two states."""
        ...


class SimulatedRounds:
    """Rounds whose clients are computed here."""

    measured = True

    def __init__(self, config: ExperimentConfig, folder: RunFolder, parts: Assembly) -> None:
        self.config, self.folder, self.parts = config, folder, parts
        self.simulation, self.recorder = parts.simulation, Recorder(config, folder, parts)
        self.trainers = parts.trainers
        self.in_round = False
        self._drawn = (0, self.trainers)  # the last cohort that was drawn, and its round; before the first all of them
        self._replies: list[int] = []  # that each client had sent after the last complete round, where that counts

    def begin(self, completed: int) -> None:
        """Do nothing: all of a round is recorded before it is complete."""

    def play(self, round_number: int, close: Callable[[], None]) -> float | None:
        config, simulation, recorder = self.config, self.simulation, self.recorder
        clock = simulation.processes.clock
        began = clock()
        cohort = self._cohort(round_number)
        simulation.expect(self._cohort(round_number + 1) if round_number < config.rounds else None)
        down, up = simulation.traffic.down, simulation.traffic.up
        self.in_round = True
        info = simulation.play_round(cohort, round_number)
        self.in_round = False
        simulation.server = as_restored(simulation.server)
        trained = clock()
        scores, matrix, last = None, None, round_number == config.rounds
        kept = KeptModels(self._is_trained_to_be_measured)
        if due(config, round_number):
            keep = kept.add if last and simulation.processes.count == 1 else None
            scores = self.parts.scorer.scores(round_number, answers=last, keep=keep)
            matrix = self._measure_matrix(round_number)
        protection, traffic = simulation.protection, simulation.traffic
        if protection is not None:
            self._replies = protection.replies.tolist()

        def record() -> None:
            if scores is not None:
                recorder.scores(round_number, scores)
                recorder.answers(round_number, scores)
                recorder.info(round_number, info, cohort)
            if matrix is not None:
                recorder.matrix(round_number, matrix)
            kept.write(self.folder.path)
            self.folder.metrics.append_bytes(round_number, up=traffic.up - up, down=traffic.down - down)
            if protection is not None:
                recorder.epsilon(round_number, protection.epsilon(self.trainers))
            self.folder.timings.append(round_number, training=trained - began, evaluation=clock() - trained)

        simulation.processes.write(record)
        return None if scores is None else recorder.headline(scores)

    def _cohort(self, round_number: int) -> Tensor:
        """Draw the clients of a round, or give those that were drawn while the round before was played."""
        number, drawn = self._drawn
        if number != round_number:
            what = self.config.seed, round_number, self.trainers, self.config.participation
            key = "cohort", *what[:2], id(self.trainers), self.config.participation
            drawn = self.simulation.processes.lately(key, partial(draw_cohort, *what))
            self._drawn = round_number, drawn
        return drawn

    def _is_trained_to_be_measured(self, kind: str) -> bool:
        """Say whether models of a kind are trained for the evaluation alone, so that no checkpoint has them."""
        return kind == "newcomer" or self.simulation.asks_to_personalise(self.trainers)

    def _measure_matrix(self, round_number: int) -> Matrix | None:
        config, scorer = self.config, self.parts.matrix_scorer
        between = config.eval_every * (config.matrix_every or config.rounds)
        if scorer is None or (round_number % between and round_number != config.rounds):
            return None
        return scorer.measure(round_number)

    def state(self) -> tuple[Rows, Rows, dict[str, Any]]:
        more = {} if self.simulation.protection is None else {"replies": self._replies}
        return self.simulation.server, self.simulation.clients.rows, more

    def restore(self, found: Checkpoint) -> None:
        if self.simulation.protection is not None:
            self._replies = found.extra["replies"]
            self.simulation.protection.replies = torch.tensor(self._replies, dtype=torch.int64)


def due(config: ExperimentConfig, round_number: int) -> bool:
    """Say whether a round is followed by an evaluation."""
    return round_number % config.eval_every == 0 or round_number == config.rounds


def draw_cohort(seed: int, round_number: int, trainers: Tensor, participation: float) -> Tensor:
    """Draw the clients of a round, at least one, in increasing order: a function of seed and round alone."""
    count = max(1, round(participation * len(trainers)))
    if count >= len(trainers):
        return trainers
    drawn = randomness.stream(seed, "cohort", round_number).choice(len(trainers), size=count, replace=False)
    drawn.sort()
    return on_device(on_host(trainers)[torch.from_numpy(drawn)], trainers.device)
