"""Models applied to rows: one module for many parameter rows.

Three ways to compute the same outputs:

- :class:`ModuleNet` calls the plain module for one row after another: the oracle, and on a CPU often the fastest way
  through a convolution;
- :class:`VmapNet` vectorises the module with ``torch.func``: works for any module;
- :class:`StackedNet` walks the module's graph with every layer's weights stacked over rows. Activations are folded to
  one ordinary batch of ``rows × samples``, so all that has no parameters runs as it stands, and only layers with
  parameters need a stacked form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, fx, nn

from coterie.algorithms.base import Batch
from coterie.compute.nets import fusion
from coterie.compute.nets.layers import STACKED, Convolution, Tap, convolved
from coterie.errors import ModelError
from coterie.models.problem import StreamDropout
from coterie.rows import Columns, Layout, Rows, matrix_units

Kernel = Literal["module", "vmap", "stacked"]


def _layout_of(module: nn.Module) -> Layout:
    # A part of a model may hold nothing to train: the body of a linear model only flattens.
    if not any(value.requires_grad for value in module.parameters()):
        return Layout((), (), (0,))
    return Layout.of(module, {name: (name,) for name, _ in module.named_children()})


class RowNet:
    """What the three have in common.

    Parameters
    ----------
    module
        The model.
    layout
        Where its parameters lie in a row; read off the module if not given.
    """

    def __init__(self, module: nn.Module, layout: Layout | None = None) -> None:
        self.module = module
        self.layout = layout or _layout_of(module)
        self.draws = any(isinstance(child, StreamDropout) for child in module.modules())
        """Whether it draws random numbers while it trains."""
        self._dropouts = [name for name, child in module.named_modules() if isinstance(child, StreamDropout)]
        self._subs: dict[tuple[str, ...], RowNet] = {}
        self._columns: dict[tuple[str, ...], Columns] = {}

    def outputs(self, params: Tensor, x: Tensor, key: Tensor | None = None) -> Tensor:
        """Apply the model."""
        raise ModelError("RowNet is the common part of the nets and computes nothing itself")

    def sub(self, *path: str | slice) -> RowNet:
        """Give a part of the model as a net of its own."""
        place = tuple(map(str, path))
        if place not in self._subs:
            part: Any = self.module
            for step in path:
                if isinstance(step, str):
                    if step not in dict(part.named_children()):
                        have = ", ".join(name for name, _ in part.named_children()) or "none"
                        raise ModelError(f"the model has no part {step!r} (it has: {have}); this method needs one")
                    part = getattr(part, step)
                elif isinstance(part, nn.Sequential):
                    part = part[step]
                else:
                    raise ModelError(f"{type(part).__name__} cannot be cut into layers: use an nn.Sequential")
            self._subs[place] = self._like(part)
        return self._subs[place]

    def columns(self, *path: str | slice) -> Columns:
        """Say where a part's parameters lie in a row."""
        place = tuple(map(str, path))
        if place not in self._columns:
            theirs = {id(value) for value in self.sub(*path).module.parameters()}
            mine = dict(self.module.named_parameters())
            names = [name for name in self.layout.names if id(mine[name]) in theirs]
            self._columns[place] = self.layout.columns_of(names)
        return self._columns[place]

    @property
    def split(self) -> int:
        """How many layers of the body a client holds."""
        declared = getattr(self.module, "split", None)
        if not isinstance(declared, int):
            raise ModelError(
                f"{type(self.module).__name__} does not say where it is split between client and server; this method "
                "needs an attribute `split`, a number of layers of its body"
            )
        return declared

    def _like(self, module: nn.Module) -> RowNet:
        return type(self)(module)

    def _named(self, params: Tensor, key: Tensor | None) -> Rows:
        named = self.layout.views(params)
        if key is not None:
            named |= {f"{name}.key" if name else "key": key for name in self._dropouts}
        return named


class ModuleNet(RowNet):
    """The plain module, one row after another."""

    def outputs(self, params: Tensor, x: Tensor, key: Tensor | None = None) -> Tensor:
        """Apply the model."""
        named = self._named(params, key)
        rows = [
            torch.func.functional_call(self.module, {name: value[row] for name, value in named.items()}, (x[row],))
            for row in range(len(x))
        ]
        return torch.stack(rows)


class VmapNet(RowNet):
    """The module, vectorised over rows by ``torch.func.vmap``."""

    def outputs(self, params: Tensor, x: Tensor, key: Tensor | None = None) -> Tensor:
        """Apply the model."""
        named = self._named(params, key)
        out: Tensor = torch.func.vmap(lambda p, s: torch.func.functional_call(self.module, p, (s,)))(named, x)
        return out


class StackedNet(RowNet):
    """The module's graph with stacked weights.

    Parameters
    ----------
    module
        The model; it must trace with ``torch.fx``.
    layout
        Where its parameters lie in a row.
    convolution
        How convolutions are computed.

    Raises
    ------
    ModelError
        If the module cannot be traced or uses parameters outside of layers that have a stacked form.
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
        self._plan = fusion.plan(self._graph, self._modules)
        self._own = {
            name: tuple(p for p, _ in child.named_parameters(recurse=True)) for name, child in self._modules.items()
        }

    def _like(self, module: nn.Module) -> RowNet:
        # Tracing looks inside its root, and a layer's own parameters have no stacked form from inside.
        layers = module if isinstance(module, nn.Sequential) else nn.Sequential(module)
        return make_net(layers, _layout_of(layers), "stacked", self.convolution)

    def outputs(self, params: Tensor, x: Tensor, key: Tensor | None = None) -> Tensor:
        """Apply the model."""
        return self._walk(self.layout.views(params), x, key, None)

    def _walk(self, named: Rows, x: Tensor, key: Tensor | None, taps: list[Tap] | None) -> Tensor:
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
            step = self._plan.get(node)
            if step == "skip":
                values[node] = args[0]
            elif step in ("pool", "pool, cut"):
                values[node] = fusion.pooled(self._modules[str(node.target)], args[0], step == "pool, cut")
            elif node.op == "call_function":
                values[node] = node.target(*args, **kwargs)
            elif node.op == "call_method":
                values[node] = getattr(args[0], node.target)(*args[1:], **kwargs)
            elif node.op == "call_module":
                values[node] = self._layer(str(node.target), named, args[0], rows, key, taps, step is not None)
            else:
                out = args[0]
        result: Tensor = out.view(rows, samples, *out.shape[1:])
        return result

    def _layer(
        self, name: str, named: Rows, x: Tensor, rows: int, key: Tensor | None, taps: list[Tap] | None, cut: bool
    ) -> Tensor:
        child = self._modules[name]
        if isinstance(child, StreamDropout):
            return x if key is None else child.dropped(key, x)
        prefix = f"{name}." if name else ""
        weights = {own: named[prefix + own] for own in self._own[name] if prefix + own in named}
        if not weights:
            plain: Tensor = child(x)
            return plain.relu() if cut else plain
        if taps is not None and type(child) is nn.Linear and len(weights) == len(self._own[name]):
            out = STACKED[nn.Linear](child, weights, x, rows, self.convolution)
            if not out.requires_grad:
                out.requires_grad_()
            taps.append(Tap(weights, x.detach(), out))
            return out
        if taps is not None:
            leaves = {own: value.detach().requires_grad_() for own, value in weights.items()}
            taps += [Tap({own: weights[own]}, None, leaf) for own, leaf in leaves.items()]
            weights = leaves
        if type(child) is nn.Conv2d and len(weights) == len(self._own[name]):
            return convolved(child, weights, x, rows, self.convolution, cut)
        out = self._stacked(child, name, weights, x, rows)
        return out.relu() if cut else out

    def _stacked(self, child: nn.Module, name: str, weights: Rows, x: Tensor, rows: int) -> Tensor:
        form = STACKED.get(type(child))
        if form is not None and len(weights) == len(self._own[name]):
            return form(child, weights, x, rows, self.convolution)
        batch = x.unflatten(0, (rows, -1))
        whole: Tensor = torch.func.vmap(lambda p, s: torch.func.functional_call(child, p, (s,)))(weights, batch)
        return whole.flatten(0, 1)

    def descend_(self, params: Tensor, rate: Tensor, batch: Batch, losses: Callable[[Tensor], Tensor]) -> None:
        """Take a gradient step in place, never holding the gradient of a linear layer.

        The gradient of a linear layer's weights is a product of two small matrices, what came in and what the loss says
        of what came out; it is added to the weights as it is multiplied, so that they are read and written once."""
        taps: list[Tap] = []
        with torch.enable_grad():
            total = losses(self._walk(self.layout.views(params), batch.x, batch.key, taps)).sum()
            gradients = torch.autograd.grad(total, [tap.watched for tap in taps], allow_unused=True)
        for tap, gradient in zip(taps, gradients, strict=True):
            if gradient is not None:
                tap.update_(gradient, rate)


class _Tracer(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # A module of its own kind with parameters of its own is taken whole: its forward may use them in any way.
        direct = any(True for _ in m.parameters(recurse=False))
        return direct or isinstance(m, StreamDropout) or super().is_leaf_module(m, module_qualified_name)


def make_net(
    module: nn.Module, layout: Layout, kernel: Kernel = "stacked", convolution: Convolution = "auto"
) -> RowNet:
    """Make the net of a kernel, falling back to :class:`VmapNet` where a module has no stacked form."""
    if kernel == "module":
        return ModuleNet(module, layout)
    if kernel == "stacked":
        try:
            return StackedNet(module, layout, convolution)
        except ModelError:
            pass
    return VmapNet(module, layout)


def agrees(net: RowNet, reference: RowNet, x: Tensor, tolerance: float) -> bool:
    """Say whether two nets compute the same outputs, and keep rows apart, on given samples."""
    row = reference.layout.row_of(dict(reference.module.named_parameters()))
    spread = torch.arange(1, len(x) + 1, dtype=row.dtype, device=row.device).unsqueeze(1)
    params = row * (1 + 0.1 * spread) + 0.01 * torch.sin(spread * torch.arange(len(row), device=row.device))
    with torch.no_grad(), matrix_units.tf32(False):
        try:
            got, wanted = net.outputs(params, x), reference.outputs(params, x)
        except (RuntimeError, ValueError, TypeError, IndexError):
            return False
    return bool(got.shape == wanted.shape and (got - wanted).norm() <= tolerance * (1 + wanted.norm()))
