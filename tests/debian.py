"""Programs of Debian's that some tests need: installed where we may, else the test is skipped and says how."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

_PLACES = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin"))


def find_programs(packages: Mapping[str, str], why: str) -> list[str]:
    """Find programs, each with its package; once for all processes that test side by side.

    ``why`` says what they are for, as in "these tests open the page in Chromium".
    """
    with (Path(tempfile.gettempdir()) / "coterie-tests-debian.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = sorted({package for program, package in packages.items() if _find(program) is None})
        if missing and os.geteuid() == 0 and shutil.which("apt-get"):
            quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            for command in (["update"], ["install", "--yes", "--no-install-recommends", *missing]):
                done = subprocess.run(
                    ["apt-get", "--quiet", *command], env=quiet, capture_output=True, check=False, timeout=600
                )
                if done.returncode:
                    break
    found = [_find(program) for program in packages]
    if None in found:
        pytest.skip(f"{why}: install it (on Debian: apt-get install {' '.join(sorted(set(packages.values())))})")
    return [each for each in found if each is not None]


def _find(program: str) -> str | None:
    return shutil.which(program, path=_PLACES)
