"""Products of each row's own matrices, on a CPU by the library whose code suits the processor.

PyTorch multiplies with Intel's MKL, which uses 256-bit units on AMD's processors. From Zen 5 on these have 512-bit
units that are idle then: a core of an EPYC 9005 did 110 billion operations a second, and 200 with oneDNN, which
PyTorch brings too. The units of Zen 4 are 256 bits wide: there both did 90 to 100 billion, and a call for each row is
lost. Which of the two multiplies follows from the processor, the sizes and the number of threads, never from a clock,
so that the same run is computed in the same way every time.
"""

from __future__ import annotations

import functools
import platform
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from coterie.compute import cpu_threads

_ZEN_5 = 26  # the family of AMD's first processors with 512-bit units
_ALONE = 2**21  # multiplications of a row that pay for a call of its own; below, wider units save less than it costs


@functools.cache
def has_idle_units() -> bool:
    """Return whether MKL leaves half of this processor's units idle, and oneDNN can be called instead."""
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    described = Path("/proc/cpuinfo")
    text = described.read_text(encoding="utf-8") if described.exists() else platform.processor()
    family = re.search(r"family\s*:?\s*(\d+)", text, re.IGNORECASE)
    return "AuthenticAMD" in text and family is not None and int(family[1]) >= _ZEN_5


def goes_by_rows(x: Tensor, weight: Tensor) -> bool:
    """Return whether :func:`linear` of ``[rows, samples, in]`` and ``[rows, out, in]`` beats a batched product."""
    if x.is_cuda or x.dtype != torch.float32 or torch.compiler.is_compiling() or not has_idle_units():
        return False
    # A batched product wakes the other threads once for all rows, a call for each row once a row.
    threads = cpu_threads.available()
    least = _ALONE if threads == 1 else threads * cpu_threads.worth_waking()
    return x.shape[1] * weight.shape[1] * weight.shape[2] >= least


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply each row's ``[samples, in]`` by the transpose of its ``[out, in]``, and add its ``[out]``.

    Can be differentiated as often as wanted.
    """
    function: Any = _RowLinear.apply
    out: Tensor = function(x, weight, bias)
    return out


class _RowLinear(torch.autograd.Function):
    """A product of oneDNN's for each row."""

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply row by row."""
        multiply = torch.ops.mkldnn._linear_pointwise
        if len(x) == 1:  # nothing need be put together
            alone: Tensor = multiply(x[0], weight[0], None if bias is None else bias[0], "none", [], "")
            return alone.unsqueeze(0)
        out = x.new_empty(len(x), x.shape[1], weight.shape[1])
        biases = [None] * len(x) if bias is None else bias.unbind(0)
        for to, *factors in zip(out.unbind(0), x.unbind(0), weight.unbind(0), biases, strict=True):
            to.copy_(multiply(*factors, "none", [], ""))
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save what the backward pass needs."""
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of both factors and of what was added."""
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        return (
            linear(gradient, weight.transpose(1, 2)) if of_x else None,
            linear(gradient.transpose(1, 2), x.transpose(1, 2)) if of_weight else None,
            gradient.sum(1) if of_bias else None,
        )
