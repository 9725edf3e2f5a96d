"""Kernels of our own for a GPU, written in Triton, and whether they can run here.

Each has a plain form elsewhere that gives the same numbers; these exist where they were measured to be faster.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Iterator

import torch

INTERPRETED = False
"""Whether tensors on a CPU are given to the kernels, which Triton then interprets: for tests."""

_coarse = False


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable(*tensors: torch.Tensor) -> bool:
    """Say whether these tensors can be given to the kernels."""
    # A compiled step is made of plain operations, which the compiler fuses itself.
    if not _installed() or torch.compiler.is_compiling() or any(value.dtype != torch.float32 for value in tensors):
        return False
    if INTERPRETED:
        return True
    return all(value.is_cuda for value in tensors) and torch.cuda.get_device_capability(tensors[0].device) >= (8, 0)


@contextlib.contextmanager
def coarse(on: bool = True) -> Iterator[None]:
    """Let the kernels round what they multiply to bfloat16."""
    global _coarse
    before, _coarse = _coarse, on
    try:
        yield
    finally:
        _coarse = before


def precision() -> str:
    """Say how products are rounded: as :func:`coarse` and PyTorch's process-wide switch allow."""
    if _coarse:
        return "bf16"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"
