"""Names of packages whose modules are imported when they are first used."""

from __future__ import annotations

import subprocess
import sys

import pytest

PACKAGES = ["coterie", "coterie.algorithms", "coterie.data", "coterie.data.partitions", "coterie.models"]


@pytest.mark.parametrize("package", [*PACKAGES, "coterie.studies.recipes"])
def test_names_are_completed_before_they_are_imported(package: str) -> None:
    """What a notebook offers at Tab, in a process of its own: here everything has been imported already."""
    program = f"import sys, {package} as it; print(sorted(set(it.__all__) - set(dir(it))), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[] False\n"
