"""Killed at any instant, a run that is resumed ends as the run that was never killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("kill_everywhere.py")


def test_killed_at_every_step_on_the_disk(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    # Three checkpoints of four files each, written and synced, are more steps than this by themselves.
    assert int(done.stdout.split()[2]) > 40
