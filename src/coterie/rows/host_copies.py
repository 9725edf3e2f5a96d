"""Small tensors on both sides: what a GPU holds is read back once, because reading waits for all that it has to do.

So does writing from memory that the operating system may move: what goes to a GPU goes there from memory that it may
not, and nobody waits.
"""

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


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Give values that lie on the host on a device, without waiting for what it has to do."""
    if device.type != "cuda" or values.device.type != "cpu" or not values.numel():
        return values.to(device)
    # PyTorch keeps the copy in fixed memory until the device has read it.
    return values.pin_memory().to(device, non_blocking=True)


def on_device(values: Tensor, device: torch.device) -> Tensor:
    """Give values that lie on the host on a device, where :func:`on_host` finds them again; nobody may change them."""
    there = to_device(values, device)
    if there is not values:
        setattr(there, _NAME, (there._version, values))
    return there


class LateRead:
    """Small values of a device that are read later, without waiting for what it is given to do in the meantime.

    Parameters
    ----------
    values
        The values.
    """

    def __init__(self, values: Tensor) -> None:
        self._values, self._read = values, None
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._read = torch.cuda.Event()
            self._read.record(torch.cuda.current_stream(values.device))

    def values(self) -> Tensor:
        """Give the values on the host."""
        if self._read is not None:
            self._read.synchronize()
        return self._values
