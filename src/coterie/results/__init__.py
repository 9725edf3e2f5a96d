"""Finished runs as people look at them: result objects and tables."""

from __future__ import annotations

from coterie.results.client_gains import ClientGains, gains
from coterie.results.result import Result
from coterie.results.run_set import RunSet
from coterie.results.statistics import At, Collaboration, client_scores, collaboration, over_seeds, wilcoxon
from coterie.results.summary_tables import matrix_table, table
from coterie.runs.summary import MODELS, summarise

__all__ = [
    "MODELS",
    "At",
    "ClientGains",
    "Collaboration",
    "Result",
    "RunSet",
    "client_scores",
    "collaboration",
    "gains",
    "matrix_table",
    "over_seeds",
    "summarise",
    "table",
    "wilcoxon",
]
