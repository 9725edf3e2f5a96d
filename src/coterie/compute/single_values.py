"""Batches too small for BatchNorm: of one value there is no variance."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from coterie.algorithms.base import FullPass, Minibatches, Task
from coterie.compute.engine import Engine
from coterie.errors import ConfigError
from coterie.models.batch_norm import norms_of


def refuse_single_values(engine: Engine, tasks: Iterable[Task]) -> None:
    """Refuse training in which a BatchNorm layer would be given a single value for each channel."""
    layer = _single_valued(engine)
    if layer is None:
        return
    sizes = engine.host_sizes["train"].tolist()
    for over in (fold.over for task in tasks for fold in task.folds()):
        for client, size in enumerate(sizes):
            if not _meets_one(over, size):
                continue
            what = f"client {client} has {size} training sample{'s' * (size > 1)}"
            if size > 1:
                what += f", so that one of its batches of {over.size} holds a single one"
            remedy = f"with batch_size={_near(over, sizes)} no client has such a batch"
            if isinstance(over, FullPass) or size == 1:
                remedy = "deal samples out in another way, or freeze the layer's statistics (buffers)"
            raise ConfigError(f"{what}, and {layer} cannot normalise one value by itself: {remedy}")


def _near(over: Minibatches | FullPass, sizes: list[int]) -> int:
    """Give the batch size next to a fold's with which no client meets a batch of one sample; 0 is all samples."""
    others = sorted(range(2, max(sizes)), key=lambda size: abs(size - over.size))
    return next((size for size in others if not any(_meets_one(replace(over, size=size), each) for each in sizes)), 0)


def _meets_one(over: Minibatches | FullPass, size: int) -> bool:
    """Say whether a client with so many samples takes a batch of one of them."""
    if not size or (isinstance(over, FullPass) and over.split != "train"):
        return False
    most = over.size or size
    if isinstance(over, Minibatches) and over.steps is not None and over.steps < -(-size // most):
        return most == 1  # it does not come to its last batch
    return most == 1 or size % most == 1 or size == 1


def _single_valued(engine: Engine) -> str | None:
    """Name a BatchNorm layer that sees one value of each channel of a sample, if there is one."""
    found: list[str] = []
    hooks = []
    for prefix, layer in norms_of(engine.problem.module):

        def look(module: nn.Module, given: object, out: Tensor, name: str = prefix.removesuffix(".")) -> None:
            if out.numel() == out.shape[1]:
                found.append(f"layer {name!r} (BatchNorm)")

        hooks.append(layer.register_forward_hook(look))
    try:
        if hooks:
            index = torch.zeros(1, 1, dtype=torch.int64, device=engine.device)
            with torch.no_grad():
                engine.problem.module(engine.samples.gather(index, index[0])[0][0])
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None
