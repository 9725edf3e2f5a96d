"""Compile every kernel for a GPU that is not there, and print what each takes of it.

    python -m tests.kernels.compiled 90

The argument is a compute capability without its point. Models take steps and are applied as an engine would have them,
in a rehearsal: the forms of the kernels that are asked for are then those of a real run, and Triton compiles them down
to the GPU's own code in its usual way, but for the driver, which only has to name the GPU.
"""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from coterie import kernels, models, randomness
from coterie.algorithms.base import Batch
from coterie.compute.nets.stacked import StackedNet
from coterie.kernels.dropout import DropoutRule, drop
from coterie.kernels.half_precision import add_centre, split_centred
from coterie.kernels.pooling import pool
from coterie.kernels.steps import descend_
from coterie.models.problem import Problem

MODELS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "mlp2": ((1, 28, 28), (10, 50)),
    "cnn_mcmahan": ((1, 28, 28), (10,)),
    "cnn_cifar_flame": ((3, 32, 32), (50,)),
    "cnn_mmnist": ((1, 64, 64), (50,)),
}
"""Models with the shape of a sample and the samples of a batch."""

ROWS = 4

_compiled: list[dict[str, Any]] = []


class NamedGPU:
    """A driver that names a GPU, and can do nothing with it."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        """Return what to compile for."""
        return self._target

    def get_current_device(self) -> int:
        """Return the number of the only GPU."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """Return the stream on which nothing will run."""
        return 0


def note(device: torch.device, kernel: Any, grid: Any, given: Any, constants: dict[str, Any]) -> None:
    """Compile a kernel, and take note of it."""
    made = kernel.warmup(*given, grid=grid, **constants, **kernels._OPTIONS)
    _compiled.append({"kernel": kernel.fn.__name__, "shared": made.metadata.shared, "code": len(made.asm["cubin"])})


def play(model: str, shape: tuple[int, ...], samples: int) -> None:
    """Take a step of a model, and apply it to samples."""
    with randomness.torch_stream(1, "compiling"):
        problem = Problem.of(models.build(model, shape, 10))
    x, y = torch.zeros(ROWS, samples, *shape), torch.zeros(ROWS, samples, dtype=torch.int64)
    key = randomness.keys(1, "compiling", 1, torch.arange(ROWS))
    net, params = StackedNet(problem.module, problem.layout), problem.start.repeat(ROWS, 1)
    weight = torch.full((ROWS, samples), 1 / samples)
    Batch(net, problem.loss, x, y, weight, torch.ones(ROWS), key).descend_(params, torch.ones(ROWS, 1))
    with torch.no_grad():
        net.outputs(params, x)


def play_others() -> None:
    """Do what the models' steps do not: draw keys, drop, pool what was not convolved, split rows, step."""
    key = randomness.fold_in(randomness.keys(1, "compiling", 1, torch.arange(ROWS)), 3)
    constants = (randomness.GOLDEN, randomness.MIX_1, randomness.MIX_2)
    drop(torch.zeros(ROWS, 7, 11), key, key, DropoutRule(-(2**14), 1 / 0.75, constants))
    pool(torch.zeros(ROWS, 6, 8, 8).requires_grad_(), (2, 2), relu=True).sum().backward()
    rows, ones = torch.zeros(9, 5000), torch.ones(9)
    for parts in (2, 3):
        split_centred(rows, rows[0], ones, torch.empty(parts, *rows.shape, dtype=torch.float16))
    add_centre(rows, ones, ones, rows[0], torch.empty_like(rows))
    rate, column = torch.ones(9, 1), torch.ones(9, 1, dtype=torch.float64)
    descend_(rows, rows, rate, decay=0.1)
    for number in (0.5, column):
        descend_(rows, rows, rate, pull=number, centre=rows, decay=number, momentum=number, velocity=rows)


def main(capability: int) -> None:
    """Compile for one GPU."""
    warnings.simplefilter("error")
    driver.set_active(NamedGPU(capability))
    kernels.INTERPRETED, kernels._compile = True, note  # type: ignore[assignment]  # tensors on the CPU go this way, too
    with kernels.rehearsal():
        for coarse, tf32 in ((False, False), (False, True), (True, False)):
            kernels.set_coarse(coarse)
            torch.backends.cuda.matmul.allow_tf32 = tf32
            for model, (shape, batches) in MODELS.items():
                for samples in batches:
                    play(model, shape, samples)
        play_others()
    print(json.dumps({"triton": triton.__version__, "kernels": _compiled}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
