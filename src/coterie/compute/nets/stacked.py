"""A module's graph with the weights of every layer stacked over rows."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Iterator
from typing import Any, Literal

from torch import Tensor, fx, nn

from coterie.compute.nets import fusion
from coterie.compute.nets.folded import FoldedNet
from coterie.compute.nets.layered import LayeredNet, LayerPass
from coterie.compute.nets.layers import Convolution, has_kernel
from coterie.errors import ModelError
from coterie.models.batch_norm import RowBatchNorm
from coterie.models.dropout import StreamDropout
from coterie.models.own_buffers import moving_buffers
from coterie.models.problem import logits_alone
from coterie.rows import Layout

Kernel = Literal["module", "vmap", "stacked"]
"""The three ways to apply a model to rows."""


class StackedNet(LayeredNet):
    """A model whose graph is walked with the layers of all rows.

    Parameters
    ----------
    module
        The model; ``torch.fx`` must be able to trace it.
    layout
        Where its parameters lie in a row.
    convolution
        How convolutions are computed.

    Raises
    ------
    ModelError
        If the module cannot be traced, or uses parameters outside of layers.
    """

    def __init__(self, module: nn.Module, layout: Layout | None = None, convolution: Convolution = "auto") -> None:
        super().__init__(module, layout, convolution)
        self._defaults = _defaults(module)
        try:
            self._graph = _Tracer().trace(module, self._defaults or None)
        except Exception as error:  # torch.fx raises whatever the module's own code raises on a proxy
            raise ModelError(f"{type(module).__name__} cannot be traced: {error}") from error
        if any(node.op == "get_attr" for node in self._graph.nodes):
            raise ModelError(f"{type(module).__name__} uses parameters outside of layers")
        self._modules = dict(module.named_modules())
        self._fused = fusion.plan(self._graph, self._modules)
        # A parameter that two layers share is in the rows once, under the first of its names.
        rows = {value: name for name, value in module.named_parameters()}
        self._own = {
            name: {own: rows[value] for own, value in child.named_parameters()} for name, child in self._modules.items()
        }

    @functools.cached_property
    def reads_channels_once(self) -> bool:
        """Whether samples go to convolutions alone whose kernels read channels that are one in memory once."""
        (samples, *_) = (node for node in self._graph.nodes if node.op == "placeholder")
        layers = [self._modules.get(str(user.target)) if user.op == "call_module" else None for user in samples.users]
        kinds = all(isinstance(layer, nn.Conv2d) and has_kernel(layer) for layer in layers)
        return kinds and self.convolution in ("auto", "fused")

    def layer(self, name: str) -> tuple[nn.Module, dict[str, str]]:
        """Return a layer, and for each of its parameters the name that it has in the rows."""
        return self._modules[name], self._own[name]

    def through(self, layers: LayerPass, x: Tensor, samples: int) -> Any:
        """Walk the graph."""
        values: dict[fx.Node, Any] = {}
        calls = layers.calls

        def value_of(node: fx.Node) -> Any:
            return values[node]

        out: Any = None
        given = iter((x, *self._defaults.values()))
        for node in self._graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
                continue
            args = fx.map_arg(node.args, value_of)
            kwargs = fx.map_arg(node.kwargs, value_of)
            fused = self._fused.get(node)
            if fused == fusion.SKIP:
                values[node] = args[0]
            elif fused is not None and fused.kind == "pool":
                values[node] = fusion.pooled(fused, args[0])
            elif node.op == "call_function" and calls.replaces(node.target):
                values[node] = calls.call(node.target, args, kwargs)
            elif node.op == "call_function":
                values[node] = node.target(*args, **kwargs)
            elif node.op == "call_method":
                values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
            elif node.op == "call_module":
                values[node] = layers.apply(str(node.target), args, kwargs, fused)
            else:
                out = logits_alone(self.module, x, args[0])  # tracing takes no notice of hooks
        return out


def _defaults(module: nn.Module) -> dict[str, Any]:
    """Return the defaults of whatever a module's ``forward`` takes beside the samples."""
    parameters = list(inspect.signature(module.forward).parameters.values())[1:]
    return {each.name: each.default for each in parameters if each.default is not each.empty}


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # A module of the user's own with parameters of its own is taken whole: its forward may use them in any way.
        direct = any(True for _ in m.parameters(recurse=False))
        return direct or isinstance(m, StreamDropout | RowBatchNorm) or super().is_leaf_module(m, module_qualified_name)


def stacked_nets(module: nn.Module, layout: Layout, convolution: Convolution = "auto") -> Iterator[LayeredNet]:
    """Give the nets with stacked layers that can be made of a module, the fastest first.

    There is none if it changes buffers of its own: a batch of all clients' samples is not any client's batch.
    """
    for kind in (StackedNet, FoldedNet) if not moving_buffers(module) else ():
        with contextlib.suppress(ModelError):
            yield kind(module, layout, convolution)
