"""What an experiment records of a round."""

from __future__ import annotations

import math
import warnings

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from coterie.algorithms.base import Info, Weights
from coterie.config import ExperimentConfig
from coterie.errors import AlgorithmError, CoterieWarning
from coterie.evaluation import summarise_matrix
from coterie.runs.builder import Assembly
from coterie.runs.storage import EVERYONE, RunFolder
from coterie.runs.storage.answers import Answers
from coterie.simulation.accuracy_matrix import Matrix
from coterie.simulation.scoring import Score, on_host

Mask = npt.NDArray[np.bool_]
_GROUPS = 32  # of clients whose samples are remembered


class Recorder:
    """Writes what was measured in a round into the run's folder."""

    def __init__(self, config: ExperimentConfig, folder: RunFolder, parts: Assembly) -> None:
        self.folder = folder
        self._config, self._title = config, parts.simulation.algorithm.title
        self._sizes, self._primary = parts.engine.host_sizes, parts.scorer.primary
        self._warned: set[str] = set()  # metrics
        self._honest = np.array(parts.population.roles.honest, dtype=np.int64)
        self._has: dict[tuple[str, int], tuple[Mask, Tensor]] = {}

    def scores(self, round_number: int, scores: list[Score]) -> None:
        for score in map(on_host, scores):
            # A metric that a client does not have (no samples, one class) is left out; a loss that is NaN is not. By
            # NumPy, whose operations on so few numbers take a tenth of the time.
            clients, values, has = score.clients.numpy(), score.values.numpy(), self._with_samples(score)
            keep = has if score.metric == "loss" else has & ~np.isnan(values)
            self._warn_of_fewer(score, has, keep)
            self.folder.metrics.append(
                round_number, score.model, score.split, score.metric, values[keep], clients[keep]
            )

    def _with_samples(self, score: Score) -> Mask:
        """Say which clients have samples of a score's split: the same in every round, so found out once."""
        key = score.split, id(score.clients)
        if key not in self._has:
            if len(self._has) >= _GROUPS:
                self._has.clear()
            # The clients are held, so that no other tensor is found at their address.
            self._has[key] = (self._sizes[score.split][score.clients] > 0).numpy(), score.clients
        return self._has[key][0]

    def answers(self, round_number: int, scores: list[Score]) -> None:
        """Record how each validation and each test sample was answered, where that was asked for."""
        found: dict[str, Answers] = {}
        for score in map(on_host, scores):
            if score.answers is not None:
                sizes = self._sizes[score.split][score.clients].numpy()
                owner = np.repeat(score.clients.numpy().astype(np.int32), sizes)
                found.setdefault(score.split, {})[score.model] = owner, score.answers.cpu().numpy()
        self.folder.record_answers(round_number, found)

    def _warn_of_fewer(self, score: Score, has: Mask, keep: Mask) -> None:
        count, defined = int(has.sum()), int(keep.sum())
        if score.split == "test" and defined < count and score.metric not in self._warned:
            self._warned.add(score.metric)
            whom = f"{count - defined} of {count} clients" if defined else f"any of {count} clients"
            then = f"its means are over the other {defined}" if defined else "there is nothing to sum up in it"
            warnings.warn(
                f"{score.metric} is not defined for {whom}, whose test samples are too much alike (of one class, for "
                f"instance): {then}",
                CoterieWarning,
                stacklevel=2,
            )

    def number(self, round_number: int, name: str, value: float) -> None:
        """Record a number of the whole federation."""
        self.folder.metrics.append(round_number, "federation", "server", name, [value], [EVERYONE])

    def epsilon(self, round_number: int, epsilon: float) -> None:
        if math.isfinite(epsilon):  # without noise there is no bound
            self.number(round_number, "epsilon", epsilon)

    def info(self, round_number: int, info: Info, cohort: Tensor) -> None:
        """Record what a method reports of a round: one number, one for each client of the cohort, or weights."""
        for name, value in info.items():
            if isinstance(value, Weights):
                self.folder.collaboration_weights.append(
                    round_number, value.values.cpu().numpy(), value.rows.cpu().numpy(), value.columns.cpu().numpy()
                )
                continue
            each = value.dim() == 1 and len(value) == len(cohort)
            if not each and value.numel() != 1:
                raise AlgorithmError(
                    f"{self._title} reports {name!r} of shape {tuple(value.shape)}: it must be one "
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

    def matrix(self, round_number: int, found: Matrix) -> None:
        """Record an accuracy matrix, and what is read from it."""
        clients, metrics = found.clients.cpu().numpy(), self.folder.metrics
        self.folder.accuracy_matrices.append(round_number, found.values.cpu().numpy(), clients)
        readings = summarise_matrix(found.values, self._config.seed, self._config.s_acc, found.global_values)
        of_clients = {"l_acc": readings.local, "g_acc": readings.everyone}
        of_clients |= {f"s_acc {fraction}": spread for fraction, spread in readings.synthetic.items()}
        for name, spread in of_clients.items():
            metrics.append(round_number, "personal", "cross", name, spread.values.cpu().numpy(), clients)
        if readings.global_model is not None:
            values = readings.global_model.values.cpu().numpy()
            metrics.append(round_number, "global", "cross", found.metric, values, clients)
        metrics.append(round_number, "federation", "cross", "samples", [found.samples], [EVERYONE])

    def headline(self, scores: list[Score]) -> float | None:
        """Give the mean of the primary metric over honest clients: of personal models, or else of the global one."""
        for model in ("personal", "global"):
            for score in scores:
                if (score.model, score.split, score.metric) == (model, "test", self._primary):
                    score = on_host(score)
                    return float(score.values[torch.from_numpy(np.isin(score.clients.numpy(), self._honest))].nanmean())
        return None
