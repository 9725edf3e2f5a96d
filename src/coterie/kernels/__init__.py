"""Kernels of our own for a GPU, written in Triton, and whether they can run.

Each has a plain form elsewhere that gives the same numbers. A kernel is here only if it was measured to be faster
(``benchmarks/NOTES.md``).
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

INTERPRETED = False
"""Whether tensors on a CPU go through the kernels too, which Triton then interprets. Tests set it."""

_coarse = False

_rehearsed: dict[Hashable, Future[Any]] | None = None

# Kernels are parsed before they are compiled, and older Pythons may fail where two threads parse at a time (gh-106905).
_COMPILERS = 8 if sys.version_info >= (3, 12, 2) or (3, 11, 8) <= sys.version_info < (3, 12) else 1

_OPTIONS = {"enable_fp_fusion": True}  # products that are added to are rounded once; Triton 3.10 would not by itself


@functools.cache
def _installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def usable(*tensors: torch.Tensor) -> bool:
    """Return whether Triton is installed and all tensors are float32 on a GPU that it compiles for."""
    return all(value.dtype == torch.float32 for value in tensors) and compiled_for(*tensors)


def compiled_for(*tensors: torch.Tensor) -> bool:
    """Return whether Triton is installed and all tensors are on a GPU that it compiles for."""
    # Inside torch.compile plain operations are better: the compiler fuses those, but cannot look into a kernel.
    if not (INTERPRETED or all(value.is_cuda for value in tensors)):
        return False
    if not _installed() or torch.compiler.is_compiling():
        return False
    return INTERPRETED or torch.cuda.get_device_capability(tensors[0].device) >= (8, 0)


def is_coarse() -> bool:
    """Say whether the kernels round what they multiply to bfloat16."""
    return _coarse


def set_coarse(on: bool) -> None:
    """Let the kernels round what they multiply to bfloat16, or not; the caller keeps track of what it was."""
    global _coarse
    _coarse = on


def precision() -> str:
    """Return how products are rounded: ``"bf16"``, ``"tf32"``, or ``"tf32x3"``, as :func:`coarse` and PyTorch allow."""
    # Three TF32 products for one are as exact as float32 and faster than the float32 units: 0.31 against 0.37 ms for a
    # convolution, with an error of 1.4e-7 against 3.0e-7.
    if _coarse:
        return "bf16"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "tf32x3"


def launch(kernel: Any, grid: tuple[int, ...], *given: Any, **constants: Any) -> None:
    """Start a kernel, or in a :func:`rehearsal` only have it compiled."""
    if _rehearsed is None:
        kernel[grid](*given, **constants, **_OPTIONS)
        return
    key = (kernel, *map(_kind, given), *constants.items())
    if key not in _rehearsed:
        device = next(value.device for value in given if isinstance(value, torch.Tensor))
        _rehearsed[key] = _compilers().submit(_compile, device, kernel, grid, given, constants)


@contextlib.contextmanager
def rehearsal() -> Iterator[None]:
    """Return a context in which kernels are compiled side by side but do not run, so that their results are garbage.

    It ends when all are compiled. Each takes half a second for the first time on a machine, and a step of a model meets
    them one after another.
    """
    global _rehearsed
    before, _rehearsed = _rehearsed, {}
    try:
        yield
        for compiled in _rehearsed.values():
            compiled.result()
    finally:
        _rehearsed = before


@functools.cache
def _compilers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_COMPILERS, "coterie-compiles")


def _compile(device: torch.device, kernel: Any, grid: tuple[int, ...], given: Any, constants: dict[str, Any]) -> None:
    with torch.cuda.device(device):
        kernel.warmup(*given, grid=grid, **constants, **_OPTIONS)


def _kind(value: Any) -> Hashable:
    """Return what of an argument decides which form of a kernel is compiled."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    return type(value), value == 1, value % 16 == 0, value >= 2**31
