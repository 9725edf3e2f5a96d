"""The fastest way to compute convolutions for a model, its batches and a device, found by timing all of them."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from coterie import randomness
from coterie.algorithms.base import Batch
from coterie.compute.cuda_graphs import recorded
from coterie.compute.nets.layers import Convolution
from coterie.compute.nets.row_net import ModuleNet, agrees
from coterie.compute.nets.stacked import StackedNet
from coterie.compute.samples import Samples
from coterie.errors import ModelError
from coterie.models.problem import Problem
from coterie.rows import matrix_units

CONVOLUTIONS: dict[str, tuple[Convolution, ...]] = {
    "cpu": ("single", "grouped", "unfold"),
    "cuda": ("fused", "unfold", "grouped", "single"),
}
"""The ways to choose from on each kind of device; the first is the one that is used without timing."""

ROW_COUNTS: dict[str, tuple[int, ...]] = {"cpu": (1, 10), "cuda": (64,)}
"""Numbers of clients at once to time; a GPU takes as many as fit, and one number stands for all."""

_REPEATS = 5
_HOPELESS = 3.0  # a way that takes so many times the fastest one's time is timed once only

Clock = Callable[[Callable[[], Any], torch.device], float]
Times = dict[tuple[Convolution, int], float]


def wall_seconds(function: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds that a function takes, until its work on the device is done."""
    began = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began


def convolution_times(
    problem: Problem,
    samples: Samples,
    batch: int,
    *,
    record: bool = False,
    precision: matrix_units.Precision = "float32",
    clock: Clock = wall_seconds,
    chunk: int | None = None,
    threads: Callable[[int], contextlib.AbstractContextManager[None]] = lambda samples: contextlib.nullcontext(),
) -> Times:
    """Time a client's step with every way of computing convolutions that gives the right numbers.

    Returns the least seconds of a step, by the way and the number of clients that took it at once, divided among them,
    the fastest first. Empty for a model without convolutions, or without a stacked form. Each is timed in the context
    that ``threads`` gives for the samples that it takes at once.
    """
    module, layout, device = problem.module, problem.layout, samples.y.device
    if not any(isinstance(part, nn.Conv2d) for part in module.modules()):
        return {}
    reference, found = ModuleNet(module, layout), Times()
    for way, rows in itertools.product(
        CONVOLUTIONS[device.type], ROW_COUNTS[device.type] if chunk is None else (chunk,)
    ):
        rows = min(rows, samples.clients)
        taken = _batch(problem, samples, rows, min(batch, 256) or 64)
        try:
            net = StackedNet(module, layout, way)
        except ModelError:
            return {}
        if (way, rows) in found or not agrees(net, reference, taken.x[:2, :3], 1e-4):
            continue
        # A step of length 0 takes as long as any other, and the weights stay finite.
        rate = problem.start.new_zeros(rows, 1)
        step = partial(replace(taken, net=net).descend_, problem.start.expand(rows, -1).clone(), rate)
        try:
            with matrix_units.rounded(precision), threads(taken.y.numel() // (rows if way == "single" else 1)):
                play = recorded(step, record and device.type == "cuda")
                found[way, rows] = _least(play, device, clock, rows, [*found.values()])
        except RuntimeError:  # the device has too little memory for this way, or cannot compute it
            continue
    return dict(sorted(found.items(), key=lambda pair: pair[1]))


def _batch(problem: Problem, samples: Samples, rows: int, size: int) -> Batch:
    device = samples.y.device
    clients = torch.arange(rows, device=device)
    index = torch.arange(rows * size, device=device).remainder(len(samples.y)).view(rows, size)
    x, y = samples.gather(index, clients)
    weight, share = torch.full((rows, size), 1 / size, dtype=x.dtype, device=device), x.new_ones(rows)
    net, key = ModuleNet(problem.module, problem.layout), randomness.keys(1, "choosing", 0, clients)
    return Batch(net, problem.loss, x, y, weight, share, key)


def _least(play: Callable[[], Any], device: torch.device, clock: Clock, rows: int, others: list[float]) -> float:
    clock(play, device)  # not counted: the first step compiles kernels and takes workspaces
    times = [clock(play, device) / rows]
    while len(times) < _REPEATS and min(times) < _HOPELESS * min(others, default=times[0]):
        times.append(clock(play, device) / rows)
    return min(times)
