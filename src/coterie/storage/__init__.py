"""What a run leaves on the disk: its folder, what it recorded and its checkpoints."""

from __future__ import annotations

from coterie.storage.checkpoints import Checkpoint, Checkpoints, settled
from coterie.storage.metrics_log import EVERYONE, MetricsLog
from coterie.storage.reading import matrix_log, read_config, read_shares, read_summary
from coterie.storage.run_folder import RunFolder
from coterie.storage.timings_log import TimingsLog
from coterie.storage.weights_log import WeightsLog

__all__ = [
    "EVERYONE",
    "Checkpoint",
    "Checkpoints",
    "MetricsLog",
    "RunFolder",
    "TimingsLog",
    "WeightsLog",
    "matrix_log",
    "read_config",
    "read_shares",
    "read_summary",
    "settled",
]
