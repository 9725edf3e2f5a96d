"""Buffers that a module's own ``forward`` changes in training, which then belong to a client as its parameters do.

Which they are is found by running the module once. Layers that hold such buffers are marked, and a net hands them the
client's values with each pass. In evaluation nothing may change: the layers that could, those with such buffers and
what of the user's own is around them, are then in evaluation mode.
"""

from __future__ import annotations

import contextlib
import copy
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from coterie.models.dropout import FunctionCalls

_MARK = "_buffers_that_move"
_PROBES = 4


@dataclass(frozen=True)
class OwnBuffer:
    """A buffer that ``forward`` changes.

    Parameters
    ----------
    name
        Its name in the module.
    owner
        The layer that holds it.
    short
        Its name in that layer.
    frozen
        Whether it is held at what the module was built with.
    """

    name: str
    owner: nn.Module
    short: str
    frozen: bool

    @property
    def value(self) -> Tensor:
        """What the module was built with."""
        return self.owner.get_buffer(self.short)


def own_buffers(module: nn.Module) -> list[OwnBuffer]:
    """Give the buffers of a module that were found to change, in the order of its layers."""
    found = []
    for name, layer in module.named_modules():
        marked: dict[str, bool] = layer.__dict__.get(_MARK, {})
        found += [OwnBuffer(f"{name}.{own}" if name else own, layer, own, held) for own, held in marked.items()]
    return found


def moving_buffers(module: nn.Module) -> list[OwnBuffer]:
    """Give those that are not frozen."""
    return [each for each in own_buffers(module) if not each.frozen]


def freeze(buffer: OwnBuffer) -> None:
    """Hold a buffer at what the module was built with."""
    buffer.owner.__dict__[_MARK][buffer.short] = True


def find_own_buffers(module: nn.Module, sample: Tensor) -> None:
    """Mark the buffers that change when a module is run on a sample in training; the module is left as it is otherwise.

    A model that fails on the sample has none: what is wrong with it is said when it meets real ones.
    """
    for layer in module.modules():
        layer.__dict__.pop(_MARK, None)
    if not any(True for _ in module.buffers()):
        return
    frozen = {id(value): value for value in module.parameters() if not value.requires_grad}
    trial = copy.deepcopy(module, frozen).train()
    # An operation in place is told by the tensor's version, even where it happens to leave the values as they were.
    before = {name: (value, value._version) for name, value in trial.named_buffers()}
    devices = [sample.device] if sample.is_cuda else []
    with torch.random.fork_rng(devices=devices), torch.no_grad(), FunctionCalls(None), contextlib.suppress(Exception):
        trial(sample)
    after = dict(trial.named_buffers())
    layers = dict(module.named_modules())
    for name, (value, version) in before.items():
        new = after.get(name)
        number = value.is_floating_point() or value.dtype in (torch.int64, torch.int32)
        if new is None or not number or (new.shape, new.dtype) != (value.shape, value.dtype):
            continue
        if new is not value or new._version != version:
            owner, _, short = name.rpartition(".")
            layers[owner].__dict__.setdefault(_MARK, {})[short] = False


def set_mode(module: nn.Module, training: bool) -> None:
    """Have the layers that may change buffers do so, or evaluate; other layers are left as they are.

    A layer whose buffers are all frozen evaluates in training too.
    """
    owners = {id(each.owner) for each in own_buffers(module)}
    moving = {id(each.owner) for each in moving_buffers(module)}
    _set_mode(module, training, owners, moving)


def _set_mode(layer: nn.Module, training: bool, owners: set[int], moving: set[int]) -> tuple[bool, bool]:
    """Set the mode of a layer and of those in it; say whether it has such buffers, and ones that move."""
    below = [_set_mode(child, training, owners, moving) for child in layer.children()]
    has = id(layer) in owners or any(each for each, _ in below)
    moves = id(layer) in moving or any(each for _, each in below)
    # PyTorch's own containers decide nothing by it, and its transformer layers would take other ways in evaluation.
    if id(layer) in owners or (has and not type(layer).__module__.startswith("torch.")):
        layer.training = training and moves
    return has, moves


def probe_inputs(
    module: nn.Module,
    shape: tuple[int, ...],
    words: bool,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    count: int = _PROBES,
) -> Tensor:
    """Make samples that are all different, whatever the data: numbers, or numbers of words that the module knows."""
    number = torch.arange(count * torch.Size(shape).numel(), device=device).view(count, *shape)
    if not words:
        return torch.sin(number.to(dtype) * 1.7) * 2
    known = [each.num_embeddings for each in module.modules() if isinstance(each, nn.Embedding)]
    return number % min(known, default=1)
