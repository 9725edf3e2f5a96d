"""Operations of a model's graph that are computed together.

ReLU and max pooling may change places: the largest of the rectified values is the largest value, rectified. Pooling
first leaves ReLU one value of each window instead of all of them. A ReLU that follows a convolution without a pooling
after it is applied while the convolution's result is written. Where a kernel can, it pools while it convolves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from coterie import kernels
from coterie.models.dropout import StreamDropout


@dataclass(frozen=True)
class Fusion:
    """How a node is computed together with others.

    Parameters
    ----------
    kind
        ``"skip"``: by a node before it; ``"pool"``: with a ReLU before it; ``"convolve"``: with what follows it.
    relu
        Whether the result is rectified.
    pool
        The pooling, if there is one.
    flattened
        Whether the result is flattened next, so that channels had better come first in memory.
    """

    kind: Literal["skip", "pool", "convolve"]
    relu: bool = False
    pool: nn.MaxPool2d | None = None
    flattened: bool = False


SKIP = Fusion("skip")


def plan(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> dict[fx.Node, Fusion]:
    """Map the nodes of a graph that are skipped or computed together with another one to how that is done."""
    steps: dict[fx.Node, Fusion] = {}
    flattened = _flattened(graph, modules)
    for node in graph.nodes:
        layer = modules[str(node.target)] if _module(node, modules, nn.MaxPool2d) else None
        if isinstance(layer, nn.MaxPool2d) and not layer.return_indices:
            steps[node] = Fusion("pool", False, layer, node in flattened)
    for node in graph.nodes:
        if not _is_relu(node, modules) or not isinstance(node.args[0], fx.Node):
            continue
        before, users = node.args[0], list(node.users)
        if len(users) == 1 and (pool := steps.get(users[0])) is not None and pool.kind == "pool":
            steps[node], steps[users[0]] = SKIP, replace(pool, relu=True)
        elif _module(before, modules, nn.Conv2d) and len(before.users) == 1:
            steps[node], steps[before] = SKIP, Fusion("convolve", True)
    for node, step in list(steps.items()):
        if step.kind == "pool":
            given = _before(node)
            if given is not None and steps.get(given) == SKIP and len(given.users) == 1:
                given = _before(given)
            if given is not None and _module(given, modules, nn.Conv2d) and len(given.users) == 1:
                steps[node], steps[given] = SKIP, replace(step, kind="convolve")
    return steps


def _before(node: fx.Node) -> fx.Node | None:
    return node.args[0] if isinstance(node.args[0], fx.Node) else None


def _has_first(node: fx.Node) -> bool:
    """Return whether a node is given what it works on as its first argument, and not by its name."""
    return len(node.args) > 0


def _module(node: fx.Node, modules: Mapping[str, nn.Module], kind: type[nn.Module]) -> bool:
    return _has_first(node) and node.op == "call_module" and type(modules[str(node.target)]) is kind


def _is_relu(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    if node.op == "call_function":
        return _has_first(node) and node.target in (F.relu, torch.relu, F.relu_, torch.relu_)
    if node.op == "call_method":
        return node.target in ("relu", "relu_")
    return _module(node, modules, nn.ReLU)


def _flattened(graph: fx.Graph, modules: Mapping[str, nn.Module]) -> set[fx.Node]:
    """Return the nodes whose images are flattened next."""
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
        return _has_first(node) and node.target in (torch.flatten, "flatten", "reshape")
    return _module(node, modules, nn.Flatten)


def finished(then: Fusion | None, x: Tensor) -> Tensor:
    """Apply what is computed together with a layer to the layer's result."""
    if then is None:
        return x
    return pooled(then, x) if then.pool is not None else x.relu()


def pooled(step: Fusion, x: Tensor) -> Tensor:
    """Take the largest value of each window, and rectify it if wanted."""
    assert step.pool is not None
    window = side_by_side(step.pool)
    # The kernel stores where in its window each value lies in a byte, and 127 stands for nowhere.
    if window is not None and window[0] * window[1] < 100 and x.dim() == 4 and kernels.usable(x):
        from coterie.kernels.pooling import pool

        return pool(x, window, step.relu, step.flattened)
    largest: Tensor = step.pool(x)
    return largest.relu() if step.relu else largest


def side_by_side(layer: nn.MaxPool2d) -> tuple[int, int] | None:
    """Return the windows of a pooling if they lie side by side and within the image."""
    window, stride = _pair(layer.kernel_size), _pair(layer.stride)
    plain = window == stride and _pair(layer.padding) == (0, 0) and _pair(layer.dilation) == (1, 1)
    return window if plain and not layer.ceil_mode else None


def _pair(value: int | tuple[int, ...]) -> tuple[int, int]:
    first, second = (value, value) if isinstance(value, int) else value
    return first, second
