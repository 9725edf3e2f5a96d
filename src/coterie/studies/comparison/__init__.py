"""Several methods, seeds and settings as one: planned, run, resumed and put in one table."""

from __future__ import annotations

from coterie.studies.comparison.plan import Plan, PlannedRun, make_plan
from coterie.studies.comparison.runner import compare, load_results
from coterie.studies.comparison.standings import Standings, Tuned, chosen_runs
from coterie.studies.comparison.writers import csv_text, latex, markdown, terminal

__all__ = [
    "Plan",
    "PlannedRun",
    "Standings",
    "Tuned",
    "chosen_runs",
    "compare",
    "csv_text",
    "latex",
    "load_results",
    "make_plan",
    "markdown",
    "terminal",
]
