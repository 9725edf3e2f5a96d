"""Nets whose layers with parameters are applied to all rows at once, and one pass through those layers.

Activations are folded to one ordinary batch of ``rows × samples``. So whatever has no parameters runs as it stands, and
only layers with parameters need a stacked form (:data:`coterie.compute.nets.layers.STACKED`).
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coterie.algorithms.base import Batch
from coterie.compute.nets import fusion
from coterie.compute.nets.batch_norm import normalised, normalised_by_batch
from coterie.compute.nets.fusion import Fusion
from coterie.compute.nets.layers import STACKED, Convolution, convolved
from coterie.compute.nets.row_net import RowNet, VmapNet, joined_statistics, keyed, layout_of
from coterie.compute.nets.taps import GradientTap, TappedMaps, affine, descend_along, leaves, tapped
from coterie.errors import ModelError
from coterie.models.attention import StreamAttention, attend
from coterie.models.batch_norm import (
    COUNT,
    MEAN,
    VARIANCE,
    NormPass,
    RowBatchNorm,
    RunningStatistics,
    norms_of,
    statistics_layout,
)
from coterie.models.calls import call_with
from coterie.models.dropout import FunctionCalls, StreamDropout
from coterie.models.recurrent import StreamGRU, StreamLSTM, StreamRNN, recur, written_out
from coterie.rows import Layout, Rows


class LayeredNet(RowNet):
    """A model whose layers are applied to all rows at once.

    Parameters
    ----------
    module
        The model.
    layout
        Where its parameters lie in a row.
    convolution
        How convolutions are computed.
    """

    def __init__(self, module: nn.Module, layout: Layout | None = None, convolution: Convolution = "auto") -> None:
        super().__init__(module, layout)
        self.convolution: Convolution = convolution
        self.norm_names: dict[nn.Module, str] = {layer: prefix for prefix, layer in norms_of(module)}

    @abc.abstractmethod
    def layer(self, name: str) -> tuple[nn.Module, dict[str, str]]:
        """Return a layer, and for each of its parameters the name that it has in the rows."""

    @abc.abstractmethod
    def through(self, layers: LayerPass, x: Tensor, samples: int) -> Any:
        """Bring folded samples ``[rows × samples, ...]`` through the model, with its layers as the pass has them."""

    def of_part(self, part: nn.Module) -> RowNet:
        """Make a net of the same kind for a part of the model: another kind was not seen to compute what it does."""
        # Tracing looks inside its root, and a layer's own parameters have no stacked form from inside.
        layers = part if isinstance(part, nn.Sequential) else nn.Sequential(part)
        with contextlib.suppress(ModelError):
            return type(self)(layers, layout_of(layers), self.convolution)
        return VmapNet(layers, layout_of(layers))

    def outputs(
        self, params: Tensor, x: Tensor, key: Tensor | None = None, statistics: RunningStatistics | None = None
    ) -> Tensor:
        """Apply the model to samples ``[rows, samples, ...]``."""
        return self._pass(self.layout.views(params), x, key, None, statistics)

    def descend_(
        self,
        params: Tensor,
        rate: Tensor,
        batch: Batch,
        losses: Callable[[Tensor], Tensor],
        statistics: RunningStatistics | None = None,
    ) -> None:
        """Take the step ``params − rate · gradient`` in place, with a rate ``[rows, 1]`` for each row.

        The gradient of a linear layer's weights is the product of two small matrices: the layer's input, and the
        gradient of its output. It is added to the weights while it is multiplied and never stored, so that the weights
        are read and written once a step, which is most of the memory traffic of small batches.
        """
        taps: list[GradientTap] = []
        with torch.enable_grad():
            total = losses(self._pass(self.layout.views(params), batch.x, batch.key, taps, statistics)).sum()
        descend_along(taps, total, rate)

    def _pass(
        self,
        named: Rows,
        x: Tensor,
        key: Tensor | None,
        taps: list[GradientTap] | None,
        statistics: RunningStatistics | None,
    ) -> Tensor:
        rows, samples = x.shape[:2]
        layers = LayerPass.of(self, named, rows, key, taps, statistics)
        out = self.through(layers, x.flatten(0, 1), samples)
        self.note(layers.calls)
        layers.tell(statistics)
        result: Tensor = out.view(rows, samples, *out.shape[1:])
        return result


@dataclass(frozen=True)
class LayerPass:
    """The layers of a net in one pass over its graph."""

    net: LayeredNet
    named: Rows
    rows: int
    key: Tensor | None
    taps: list[GradientTap] | None
    calls: FunctionCalls
    running: Rows  # running statistics by name; layers that train put the new ones in their places
    weight: Tensor | None  # of each sample in its batch's mean; none in evaluation

    @classmethod
    def of(
        cls,
        net: LayeredNet,
        named: Rows,
        rows: int,
        key: Tensor | None,
        taps: list[GradientTap] | None,
        statistics: RunningStatistics | None,
    ) -> LayerPass:
        """Begin a pass."""
        running = {} if statistics is None else net.statistics.views(statistics.rows)
        weight = None if statistics is None else statistics.weight
        return cls(net, named, rows, key, taps, FunctionCalls(key), running, weight)

    def tell(self, statistics: RunningStatistics | None) -> None:
        """Put the running statistics after a pass that trains where they are looked for."""
        if statistics is not None and self.weight is not None:
            new = [self.running[name].reshape(self.rows, -1) for name in self.net.statistics.names]
            statistics.new = torch.cat(new, 1)

    def apply(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], then: Fusion | None) -> Any:
        """Apply a layer to folded activations, and what is computed together with it."""
        child, own = self.net.layer(name)
        if not args and "input" in kwargs and type(child).__module__.split(".")[0] in ("torch", "coterie"):
            args, kwargs = (kwargs["input"],), {each: value for each, value in kwargs.items() if each != "input"}
        if isinstance(child, StreamDropout):
            return args[0] if self.key is None else child.dropped(self.key, args[0])
        if isinstance(child, RowBatchNorm):
            return self._normalised(child, own, args[0])
        weights = {short: self.named[full] for short, full in own.items() if full in self.named}
        if not weights and not (self.running and any(True for _ in norms_of(child))):
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

    def _normalised(self, layer: RowBatchNorm, own: dict[str, str], x: Tensor) -> Tensor:
        """Apply a BatchNorm layer, and note its new running statistics in a pass that trains."""
        weights = leaves({short: self.named[full] for short, full in own.items() if full in self.named}, self.taps)
        affine = (weights.get("weight", layer.weight), weights.get("bias", layer.bias))
        if layer.frozen or not self.running:  # with the statistics that it was built with
            assert layer.running_mean is not None and layer.running_var is not None
            return normalised(x, layer.running_mean, layer.running_var, affine, layer.eps, self.rows)
        names = [self.net.norm_names[layer] + name for name in (MEAN, VARIANCE, COUNT)]
        before = (self.running[names[0]], self.running[names[1]], self.running[names[2]])
        if self.weight is None:
            return normalised(x, before[0], before[1], affine, layer.eps, self.rows)
        out, mean, variance = normalised_by_batch(x, self.weight, affine, layer.eps)
        self.running.update(zip(names, layer.moved(before, mean, variance), strict=True))
        return out

    def _dropped(self, layer: StreamDropout, x: Tensor) -> Tensor:
        return x if self.key is None else layer.dropped(self.key, x)

    def _vectorised(self, child: nn.Module, weights: Rows, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key, calls, norms = self.key, self.calls, list(norms_of(child)) if self.running else []
        if key is not None:
            weights = weights | {f"{name}.key" if name else "key": key for name in keyed(child)}
        # What the whole model calls the running statistics that are in this layer.
        names = {
            prefix + name: self.net.norm_names[layer] + name
            for prefix, layer in norms
            for name in (MEAN, VARIANCE, COUNT)
        }
        weights = weights | {short: self.running[full] for short, full in names.items()}

        def one(own: Rows, key: Tensor | None, weight: Tensor | None, *given: Any) -> Any:
            with FunctionCalls(key) as inner, contextlib.ExitStack() as stack:
                now = NormPass(weight) if weight is None else stack.enter_context(NormPass(weight))
                inner.calls = calls.calls  # masks are numbered through the whole model
                out = call_with(child, own, given[:-1], given[-1])
            calls.calls, calls.met, calls.drew = inner.calls, calls.met or inner.met, calls.drew or inner.drew
            return (out, joined_statistics(norms, now, own)) if norms else out

        given = (*args, kwargs)
        split = _mapped(given, lambda value: value.unflatten(0, (self.rows, -1)))
        dims = _mapped(given, lambda _: 0, None)
        weighed = self.weight if norms else None
        in_dims = (0, *(None if each is None else 0 for each in (key, weighed)), *dims)
        with written_out():
            out = torch.func.vmap(one, in_dims=in_dims)(weights, key, weighed, *split)
        if norms:
            out, new = out
            after = statistics_layout(child).views(new)
            self.running.update({full: after[short] for short, full in names.items()})
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
