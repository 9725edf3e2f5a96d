"""Finished runs as people look at them: result objects and tables."""

from __future__ import annotations

from coterie.results.comparison import At, Collaboration, client_scores, collaboration, over_seeds, wilcoxon
from coterie.results.result import Result
from coterie.results.runs import Runs
from coterie.results.summary import MODELS, summarise
from coterie.results.tables import matrix_table, table

__all__ = [
    "MODELS",
    "At",
    "Collaboration",
    "Result",
    "Runs",
    "client_scores",
    "collaboration",
    "matrix_table",
    "over_seeds",
    "summarise",
    "table",
    "wilcoxon",
]
