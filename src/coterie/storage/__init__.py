"""What a run leaves on the disk: its folder, what it recorded and its checkpoints."""

from __future__ import annotations

from coterie.storage.checkpoints import Checkpoint, Checkpoints, settled
from coterie.storage.lock import lock_folder
from coterie.storage.metrics_log import EVERYONE, Block, MetricsLog
from coterie.storage.reading import matrix_log, read_config, read_shares, read_summary
from coterie.storage.run_folder import RunFolder
from coterie.storage.silent import SilentFolder
from coterie.storage.timings_log import TimingsLog
from coterie.storage.weights_log import WeightsLog

__all__ = [
    "EVERYONE",
    "Block",
    "Checkpoint",
    "Checkpoints",
    "MetricsLog",
    "RunFolder",
    "SilentFolder",
    "TimingsLog",
    "WeightsLog",
    "lock_folder",
    "matrix_log",
    "read_config",
    "read_shares",
    "read_summary",
    "settled",
]
