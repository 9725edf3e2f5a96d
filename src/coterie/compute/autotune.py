"""How convolutions are the fastest for this model with these batches on this device: found out by measuring."""

from __future__ import annotations

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
from coterie.compute.nets.row_nets import ModuleNet, StackedNet, agrees
from coterie.compute.samples import Samples
from coterie.errors import ModelError
from coterie.models.problem import Problem
from coterie.rows import matrix_units

WAYS: dict[str, tuple[Convolution, ...]] = {
    "cpu": ("single", "grouped", "unfold"),
    "cuda": ("fused", "unfold", "grouped", "single"),
}
"""What can be chosen on a kind of device; the first is what is taken without measuring."""

ROWS: dict[str, tuple[int, ...]] = {"cpu": (1, 10), "cuda": (64,)}
"""Clients that are computed at once; on a GPU as many as fit, so that one number of them stands for all."""

_REPEATS = 5
_HOPELESS = 3.0  # times the fastest so far: not worth another look

Clock = Callable[[Callable[[], Any], torch.device], float]
Times = dict[tuple[Convolution, int], float]


def seconds_of(function: Callable[[], Any], device: torch.device) -> float:
    """Say how long a function takes, its work on the device included."""
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
    clock: Clock = seconds_of,
    chunk: int | None = None,
) -> Times:
    """Time a client's step with every way of computing convolutions that gives the right numbers."""
    module, layout, device = problem.module, problem.layout, samples.y.device
    if not any(isinstance(part, nn.Conv2d) for part in module.modules()):
        return {}
    reference, found = ModuleNet(module, layout), Times()
    for way, rows in itertools.product(WAYS[device.type], ROWS[device.type] if chunk is None else (chunk,)):
        rows = min(rows, samples.clients)
        taken = _batch(problem, samples, rows, min(batch, 256) or 64)
        try:
            net = StackedNet(module, layout, way)
        except ModelError:
            return {}
        if (way, rows) in found or not agrees(net, reference, taken.x[:2, :3], 1e-4):
            continue
        rate = problem.start.new_zeros(rows, 1)  # where a step leads has no say in how long it takes
        step = partial(replace(taken, net=net).descend_, problem.start.expand(rows, -1).clone(), rate)
        try:
            with matrix_units.rounded(precision):
                play = recorded(step, record and device.type == "cuda")
                found[way, rows] = _least(play, device, clock, rows, [*found.values()])
        except RuntimeError:  # too little memory, or nothing that this device can do
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
    clock(play, device)  # the first one builds what it needs
    times = [clock(play, device) / rows]
    while len(times) < _REPEATS and min(times) < _HOPELESS * min(others, default=times[0]):
        times.append(clock(play, device) / rows)
    return min(times)
