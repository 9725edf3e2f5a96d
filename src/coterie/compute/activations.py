"""How much memory a model's activations take, measured on a few samples."""

from __future__ import annotations

import torch
from torch import Tensor

from coterie.compute.nets.row_net import RowNet


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
