"""Several methods, seeds and settings as one: planned, run, resumed and put in one table."""

from __future__ import annotations

from coterie.comparison.plan import Plan, PlannedRun, make_plan
from coterie.comparison.running import compare
from coterie.comparison.standings import Standings, Tuned
from coterie.comparison.writing import csv_text, latex, markdown, terminal

__all__ = [
    "Plan",
    "PlannedRun",
    "Standings",
    "Tuned",
    "compare",
    "csv_text",
    "latex",
    "make_plan",
    "markdown",
    "terminal",
]
