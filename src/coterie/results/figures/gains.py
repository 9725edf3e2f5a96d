"""What each client gains by a method over a reference, from the greatest loss to the greatest gain."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from coterie.results.figures.charts import Axis, Detail, Panel, Panels, Series
from coterie.results.figures.line_styles import PALETTE, Style

_NAMED = 60  # up to so many clients stand by name at the axis
_VERDICTS = {
    "harmed": ("harmed beyond chance", Style(PALETTE[1], symbol="triangle-down")),
    "": ("chance explains it", Style(PALETTE[6])),
    "helped": ("helped beyond chance", Style(PALETTE[2], symbol="triangle-up")),
}


def sorted_gains(found: Mapping[str, pd.DataFrame], title: str, styles: Mapping[str, Style]) -> Panels:
    """Draw the gains of all clients by several methods, each from the greatest loss to the greatest gain.

    Parameters
    ----------
    found
        For each line, what :attr:`coterie.results.ClientGains.clients` holds.
    title
        What the gain is, beside the axis.
    styles
        How each line is drawn, by its name.

    Returns
    -------
    Panels
        One panel, with a border where nothing is gained or lost.
    """
    series = []
    for name, clients in found.items():
        place = 100 * (np.arange(len(clients)) + 0.5) / max(1, len(clients))
        series.append(Series(name, styles[name], place, clients["gain"].to_numpy(), detail=_who(clients)))
    below = Axis("% of clients", range=(0.0, 100.0))
    return Panels((Panel(tuple(series), below, Axis(title, borders=(0.0,))),))


def gains_by_client(clients: pd.DataFrame, title: str) -> Panels:
    """Draw the gain of each client by one method, with names, and who gains or loses beyond chance.

    Parameters
    ----------
    clients
        What :attr:`coterie.results.ClientGains.clients` holds.
    title
        What the gain is, below the axis.

    Returns
    -------
    Panels
        A point for each client, the greatest gain on top, and its interval where there is one.
    """
    seeds = clients["seed"].nunique() > 1
    labels = [f"{name}, seed {seed}" if seeds else name for name, seed in zip(*_names(clients), strict=True)]
    series = _intervals(clients)
    for verdict, (words, style) in _VERDICTS.items():
        place = np.flatnonzero((clients["verdict"] == verdict).to_numpy())
        if len(place):
            own = clients.iloc[place]
            series.append(
                Series(words, style, own["gain"].to_numpy(), place.astype(float), detail=_who(own), points=True)
            )
    step = -(-len(clients) // _NAMED)
    ticks = tuple((float(place), labels[place]) for place in range(0, len(clients), step))
    room = max(0.7, 0.012 * len(clients))  # so that no point lies on the frame
    left = Axis("", ticks, range=(-room, len(clients) - 1 + room))
    height = 0.5 + min(2.5, 0.045 * len(clients))
    return Panels((Panel(tuple(series), Axis(title, borders=(0.0,)), left),), height=height)


def _intervals(clients: pd.DataFrame) -> list[Series]:
    if "low" not in clients or not clients["low"].notna().any():
        return []
    place = np.arange(len(clients), dtype=float)
    ends = np.stack([clients["low"].to_numpy(), clients["high"].to_numpy(), np.full(len(clients), np.nan)], axis=1)
    return [Series("95 % interval of each", Style(PALETTE[6]), ends.ravel(), np.repeat(place, 3), faint=True)]


def _names(clients: pd.DataFrame) -> tuple[list[str], list[int]]:
    return [str(name) for name in clients["name"]], [int(seed) for seed in clients["seed"]]


def _who(clients: pd.DataFrame) -> Detail:
    names, seeds = _names(clients)
    who = [f"{name}, seed {seed}" for name, seed in zip(names, seeds, strict=True)]
    scores = zip(clients["score"], clients["reference"], clients["samples"], strict=True)
    why = [f"{score:.4f} against {reference:.4f} on {samples} samples" for score, reference, samples in scores]
    return {"who": who, "why": why}
