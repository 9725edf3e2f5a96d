"""What a run leaves on the disk: its folder, what it recorded and its checkpoints."""

from __future__ import annotations

from coterie.runs.storage.checkpoints import Checkpoint, Checkpoints, as_restored
from coterie.runs.storage.code_folder import read_code
from coterie.runs.storage.lock import lock_folder
from coterie.runs.storage.matrix_log import MatrixLog
from coterie.runs.storage.metrics_log import EVERYONE, Block, MetricsLog
from coterie.runs.storage.run_files import (
    accuracy_matrix_log,
    collaboration_weights_log,
    read_config,
    read_shares,
    read_summary,
)
from coterie.runs.storage.run_folder import RunFolder
from coterie.runs.storage.timings_log import TimingsLog

__all__ = [
    "EVERYONE",
    "Block",
    "Checkpoint",
    "Checkpoints",
    "MatrixLog",
    "MetricsLog",
    "RunFolder",
    "TimingsLog",
    "accuracy_matrix_log",
    "as_restored",
    "collaboration_weights_log",
    "lock_folder",
    "read_code",
    "read_config",
    "read_shares",
    "read_summary",
]
