"""What an experiment writes down of a round."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from coterie.algorithms.base import Info, Weights
from coterie.config import ExperimentConfig
from coterie.errors import AlgorithmError
from coterie.evaluation import summarise_matrix
from coterie.runs.builder import Assembly
from coterie.runs.storage import EVERYONE, RunFolder
from coterie.simulation.accuracy_matrix import Matrix
from coterie.simulation.scoring import Score


class Recording:
    """Writes what was measured into a run's folder.

    Parameters
    ----------
    config
        The configuration.
    folder
        The run's folder, open for writing.
    parts
        What is computed with.
    """

    def __init__(self, config: ExperimentConfig, folder: RunFolder, parts: Assembly) -> None:
        self.config, self.folder, self.parts = config, folder, parts
        self.simulation, self.scorer, self.engine = parts.simulation, parts.scorer, parts.engine
        self._honest = torch.tensor(parts.population.roles.honest, device=self.engine.device)

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

    def _record_matrix(self, round_number: int, found: Matrix) -> None:
        clients, metrics = found.clients.cpu().numpy(), self.folder.metrics
        self.folder.matrix.append(round_number, found.values.cpu().numpy(), clients)
        readings = summarise_matrix(found.values, self.config.seed, self.config.s_acc, found.global_values)
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
