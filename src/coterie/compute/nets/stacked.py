"""A module's graph with the weights of every layer stacked over rows.

Activations are folded to one ordinary batch of ``rows × samples``. So whatever has no parameters runs as it stands, and
only layers with parameters need a stacked form (:data:`coterie.compute.nets.layers.STACKED`).
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from coterie.algorithms.base import Batch
from coterie.compute.nets import fusion
from coterie.compute.nets.fusion import Fusion
from coterie.compute.nets.layers import STACKED, Convolution, convolved
from coterie.compute.nets.row_net import ModuleNet, RowNet, VmapNet, keyed, layout_of
from coterie.compute.nets.taps import GradientTap, TappedMaps, affine, descend_along, leaves, tapped
from coterie.errors import ModelError
from coterie.models.attention import StreamAttention, attend
from coterie.models.dropout import FunctionCalls, StreamDropout
from coterie.models.problem import logits_alone
from coterie.models.recurrent import StreamGRU, StreamLSTM, StreamRNN, recur, written_out
from coterie.rows import Layout, Rows

Kernel = Literal["module", "vmap", "stacked"]
"""The three ways to apply a model to rows."""


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
        descend_along(taps, total, rate)

    def layer(self, name: str) -> tuple[nn.Module, dict[str, str]]:
        """Return a layer, and for each of its parameters the name that it has in the rows."""
        return self._modules[name], self._own[name]

    def _walk(self, named: Rows, x: Tensor, key: Tensor | None, taps: list[GradientTap] | None) -> Tensor:
        rows, samples = x.shape[:2]
        values: dict[fx.Node, Any] = {}
        calls = FunctionCalls(key)
        layers = _Layers(self, named, rows, key, taps, calls)

        def value_of(node: fx.Node) -> Any:
            return values[node]

        out: Any = None
        given = iter((x.flatten(0, 1), *self._defaults.values()))
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
        self.note(calls)
        result: Tensor = out.view(rows, samples, *out.shape[1:])
        return result


@dataclass(frozen=True)
class _Layers:
    """The layers of a net in one pass over its graph."""

    net: StackedNet | FoldedNet
    named: Rows
    rows: int
    key: Tensor | None
    taps: list[GradientTap] | None
    calls: FunctionCalls

    def apply(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], then: Fusion | None) -> Any:
        """Apply a layer to folded activations, and what is computed together with it."""
        child, own = self.net.layer(name)
        if isinstance(child, StreamDropout):
            return args[0] if self.key is None else child.dropped(self.key, args[0])
        weights = {short: self.named[full] for short, full in own.items() if full in self.named}
        if not weights:
            return fusion.finished(then, child(*args, **kwargs))
        # Frozen parameters are in no row: a layer with some of them has no stacked form.
        out = self._stacked(child, weights, args, kwargs, then) if len(weights) == len(own) else None
        if out is None:
            out = self._vectorised(child, leaves(weights, self.taps), args, kwargs)
            return fusion.finished(then, out)
        return out

    def apply_to_some(self, name: str, samples: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Apply a layer to folded activations, or to what the model has once for all samples, such as positions."""
        once = len(args) > 0 and isinstance(args[0], Tensor) and len(args[0]) == 1 < self.rows * samples
        if not once:
            return self.apply(name, args, kwargs, None)
        of_rows = args[0].expand(self.rows, *args[0].shape[1:])
        return self.apply(name, (of_rows, *args[1:]), kwargs, None).repeat_interleave(samples, 0)

    def _stacked(
        self, child: nn.Module, weights: Rows, args: tuple[Any, ...], kwargs: dict[str, Any], then: Fusion | None
    ) -> Any:
        """Apply a layer in its stacked form; ``None`` if it has none."""
        if isinstance(child, StreamLSTM | StreamGRU | StreamRNN):
            x, state = (*args, kwargs.get("hx"))[:2]
            return recur(child, weights, self.rows, x, state, self._dropped, TappedMaps(self.taps))
        if isinstance(child, StreamAttention):
            extra = leaves({name: weights[name] for name in ("bias_k", "bias_v") if name in weights}, self.taps)
            return attend(
                child,
                weights | extra,
                self.rows,
                lambda own, x: affine(own, x, self.taps),
                lambda x: self._dropped(child.stream, x),
                *args,
                **kwargs,
            )
        form = STACKED.get(type(child))
        if form is None:
            return None
        convolution = self.net.convolution
        if self.taps is not None and type(child) is nn.Linear:
            return tapped(form(child, weights, args[0], self.rows, convolution), weights, args[0], self.taps)
        weights = leaves(weights, self.taps)
        if type(child) is nn.Conv2d:
            return convolved(child, weights, args[0], self.rows, convolution, then)
        return form(child, weights, args[0], self.rows, convolution)

    def _dropped(self, layer: StreamDropout, x: Tensor) -> Tensor:
        return x if self.key is None else layer.dropped(self.key, x)

    def _vectorised(self, child: nn.Module, weights: Rows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key, calls = self.key, self.calls
        if key is not None:
            weights = weights | {f"{name}.key" if name else "key": key for name in keyed(child)}

        def one(own: Rows, key: Tensor | None, *given: Any) -> Any:
            with FunctionCalls(key) as inner:
                inner.calls = calls.calls  # masks are numbered through the whole model
                out = torch.func.functional_call(child, own, given[:-1], given[-1])
            calls.calls, calls.met, calls.drew = inner.calls, calls.met or inner.met, calls.drew or inner.drew
            return out

        given = (*args, kwargs)
        split = _mapped(given, lambda value: value.unflatten(0, (self.rows, -1)))
        dims = _mapped(given, lambda _: 0, None)
        with written_out():
            out = torch.func.vmap(one, in_dims=(0, None if key is None else 0, *dims))(weights, key, *split)
        return _mapped(out, lambda value: value.flatten(0, 1))


_AS_IT_IS = object()


def _mapped(value: Any, function: Callable[[Tensor], Any], others: Any = _AS_IT_IS) -> Any:
    """Apply a function to the tensors in nested tuples and dictionaries; give ``others`` for what is no tensor."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple | list):
        return type(value)(_mapped(each, function, others) for each in value)
    if isinstance(value, dict):
        return {name: _mapped(each, function, others) for name, each in value.items()}
    return value if others is _AS_IT_IS else others


def _defaults(module: nn.Module) -> dict[str, Any]:
    """Return the defaults of whatever a module's ``forward`` takes beside the samples."""
    parameters = list(inspect.signature(module.forward).parameters.values())[1:]
    return {each.name: each.default for each in parameters if each.default is not each.empty}


class FoldedNet(RowNet):
    """A model that is called as it is, on all rows' samples as one batch, with its trained layers in stacked form.

    For models that cannot be traced: whatever is frozen, or has no parameters, runs as it stands.

    Parameters
    ----------
    module
        The model; what is trained must be in layers.
    layout
        Where its parameters lie in a row.
    convolution
        How convolutions are computed.

    Raises
    ------
    ModelError
        If the model uses trained parameters outside of layers.
    """

    def __init__(self, module: nn.Module, layout: Layout | None = None, convolution: Convolution = "auto") -> None:
        super().__init__(module, layout)
        self.convolution: Convolution = convolution
        rows = {value: name for name, value in module.named_parameters()}
        self._own: dict[str, tuple[nn.Module, dict[str, str]]] = {}
        for name, child in _outermost(module):
            if child is module:
                raise ModelError(f"{type(module).__name__} uses parameters outside of layers")
            self._own[name] = child, {own: rows[value] for own, value in child.named_parameters()}

    def of_part(self, part: nn.Module) -> RowNet:
        """Make a net of a part of the model, stacked where that is possible."""
        layers = part if isinstance(part, nn.Sequential) else nn.Sequential(part)
        return make_net(layers, layout_of(layers), "stacked", self.convolution)

    def outputs(self, params: Tensor, x: Tensor, key: Tensor | None = None) -> Tensor:
        """Apply the model to samples ``[rows, samples, ...]``."""
        return self._run(self.layout.views(params), x, key, None)

    def descend_(self, params: Tensor, rate: Tensor, batch: Batch, losses: Callable[[Tensor], Tensor]) -> None:
        """Take the step ``params − rate · gradient`` in place, as :meth:`StackedNet.descend_` does."""
        taps: list[GradientTap] = []
        with torch.enable_grad():
            total = losses(self._run(self.layout.views(params), batch.x, batch.key, taps)).sum()
        descend_along(taps, total, rate)

    def layer(self, name: str) -> tuple[nn.Module, dict[str, str]]:
        """Return a layer, and for each of its parameters the name that it has in the rows."""
        return self._own[name]

    def _run(self, named: Rows, x: Tensor, key: Tensor | None, taps: list[GradientTap] | None) -> Tensor:
        rows, samples = x.shape[:2]
        calls = FunctionCalls(key)
        layers = _Layers(self, named, rows, key, taps, calls)
        with contextlib.ExitStack() as replaced, calls:
            for name, (child, _) in self._own.items():
                replaced.enter_context(_replaced(child, partial(layers.apply_to_some, name, samples)))
            out = self.module(x.flatten(0, 1))
        self.note(calls)
        result: Tensor = out.view(rows, samples, *out.shape[1:])
        return result


def _outermost(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Give the layers that have trained parameters of their own, or draw, but none within another of them."""
    if isinstance(module, StreamDropout) or any(value.requires_grad for value in module.parameters(recurse=False)):
        yield name, module
        return
    for own, child in module.named_children():
        yield from _outermost(child, f"{name}.{own}" if name else own)


@contextlib.contextmanager
def _replaced(layer: nn.Module, apply: Callable[..., Any]) -> Iterator[None]:
    """Have a layer called in another way."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        del layer.__dict__["forward"]  # the other way may call the layer itself
        try:
            return apply(args, kwargs)
        finally:
            layer.__dict__["forward"] = forward

    layer.__dict__["forward"] = forward
    try:
        yield
    finally:
        del layer.__dict__["forward"]


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
        for kind in (StackedNet, FoldedNet):
            with contextlib.suppress(ModelError):
                return kind(module, layout, convolution)
    return VmapNet(module, layout)
