"""How far a model's confidence can be relied on: accuracy against confidence."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
import torch

from coterie.evaluation.metrics import BINS, bin_of
from coterie.results.figures.charts import Axis, Panel, Panels, Series
from coterie.results.figures.line_styles import PALETTE, Style
from coterie.results.figures.over_rounds import SHOWN


def reliability(answers: pd.DataFrame, styles: Mapping[str, Style]) -> Panels | None:
    """Draw the accuracy of answers against their confidence, in the bins of the expected calibration error.

    Parameters
    ----------
    answers
        Columns ``line``, ``model`` and ``answer``: the probability of the class that was predicted, negative if that
        was wrong. Samples of all clients and seeds are put together.
    styles
        How each line is drawn, in the order of the legend.

    Returns
    -------
    Panels or None
        A panel for each model, with the diagonal on which confidence is right; ``None`` without answers.
    """
    known = answers.dropna(subset="answer")
    panels = []
    for model in SHOWN:
        of_model = known[known["model"] == model]
        if of_model.empty:
            continue
        ends = np.array([0.0, 1.0])
        series = [Series("as sure as right", Style(PALETTE[6], dash="dot"), ends, ends, faint=True)]
        for name, style in styles.items():
            own = of_model.loc[of_model["line"] == name, "answer"].to_numpy(dtype=np.float64)
            if len(own):
                series.append(_in_bins(name, style, own))
        below, left = Axis("confidence", range=(0.0, 1.02)), Axis("accuracy", range=(0.0, 1.02))
        panels.append(Panel(tuple(series), below, left, f"{model} model"))
    return Panels(tuple(panels)) if panels else None


def _in_bins(name: str, style: Style, answers: np.ndarray) -> Series:
    confidence, right = np.abs(answers), answers > 0
    place = bin_of(torch.from_numpy(confidence)).numpy()
    counts = np.bincount(place, minlength=BINS)
    there = counts > 0
    means = [np.bincount(place, values, minlength=BINS)[there] / counts[there] for values in (confidence, right)]
    return Series(name, style, means[0], means[1], detail={"samples": counts[there]})
