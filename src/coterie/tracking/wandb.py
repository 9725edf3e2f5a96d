"""Weights & Biases: a run in a project, or with ``WANDB_MODE=offline`` a folder to be uploaded later."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from coterie.tracking._reported_rounds import ReportedRounds
from coterie.tracking.base import Measured, TrackedRun, results
from coterie.tracking.tensorboard import picture


class WandB:
    """Logs to Weights & Biases; its files lie in the run's folder.

    Parameters
    ----------
    project
        The project; by default what ``WANDB_PROJECT`` says, else ``coterie``.
    """

    def __init__(self, project: str | None = None) -> None:
        import wandb

        self._wandb = wandb
        self._project = project or os.environ.get("WANDB_PROJECT", "coterie")
        self._run: Any = None
        self._reported: ReportedRounds | None = None

    def begin(self, run: TrackedRun) -> None:
        """Begin a run with the configuration, or go on with it."""
        self._reported = ReportedRounds(run.path, "wandb")
        self._run = self._wandb.init(
            project=self._project,
            name=run.name,
            id=self._reported.run,
            resume="allow",
            dir=str(run.path),
            config=run.settings(),
            reinit="create_new",  # runs of a comparison are apart, and so is a run of the caller's own
            settings=self._wandb.Settings(console="off", quiet=True),  # what is printed is the run's business
        )
        self._reported.begin(str(self._run.id))

    def round(self, number: int, measured: Measured) -> None:
        """Log scalars, histograms over clients and an image of the weights."""
        if self._reported is None or not self._reported.is_new(number):
            return
        found: dict[str, Any] = dict(measured.scalars)
        found |= {f"{name}/clients": self._wandb.Histogram(each) for name, each in measured.clients.items()}
        if measured.weights is not None and measured.weights.size:
            found["weights"] = self._wandb.Image(picture(measured.weights))
        self._run.log(found, step=number, commit=True)
        self._reported.store(number)

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """Put the result in the run's summary."""
        if self._run is None:
            return
        if summary is not None:
            self._run.summary.update(results(summary))
        self._run.finish(exit_code=0 if summary is not None else 1)
