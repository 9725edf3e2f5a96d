"""Figures: pure functions from tables to charts, and from a chart to a Plotly or a matplotlib figure."""

from __future__ import annotations

from coterie.results.figures.between_clients import (
    BLOCKS,
    Order,
    blocks,
    class_counts,
    happenings,
    heat_map,
    holdings,
    in_groups,
)
from coterie.results.figures.charts import Axis, Box, Boxes, Chart, HeatMap, Panel, Panels, Series
from coterie.results.figures.interactive import plotly_figure
from coterie.results.figures.look import DASHES, SYMBOLS, Line, Style, literal, styles, theme
from coterie.results.figures.over_clients import distribution, evenness, fairness, final, in_order, shown_models
from coterie.results.figures.over_rounds import SHOWN, company, curves, per_run, readings, robustness, seconds, traffic
from coterie.results.figures.static import matplotlib_figure, save

__all__ = [
    "BLOCKS",
    "DASHES",
    "SHOWN",
    "SYMBOLS",
    "Axis",
    "Box",
    "Boxes",
    "Chart",
    "HeatMap",
    "Line",
    "Order",
    "Panel",
    "Panels",
    "Series",
    "Style",
    "blocks",
    "class_counts",
    "company",
    "curves",
    "distribution",
    "evenness",
    "fairness",
    "final",
    "happenings",
    "heat_map",
    "holdings",
    "in_groups",
    "in_order",
    "literal",
    "matplotlib_figure",
    "per_run",
    "plotly_figure",
    "readings",
    "robustness",
    "save",
    "seconds",
    "shown_models",
    "styles",
    "theme",
    "traffic",
]
