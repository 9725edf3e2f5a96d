"""The summary of a run that is not finished."""

from __future__ import annotations

from typing import Any

from coterie.errors import RunFolderError
from coterie.results.result import Result
from coterie.runs.own_code import stored_config
from coterie.runs.population import roles
from coterie.runs.summary import summary_of


def partial_summary(result: Result) -> dict[str, Any]:
    """Sum up what a run has recorded so far, as of a finished one; ``rounds`` is the last round on the disk."""
    config, metrics = stored_config(result.path), result.metrics
    measured = metrics.loc[(metrics["split"] == "test") & (metrics["metric"] != "loss"), "metric"]
    if measured.empty:
        raise RunFolderError(f"the run in {result.path} has recorded nothing yet: `coterie resume {result.path}`")
    metric = config.metrics[0] if config.metrics else str(measured.iloc[0])
    return summary_of(
        config,
        metrics,
        metric=metric,
        rounds=int(metrics["round"].max()),
        seconds=float(result.timings.drop(columns="round").to_numpy().sum()),
        clients=roles(config).honest,
    )
