"""Metrics, and what is computed from them: pure functions on tensors."""

from __future__ import annotations

from coterie.evaluation.accuracy_matrix import (
    MatrixSummary,
    Spread,
    g_acc,
    l_acc,
    s_acc,
    summarise_matrix,
)
from coterie.evaluation.collaboration import block_contrast, recover_groups, recovery
from coterie.evaluation.fairness import Fairness, fairness
from coterie.evaluation.metrics import METRICS, Metric, per_client, segment_mean
from coterie.evaluation.paired import (
    MaximumTest,
    better_than_reference,
    combined_pvalue,
    mean_interval,
    paired_interval,
    share_of_firsts,
    stratified_mean,
)
from coterie.evaluation.selection import HybridChoice, best_round, hybrid_oracle, hybrid_validation
from coterie.evaluation.significance import (
    OverSeeds,
    PairedTest,
    benjamini_hochberg,
    mcnemar,
    most_discordant,
    over_seeds,
    student_reach,
    wilcoxon,
)

__all__ = [
    "METRICS",
    "Fairness",
    "HybridChoice",
    "MatrixSummary",
    "MaximumTest",
    "Metric",
    "OverSeeds",
    "PairedTest",
    "Spread",
    "benjamini_hochberg",
    "best_round",
    "better_than_reference",
    "block_contrast",
    "combined_pvalue",
    "fairness",
    "g_acc",
    "hybrid_oracle",
    "hybrid_validation",
    "l_acc",
    "mcnemar",
    "mean_interval",
    "most_discordant",
    "over_seeds",
    "paired_interval",
    "per_client",
    "recover_groups",
    "recovery",
    "s_acc",
    "segment_mean",
    "share_of_firsts",
    "stratified_mean",
    "student_reach",
    "summarise_matrix",
    "wilcoxon",
]
