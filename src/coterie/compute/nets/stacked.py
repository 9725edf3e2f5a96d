"""A module's graph with the weights of every layer stacked over rows.

Activations are folded to one ordinary batch of ``rows × samples``. So whatever has no parameters runs as it stands, and
only layers with parameters need a stacked form (:data:`coterie.compute.nets.layers.STACKED`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from coterie import kernels
from coterie.algorithms.base import Batch
from coterie.compute.nets import fusion
from coterie.compute.nets.layers import STACKED, Convolution, convolved, few_samples
from coterie.compute.nets.row_net import ModuleNet, RowNet, VmapNet, layout_of
from coterie.errors import ModelError
from coterie.models.problem import StreamDropout
from coterie.rows import Layout, Rows

Kernel = Literal["module", "vmap", "stacked"]
"""The three ways to apply a model to rows."""


@dataclass(frozen=True)
class GradientTap:
    """Where :meth:`StackedNet.descend_` reads a gradient from the backward pass, and what it updates with it.

    Parameters
    ----------
    weights
        The parameters that will change, stacked views of the rows.
    entered
        The input of a linear layer, or ``None`` if ``watched`` is the parameter itself.
    watched
        The tensor whose gradient is taken: the layer's output, or the parameter.
    """

    weights: Rows
    entered: Tensor | None
    watched: Tensor

    def update_(self, gradient: Tensor, rate: Tensor) -> None:
        """Take the step ``weights − rate · gradient`` in place."""
        rows = len(rate)
        if self.entered is None:
            (weight,) = self.weights.values()
            weight.addcmul_(gradient, rate.view(rows, *(1,) * (weight.dim() - 1)), value=-1)
            return
        gradient = gradient.reshape(rows, -1, gradient.shape[-1])
        weight, entered = self.weights["weight"], self.entered.reshape(rows, -1, self.entered.shape[-1])
        # With few samples the time goes into reading the weights. With 50 the kernel was slower than the library's
        # product (a round of an MLP took 6.7 instead of 5.7 ms), for then the arithmetic counts.
        if few_samples(entered, 16) and kernels.usable(entered, weight):
            from coterie.kernels.linear import descend_

            descend_(weight, self.weights.get("bias"), entered, gradient, rate, kernels.precision())
            return
        step = gradient * -rate.unsqueeze(-1)
        if not weight.is_cuda and weight[0].numel() < 2**16 and torch.get_num_threads() > 1:
            # In place, PyTorch updates the rows of a matrix with gaps between them one after another on a CPU. For
            # small weights a product of its own, whose rows are shared among the threads, and a sum are faster.
            weight.add_(torch.bmm(step.transpose(1, 2), entered))
        else:
            weight.baddbmm_(step.transpose(1, 2), entered)
        if "bias" in self.weights:
            self.weights["bias"].add_(step.sum(1))


class StackedNet(RowNet):
    """A model whose layers are applied to all rows at once.

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
        super().__init__(module, layout)
        self.convolution: Convolution = convolution
        try:
            self._graph = _Tracer().trace(module)
        except Exception as error:  # torch.fx raises whatever the module's own code raises on a proxy
            raise ModelError(f"{type(module).__name__} cannot be traced: {error}") from error
        if any(node.op == "get_attr" for node in self._graph.nodes):
            raise ModelError(f"{type(module).__name__} uses parameters outside of layers")
        self._modules = dict(module.named_modules())
        self._fused = fusion.plan(self._graph, self._modules)
        self._own = {
            name: tuple(p for p, _ in child.named_parameters(recurse=True)) for name, child in self._modules.items()
        }

    def of_part(self, part: nn.Module) -> RowNet:
        """Make a net of a part of the model, stacked where that is possible."""
        # Tracing looks inside its root, and a layer's own parameters have no stacked form from inside.
        layers = part if isinstance(part, nn.Sequential) else nn.Sequential(part)
        return make_net(layers, layout_of(layers), "stacked", self.convolution)

    def outputs(self, params: Tensor, x: Tensor, key: Tensor | None = None) -> Tensor:
        """Apply the model to samples ``[rows, samples, ...]``."""
        return self._walk(self.layout.views(params), x, key, None)

    def descend_(self, params: Tensor, rate: Tensor, batch: Batch, losses: Callable[[Tensor], Tensor]) -> None:
        """Take the step ``params − rate · gradient`` in place, with a rate ``[rows, 1]`` for each row.

        The gradient of a linear layer's weights is the product of two small matrices: the layer's input, and the
        gradient of its output. It is added to the weights while it is multiplied and never stored, so that the weights
        are read and written once a step, which is most of the memory traffic of small batches.
        """
        taps: list[GradientTap] = []
        with torch.enable_grad():
            total = losses(self._walk(self.layout.views(params), batch.x, batch.key, taps)).sum()
            gradients = torch.autograd.grad(total, [tap.watched for tap in taps], allow_unused=True)
        for tap, gradient in zip(taps, gradients, strict=True):
            if gradient is not None:
                tap.update_(gradient, rate)

    def _walk(self, named: Rows, x: Tensor, key: Tensor | None, taps: list[GradientTap] | None) -> Tensor:
        rows, samples = x.shape[:2]
        values: dict[fx.Node, Any] = {}

        def value_of(node: fx.Node) -> Any:
            return values[node]

        out: Any = None
        for node in self._graph.nodes:
            if node.op == "placeholder":
                values[node] = x.flatten(0, 1)
                continue
            args = fx.map_arg(node.args, value_of)
            kwargs = fx.map_arg(node.kwargs, value_of)
            fused = self._fused.get(node)
            if fused == "skip":
                values[node] = args[0]
            elif fused in ("pool", "pool, relu"):
                values[node] = fusion.pooled(self._modules[str(node.target)], args[0], fused == "pool, relu")
            elif node.op == "call_function":
                values[node] = node.target(*args, **kwargs)
            elif node.op == "call_method":
                values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
            elif node.op == "call_module":
                relu = fused == "convolve, relu"
                values[node] = self._layer(str(node.target), named, args[0], rows, key, taps, relu)
            else:
                out = args[0]
        result: Tensor = out.view(rows, samples, *out.shape[1:])
        return result

    def _layer(
        self,
        name: str,
        named: Rows,
        x: Tensor,
        rows: int,
        key: Tensor | None,
        taps: list[GradientTap] | None,
        relu: bool,
    ) -> Tensor:
        child = self._modules[name]
        if isinstance(child, StreamDropout):
            return x if key is None else child.dropped(key, x)
        prefix = f"{name}." if name else ""
        weights = {own: named[prefix + own] for own in self._own[name] if prefix + own in named}
        if not weights:
            plain: Tensor = child(x)
            return plain.relu() if relu else plain
        # Frozen parameters are in no row: a layer with some of them has no stacked form.
        whole = len(weights) == len(self._own[name])
        if taps is not None and type(child) is nn.Linear and whole:
            out = STACKED[nn.Linear](child, weights, x, rows, self.convolution)
            if not out.requires_grad:  # nothing before this layer is trained, so that autograd has to begin with it
                out.requires_grad_()
            taps.append(GradientTap(weights, x.detach(), out))
            return out
        if taps is not None:
            leaves = {own: value.detach().requires_grad_() for own, value in weights.items()}
            taps += [GradientTap({own: weights[own]}, None, leaf) for own, leaf in leaves.items()]
            weights = leaves
        if type(child) is nn.Conv2d and whole:
            return convolved(child, weights, x, rows, self.convolution, relu)
        form = STACKED.get(type(child))
        if form is not None and whole:
            out = form(child, weights, x, rows, self.convolution)
        else:
            out = _vectorised(child, weights, x, rows)
        return out.relu() if relu else out


def _vectorised(child: nn.Module, weights: Rows, x: Tensor, rows: int) -> Tensor:
    batch = x.unflatten(0, (rows, -1))
    out: Tensor = torch.func.vmap(lambda p, s: torch.func.functional_call(child, p, (s,)))(weights, batch)
    return out.flatten(0, 1)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # A module of the user's own with parameters of its own is taken whole: its forward may use them in any way.
        direct = any(True for _ in m.parameters(recurse=False))
        return direct or isinstance(m, StreamDropout) or super().is_leaf_module(m, module_qualified_name)


def make_net(
    module: nn.Module, layout: Layout, kernel: Kernel = "stacked", convolution: Convolution = "auto"
) -> RowNet:
    """Make a net of the wanted kind, or a :class:`VmapNet` where the module has no stacked form."""
    if kernel == "module":
        return ModuleNet(module, layout)
    if kernel == "stacked":
        try:
            return StackedNet(module, layout, convolution)
        except ModelError:
            pass
    return VmapNet(module, layout)
