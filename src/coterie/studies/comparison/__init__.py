"""Comparisons of methods over seeds and settings: planned, run, resumed and put in one table."""

from __future__ import annotations

from coterie.studies.comparison.plan import ComparisonPlan, PlannedRun, make_plan
from coterie.studies.comparison.runner import compare, load_results
from coterie.studies.comparison.standings import MethodScore, Standing, Standings, Tuned, chosen_runs
from coterie.studies.comparison.tables import csv_text, table

__all__ = [
    "ComparisonPlan",
    "MethodScore",
    "PlannedRun",
    "Standing",
    "Standings",
    "Tuned",
    "chosen_runs",
    "compare",
    "csv_text",
    "load_results",
    "make_plan",
    "table",
]
