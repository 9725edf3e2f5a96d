"""Small tensors on both sides: what a GPU holds is read back once, because reading waits for all that it has to do."""

from __future__ import annotations

import torch
from torch import Tensor

_NAME = "_on_host"  # where a tensor on a device carries its version and its copy


def on_host(values: Tensor) -> Tensor:
    """Give the values on the host; those that lie on a device are read once, as long as nobody changes them."""
    if values.device.type == "cpu":
        return values
    known: tuple[int, Tensor] | None = getattr(values, _NAME, None)
    if known is None or known[0] != values._version:
        known = values._version, values.cpu()
        setattr(values, _NAME, known)
    return known[1]


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """Give values that lie on the host on a device, where :func:`on_host` finds them again; nobody may change them."""
    there = values.to(device)
    if there is not values:
        setattr(there, _NAME, (there._version, values))
    return there
