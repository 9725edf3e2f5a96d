"""Figures: pure functions from tables to charts, and from a chart to a Plotly or a matplotlib figure."""

from __future__ import annotations

from coterie.results.figures.between_clients import (
    BLOCKS,
    ClientOrder,
    blocks,
    class_counts,
    events,
    heat_map,
    order_by_group,
    robust_range,
    samples_by_client,
)
from coterie.results.figures.calibration import reliability
from coterie.results.figures.charts import Axis, Box, Boxes, Chart, HeatMap, Panel, Panels, Series
from coterie.results.figures.gains import gains_by_client, sorted_gains
from coterie.results.figures.line_styles import DASHES, SYMBOLS, Line, Style, literal, styles, theme
from coterie.results.figures.matplotlib_figures import matplotlib_figure, save
from coterie.results.figures.over_clients import distribution, evenness, fairness, final, shown_models, sorted_clients
from coterie.results.figures.over_rounds import (
    SHOWN,
    curves,
    per_run,
    robustness,
    s_acc_by_fraction,
    s_acc_chart,
    seconds,
    traffic,
)
from coterie.results.figures.plotly_figures import plotly_figure

__all__ = [
    "BLOCKS",
    "DASHES",
    "SHOWN",
    "SYMBOLS",
    "Axis",
    "Box",
    "Boxes",
    "Chart",
    "ClientOrder",
    "HeatMap",
    "Line",
    "Panel",
    "Panels",
    "Series",
    "Style",
    "blocks",
    "class_counts",
    "curves",
    "distribution",
    "evenness",
    "events",
    "fairness",
    "final",
    "gains_by_client",
    "heat_map",
    "literal",
    "matplotlib_figure",
    "order_by_group",
    "per_run",
    "plotly_figure",
    "reliability",
    "robust_range",
    "robustness",
    "s_acc_by_fraction",
    "s_acc_chart",
    "samples_by_client",
    "save",
    "seconds",
    "shown_models",
    "sorted_clients",
    "sorted_gains",
    "styles",
    "theme",
    "traffic",
]
