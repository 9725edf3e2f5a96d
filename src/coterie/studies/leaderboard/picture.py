"""The leaderboard as a picture: how far each method is behind the best of each setting."""

from __future__ import annotations

import numpy as np

from coterie.results.figures import Axis, HeatMap
from coterie.studies.leaderboard.page import mean_ranks
from coterie.studies.leaderboard.record import Leaderboard

FARTHEST = 10.0
"""Points behind the best from which on the colour stays the same."""


def behind_the_best(found: Leaderboard) -> HeatMap:
    """Chart how many points each method is behind the best of each setting, methods by their mean ranks."""
    order = list(mean_ranks(found))
    values = np.full((len(order), len(found.settings)), np.nan, dtype=np.float32)
    for column, setting in enumerate(found.settings):
        board = found.boards[setting.name]
        for placing in board.placings:
            behind = 100 * (board.placings[0].mean.mean - placing.mean.mean)
            values[order.index(placing.entry.method), column] = behind
    places = [setting.place for setting in found.settings]
    borders = tuple(k - 0.5 for k in range(1, len(places)) if places[k] != places[k - 1])
    rows = tuple((float(k), found.methods[method]) for k, method in enumerate(order))
    columns = tuple((float(k), setting.partition) for k, setting in enumerate(found.settings))
    return HeatMap(
        ((0, values),),
        Axis("", rows, labels=tuple(found.methods[method] for method in order)),
        Axis("", columns, borders, labels=tuple(f"{place}" for place in places)),
        "points behind the best",
        (0.0, FARTHEST),
        square=False,
    )
