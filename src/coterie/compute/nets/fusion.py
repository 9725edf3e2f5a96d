"""Operations of a model's graph that are computed together.

ReLU and max pooling may change places: the largest of the rectified values is the largest value, rectified. Pooling
first leaves ReLU one value of each window instead of all of them. A ReLU that follows a convolution without a pooling
after it is applied while the convolution's result is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from coterie import kernels
from coterie.models.dropout import StreamDropout

Fusion = Literal["skip", "pool", "pool, relu", "convolve, relu"]


def plan(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> dict[fx.Node, Fusion]:
    """Map the nodes of a graph that are skipped or computed together with another one to how that is done."""
    steps: dict[fx.Node, Fusion] = {}
    for node in graph.nodes:
        if _module(node, modules, nn.MaxPool2d) and not modules[str(node.target)].return_indices:
            steps[node] = "pool"
    for node in graph.nodes:
        if not _is_relu(node, modules) or not isinstance(node.args[0], fx.Node):
            continue
        before, users = node.args[0], list(node.users)
        if len(users) == 1 and steps.get(users[0]) == "pool":
            steps[node], steps[users[0]] = "skip", "pool, relu"
        elif _module(before, modules, nn.Conv2d) and len(before.users) == 1:
            steps[node], steps[before] = "skip", "convolve, relu"
    return steps


def _module(node: fx.Node, modules: Mapping[str, nn.Module], kind: type[nn.Module]) -> bool:
    return node.op == "call_module" and type(modules[str(node.target)]) is kind


def _is_relu(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    if node.op == "call_function":
        return node.target in (F.relu, torch.relu, F.relu_, torch.relu_)
    if node.op == "call_method":
        return node.target in ("relu", "relu_")
    return _module(node, modules, nn.ReLU)


def flattened(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> set[fx.Node]:
    """Return the nodes whose images are flattened next, so that channels had better come first in memory."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if _is_flatten(node, modules):
            before = node.args[0]
            while isinstance(before, fx.Node) and len(before.users) == 1:
                found.add(before)
                if not (_is_relu(before, modules) or _module(before, modules, StreamDropout)):
                    break
                before = before.args[0]
    return found


def _is_flatten(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    if node.op in ("call_function", "call_method"):
        return node.target in (torch.flatten, "flatten", "reshape")
    return _module(node, modules, nn.Flatten)


def pooled(layer: nn.MaxPool2d, x: Tensor, relu: bool, channels_first: bool = False) -> Tensor:
    """Take the largest value of each window, and rectify it if wanted."""
    window, stride = _pair(layer.kernel_size), _pair(layer.stride)
    side_by_side = window == stride and _pair(layer.padding) == (0, 0) and _pair(layer.dilation) == (1, 1)
    # The kernel stores where in its window each value lies in a byte, and 127 stands for nowhere.
    if side_by_side and not layer.ceil_mode and window[0] * window[1] < 100 and x.dim() == 4 and kernels.usable(x):
        from coterie.kernels.pooling import pool

        return pool(x, window, relu, channels_first)
    largest: Tensor = layer(x)
    return largest.relu() if relu else largest


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    first, second = (value, value) if isinstance(value, int) else value
    return first, second
