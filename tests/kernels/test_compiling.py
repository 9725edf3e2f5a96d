"""Every kernel compiles to the code of a GPU that is not there."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import coterie.kernels

pytest.importorskip("triton.backends.nvidia", reason="Triton is not installed: pip install 'coterie[kernels]'")

HOPPER = 90
LEAST_SHARED = 99 * 1024  # bytes that a program may have on the smallest GPUs that Coterie computes on (8.6, 8.9, 12.0)


def launched() -> set[str]:
    """Name the kernels that are started anywhere in the package."""
    found: set[str] = set()
    for path in Path(coterie.kernels.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("launch", "_run"):
                found |= {node.args[0].id} if isinstance(node.args[0], ast.Name) else set()
    return found - {"kernel"}  # what a helper was given


def test_every_kernel_compiles_for_hopper_and_fits(tmp_path: Path) -> None:
    # A process of its own: in this one kernels are interpreted, which is decided where they are defined.
    own = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.compiled", str(HOPPER)],
        cwd=Path(__file__).parents[2],
        env={**own, "TRITON_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    made = json.loads(done.stdout)["kernels"]
    assert {each["kernel"] for each in made} == launched() and len(launched()) > 10
    assert all(each["code"] > 0 and each["shared"] <= LEAST_SHARED for each in made)
