"""What a model costs for one sample: memory of its activations, multiplications; found out with a few samples."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from coterie.compute.nets.row_net import ModuleNet, RowNet


def bytes_of_sample(net: RowNet, row: Tensor, x: Tensor) -> int:
    """Return the bytes that a model keeps of one sample until its backward pass; ``x`` is ``[rows, samples, ...]``."""
    held = {value.untyped_storage().data_ptr() for value in (*net.module.parameters(), *net.module.buffers())}
    found: dict[int, int] = {}

    def pack(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in held:
            found[storage.data_ptr()] = storage.nbytes()
        return value

    params = row.expand(len(x), -1).clone().requires_grad_()
    held.add(params.untyped_storage().data_ptr())
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        net.outputs(params, x)
    return max(1, sum(found.values()) // (x.shape[0] * x.shape[1]))


def multiplications_of_sample(net: ModuleNet, row: Tensor, x: Tensor) -> int:
    """Count about how many multiplications a model takes for one sample; ``x`` is ``[1, samples, ...]``."""
    counted = 0

    def count(layer: nn.Module, _: object, out: object) -> None:
        nonlocal counted
        made = out[0] if isinstance(out, tuple) and out else out
        if isinstance(made, Tensor):
            # Each output of a dense layer or a convolution is a sum over the weights of its unit.
            counted += made.numel() * sum(value[0].numel() for value in _weights(layer))

    hooks = [layer.register_forward_hook(count) for layer in net.module.modules() if _weights(layer)]
    try:
        with torch.no_grad():
            net.outputs(row.unsqueeze(0), x)
    finally:
        for hook in hooks:
            hook.remove()
    return max(counted // x.shape[1], len(row))


def _weights(layer: nn.Module) -> list[Tensor]:
    return [value for value in layer.parameters(recurse=False) if value.dim() > 1]
