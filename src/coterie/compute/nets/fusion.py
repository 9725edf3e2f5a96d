"""What of a model's graph is computed together.

A cut at zero (ReLU) and a maximum over windows may change places: the largest of the values cut at zero is the largest
value, cut at zero. Done in that order, the cut sees one value of each window instead of all. A cut that follows a
convolution without a pooling after it is done as the convolution's result is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from coterie import kernels

Step = Literal["skip", "pool", "pool, cut", "convolve, cut"]


def plan(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> dict[fx.Node, Step]:
    """Say which nodes of a graph are computed otherwise than they stand."""
    steps: dict[fx.Node, Step] = {}
    for node in graph.nodes:
        if _module(node, modules, nn.MaxPool2d) and not modules[str(node.target)].return_indices:
            steps[node] = "pool"
    for node in graph.nodes:
        if not _is_relu(node, modules) or not isinstance(node.args[0], fx.Node):
            continue
        before, users = node.args[0], list(node.users)
        if len(users) == 1 and steps.get(users[0]) == "pool":
            steps[node], steps[users[0]] = "skip", "pool, cut"
        elif _module(before, modules, nn.Conv2d) and len(before.users) == 1:
            steps[node], steps[before] = "skip", "convolve, cut"
    return steps


def _module(node: fx.Node, modules: Mapping[str, nn.Module], kind: type[nn.Module]) -> bool:
    return node.op == "call_module" and type(modules[str(node.target)]) is kind


def _is_relu(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    if node.op == "call_function":
        return node.target in (F.relu, torch.relu, F.relu_, torch.relu_)
    if node.op == "call_method":
        return node.target in ("relu", "relu_")
    return _module(node, modules, nn.ReLU)


def pooled(layer: nn.MaxPool2d, x: Tensor, cut: bool) -> Tensor:
    """Take the largest value of each window."""
    window, stride = _pair(layer.kernel_size), _pair(layer.stride)
    side_by_side = window == stride and _pair(layer.padding) == (0, 0) and _pair(layer.dilation) == (1, 1)
    if side_by_side and not layer.ceil_mode and window[0] * window[1] < 100 and x.dim() == 4 and kernels.usable(x):
        from coterie.kernels.pooling import pool

        return pool(x, window, cut)
    largest: Tensor = layer(x)
    return largest.relu() if cut else largest


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    first, second = (value, value) if isinstance(value, int) else value
    return first, second
