"""Calling a module with parameters and buffers other than its own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def call_with(
    module: nn.Module, named: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
) -> Any:
    """Call a module with values under its names, each in all places that share it; buffers that it sets are put back.

    PyTorch's own way to do so (``tie_weights``) puts a value twice into a layer that has two names, and then leaves it
    there: the module would keep a client's parameters.
    """
    shared: dict[int, list[str]] = {}
    for prefix, layer in module.named_modules():
        for own, value in (*layer._parameters.items(), *layer._buffers.items()):
            if value is not None:
                shared.setdefault(id(value), []).append(f"{prefix}.{own}" if prefix else own)
    given: dict[str, Tensor] = {}
    for names in shared.values():
        first = next((name for name in names if name in named), None)
        if first is not None:
            given |= dict.fromkeys(names, named[first])
    out = torch.func.functional_call(module, given, args, kwargs, tie_weights=False)
    named.update({name: given[name] for name in named.keys() & given.keys()})
    return out
