"""The summary of a run that is not finished."""

from __future__ import annotations

from typing import Any

from coterie import options
from coterie.config import ExperimentConfig
from coterie.errors import RunFolderError
from coterie.evaluation import metrics as metric_table
from coterie.results.labels import recorded_name
from coterie.results.result import Result
from coterie.runs.population import roles
from coterie.runs.storage import read_config
from coterie.runs.summary import summarise


def partial_summary(result: Result) -> dict[str, Any]:
    """Sum up what a run has recorded so far, as of a finished one; ``rounds`` is the last round on the disk."""
    # Its fields alone: a method, model or loader that the folder names is code, and looking at a run executes none.
    config, metrics = options.make(ExperimentConfig, read_config(result.path), "experiment"), result.metrics
    measured = metrics.loc[(metrics["split"] == "test") & (metrics["metric"] != "loss"), "metric"]
    if measured.empty:
        raise RunFolderError(f"the run in {result.path} has recorded nothing yet: `coterie resume {result.path}`")
    metric = config.metrics[0] if config.metrics else str(measured.iloc[0])
    return summarise(
        metrics,
        algorithm=recorded_name(result),
        seed=config.seed,
        metric=metric,
        higher_is_better=metric_table.get(metric).higher_is_better,
        privacy=config.privacy,
        rounds=int(metrics["round"].max()),
        seconds=float(result.timings.drop(columns="round").to_numpy().sum()),
        clients=roles(config).honest,
    )
