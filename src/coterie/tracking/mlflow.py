"""MLflow: a run in an experiment, at a tracking server or in a database file."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from coterie.errors import ConfigError
from coterie.tracking._reported_rounds import ReportedRounds
from coterie.tracking.base import Measured, TrackedRun, results

_METRICS, _PARAMETERS = 1000, 100  # what one request may hold
_LONGEST = 500  # letters of a parameter that every server takes


class MLflow:
    """Logs to MLflow, in the experiment that ``MLFLOW_EXPERIMENT_NAME`` names, by default ``coterie``.

    Parameters
    ----------
    uri
        The tracking server or store; by default MLflow's own choice, which ``MLFLOW_TRACKING_URI`` changes.

    Raises
    ------
    ConfigError
        If there can be no such store.
    """

    def __init__(self, uri: str | None = None) -> None:
        from mlflow import MlflowClient

        try:
            self._client = MlflowClient(tracking_uri=uri)
        except Exception as error:
            reason = " ".join(str(error).split())
            raise ConfigError(f"track is mlflow{f':{uri}' if uri else ''}, which cannot be used ({reason})") from error
        self._id: str | None = None
        self._reported: ReportedRounds | None = None

    def begin(self, run: TrackedRun) -> None:
        """Begin a run with the configuration as its parameters, or go on with it."""
        from mlflow.entities import Param

        self._reported = ReportedRounds(run.path, "mlflow")
        if self._reported.run is not None:
            self._id = self._reported.run
            self._client.update_run(self._id, status="RUNNING")
            return
        experiment = self._experiment(os.environ.get("MLFLOW_EXPERIMENT_NAME", "coterie"))
        made = self._client.create_run(experiment, run_name=run.name, tags={"coterie.run": str(run.path)})
        self._id = made.info.run_id
        self._reported.begin(self._id)
        parameters = [Param(name, str(value)[:_LONGEST]) for name, value in run.settings().items()]
        for first in range(0, len(parameters), _PARAMETERS):
            self._client.log_batch(self._id, params=parameters[first : first + _PARAMETERS])

    def round(self, number: int, measured: Measured) -> None:
        """Log the scalars."""
        if self._reported is not None and self._reported.is_new(number):
            self._log(measured.scalars, number)
            self._reported.store(number)

    def end(self, summary: Mapping[str, Any] | None) -> None:
        """Log the result, and the summary as a file."""
        if self._id is None:
            return
        if summary is None:
            self._client.set_terminated(self._id, "KILLED")
            return
        self._log(results(summary), int(summary["rounds"]))
        self._client.log_dict(self._id, dict(summary), "summary.json")
        self._client.set_terminated(self._id, "FINISHED")

    def _experiment(self, name: str) -> str:
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except Exception:
                found = self._client.get_experiment_by_name(name)  # another process may have made it meanwhile
                if found is None:
                    raise
        return str(found.experiment_id)

    def _log(self, scalars: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        metrics = [Metric(name, value, now, step) for name, value in scalars.items()]
        for first in range(0, len(metrics), _METRICS):
            self._client.log_batch(self._id, metrics=metrics[first : first + _METRICS])
