"""Models that cannot be traced, called once for the samples of all rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from coterie.compute.nets.layered import LayeredNet, LayerPass
from coterie.compute.nets.layers import Convolution
from coterie.errors import ModelError
from coterie.models.batch_norm import RowBatchNorm
from coterie.models.dropout import StreamDropout
from coterie.rows import Layout


class FoldedNet(LayeredNet):
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
        super().__init__(module, layout, convolution)
        rows = {value: name for name, value in module.named_parameters()}
        self._own: dict[str, tuple[nn.Module, dict[str, str]]] = {}
        for name, child in _outermost(module):
            if child is module:
                raise ModelError(f"{type(module).__name__} uses parameters outside of layers")
            self._own[name] = child, {own: rows[value] for own, value in child.named_parameters()}

    def layer(self, name: str) -> tuple[nn.Module, dict[str, str]]:
        """Return a layer, and for each of its parameters the name that it has in the rows."""
        return self._own[name]

    def through(self, layers: LayerPass, x: Tensor, samples: int) -> Any:
        """Call the module, with the layers of the pass in the places of its own."""
        with contextlib.ExitStack() as replaced, layers.calls:
            for name, (child, _) in self._own.items():
                replaced.enter_context(_replaced(child, partial(layers.apply_to_some, name, samples)))
            return self.module(x)


def _outermost(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Give the layers that have something of a client's own: parameters, statistics, masks; none within another."""
    of_client = isinstance(module, StreamDropout | RowBatchNorm)
    if of_client or any(value.requires_grad for value in module.parameters(recurse=False)):
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
