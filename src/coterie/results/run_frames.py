"""Tables of single runs as figures of several need them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from pandas.api.types import union_categoricals

from coterie.results.heat_maps import honest_clients
from coterie.runs.storage import EVERYONE

if TYPE_CHECKING:
    from coterie.results.result import Result


def timed(result: Result) -> pd.DataFrame:
    """Give a run's seconds; a round that was not evaluated took none for it, which is no measurement."""
    frame = result.timings
    if "evaluation" not in frame:
        return frame
    metrics = result.metrics
    evaluated = metrics.loc[metrics["model"] != "federation", "round"].unique()
    return frame.assign(evaluation=frame["evaluation"].where(frame["round"].isin(evaluated)))


def counted(result: Result) -> pd.DataFrame:
    """Give what was measured on the test samples of clients that count, and on the wire."""
    frame = result.metrics
    frame = frame[(frame["split"] == "test") | (frame["model"] == "federation")]
    honest = honest_clients(result)
    if honest is None:
        return frame
    return frame[frame["client"].isin([*honest, EVERYONE]) | (frame["model"] == "newcomer")]


def answered(result: Result) -> pd.DataFrame | None:
    """Give the answers to the test samples of clients that count, ``None`` if they were not recorded."""
    found, honest = result.answers, honest_clients(result)
    return found if found is None or honest is None else found[found["client"].isin(honest)]


def stacked(frames: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Put tables under each other; names stay categories, of which a million rows are small."""
    columns: dict[str, Any] = {}
    for name in frames[0].columns:
        parts = [frame[name] for frame in frames]
        if all(isinstance(part.dtype, pd.CategoricalDtype) for part in parts):
            columns[name] = union_categoricals(parts)
        else:
            columns[name] = np.concatenate([part.to_numpy() for part in parts])
    return pd.DataFrame(columns)
