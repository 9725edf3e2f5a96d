"""Charts of one run: its matrices, and the samples of each client."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from coterie.results import figures
from coterie.results.figures import ClientOrder, HeatMap, Panels

if TYPE_CHECKING:
    from coterie.results.result import Result

FRAMES = 40
"""Rounds of a heat map's slider at most."""


def weights_map(result: Result, frames: int = FRAMES) -> HeatMap:
    """Chart a run's collaboration weights at so many evenly spaced rounds, the last among them."""
    rounds = _spaced(result.weight_rounds, frames)
    if not rounds:
        result.weights()  # refuses in its own words
    return figures.heat_map(
        ((number, result.weights(number)) for number in rounds),
        client_order(result, (result.weights(number) for number in rounds)),
        what="weight",
        axes=("taker", "giver"),
        own=False,
    )


def matrix_map(result: Result, frames: int = FRAMES) -> HeatMap:
    """Chart a run's accuracy matrices at so many evenly spaced rounds, the last among them."""
    last, rounds = result.matrix(), _spaced(result.matrix_rounds, frames)
    values = last.to_numpy()
    values = values[np.isfinite(values)]
    (low, high), cut = figures.robust_range(values)
    ends = (np.floor(10 * low) / 10, np.ceil(10 * high) / 10)
    return figures.heat_map(
        ((number, result.matrix(number)) for number in rounds),
        client_order(result, [last]),
        what=(primary_metric(result) or "accuracy") + cut,
        axes=("personal model", "test samples of"),
        range=(float(ends[0]), float(ends[1])),
    )


def shares_map(result: Result) -> Panels | HeatMap:
    """Chart the samples of each client."""
    return figures.samples_by_client(result.shares, figures.order_by_group(result.shares))


def client_order(result: Result, matrices: Iterable[pd.DataFrame]) -> ClientOrder:
    """Order the clients that train; the matrices are read only if the run does not say who its clients are."""
    if result.has_shares:
        return figures.order_by_group(result.shares, result.shares.loc[result.shares["role"] != "newcomer", "client"])
    return figures.order_by_group(
        None, {int(client) for matrix in matrices for axis in matrix.axes for client in axis.to_numpy()}
    )


def honest_clients(result: Result) -> list[int] | None:
    """List the clients that train and do not attack, ``None`` if the run does not say what its clients do."""
    if not result.has_shares:
        return None
    return [int(client) for client in result.shares.loc[result.shares["role"] == "honest", "client"]]


def primary_metric(result: Result) -> str | None:
    """Give the metric that a run is judged by, ``None`` if nothing has been recorded yet."""
    if result.finished:
        return str(result.summary["metric"])
    named = result.config.get("metrics") or ()
    frame = result.metrics
    measured = frame.loc[(frame["split"] == "test") & (frame["metric"] != "loss"), "metric"]
    if measured.empty:
        return None
    return str(named[0] if named else measured.iloc[0])


def _spaced(rounds: Sequence[int], most: int) -> list[int]:
    if len(rounds) <= most:
        return list(rounds)
    places = np.unique(np.linspace(0, len(rounds) - 1, most).round().astype(int))
    return [rounds[place] for place in places]
