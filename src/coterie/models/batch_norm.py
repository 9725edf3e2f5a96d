"""BatchNorm for rows: layers whose running statistics belong to a client, and which samples count in a batch.

In training, a layer normalises by the mean and the variance of its client's batch, and moves its running statistics
towards them. In evaluation it normalises by the running statistics. A pass that trains is a :class:`NormPass`; without
one, a layer evaluates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from itertools import accumulate
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from coterie.errors import ModelError
from coterie.models.own_buffers import moving_buffers
from coterie.rows import Layout

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""The layers that are taken."""
MEAN, VARIANCE, COUNT = "running_mean", "running_var", "num_batches_tracked"

Moments = tuple[Tensor, Tensor, Tensor]
"""Running mean, running variance, and of how many batches."""


@dataclass
class RunningStatistics:
    """The running statistics of rows in one pass of a net.

    Parameters
    ----------
    rows
        Those that the pass begins with ``[rows, columns]``.
    weight
        Weight of each sample in its batch's mean ``[rows, samples]``, 0 for padding; ``None`` evaluates.
    new
        Those after the pass, which a pass that trains puts here.
    """

    rows: Tensor
    weight: Tensor | None = None
    new: Tensor | None = None


@dataclass
class NormPass:
    """While it is entered, the BatchNorm layers of one client normalise by its batch.

    Parameters
    ----------
    weight
        Weight of each sample in the batch's mean ``[samples]``; ``None`` if all count the same.
    noted
        The new running statistics of each layer that was called.
    """

    weight: Tensor | None = None
    noted: dict[nn.Module, Moments] = field(default_factory=dict)
    _token: Token[NormPass | None] | None = None

    def __enter__(self) -> NormPass:
        self._token = _PASS.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._token is not None
        _PASS.reset(self._token)


_PASS: ContextVar[NormPass | None] = ContextVar("the pass that trains", default=None)


class RowBatchNorm(_BatchNorm):
    """A BatchNorm layer of one, two or three dimensions; its running statistics are handed to it with a pass."""

    frozen = False
    """Whether it normalises by the statistics that it was built with, in training too."""
    plain: type[nn.Module]

    def forward(self, input: Tensor) -> Tensor:  # called so as PyTorch's, for models that give it by name
        """Normalise one client's activations ``[samples, channels, ...]``."""
        x, now = input, _PASS.get()
        if now is None or self.frozen:
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps)
        before = now.noted.get(self) or cast(Moments, (self.running_mean, self.running_var, self.num_batches_tracked))
        if now.weight is None:
            mean, variance = torch.zeros_like(before[0]), torch.ones_like(before[1])
            # With a momentum of 1 it writes the batch's own statistics, with the unbiased variance.
            out = F.batch_norm(x, mean, variance, self.weight, self.bias, True, 1.0, self.eps)
        else:
            out, mean, variance = self._masked(x, spread(now.weight, len(x)))
        now.noted[self] = self.moved(before, mean, variance)
        return out

    def moved(self, before: Moments, mean: Tensor, variance: Tensor) -> Moments:
        """Move running statistics towards those of a batch; every tensor may have an axis of rows before its own."""
        count = before[2] + 1
        # Without a momentum they are the mean over all batches so far.
        factor = (1 / count).unsqueeze(-1) if self.momentum is None else self.momentum
        new = (old + (own.detach() - old) * factor for old, own in zip(before[:2], (mean, variance), strict=True))
        return next(new), next(new), count

    def _masked(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normalise by the samples that count; give the mean and the unbiased variance too."""
        places, along = tuple(range(2, x.dim())), (1, -1, *(1,) * (x.dim() - 2))

        def mean_of(values: Tensor) -> Tensor:
            return (weight.unsqueeze(1) * (values.mean(places) if places else values)).sum(0)

        mean = mean_of(x)
        centred = x - mean.view(along)
        variance = mean_of(centred.square())
        out = centred * torch.rsqrt(variance + self.eps).view(along)
        if self.weight is not None:
            out = out * self.weight.view(along)
        if self.bias is not None:
            out = out + self.bias.view(along)
        return out, mean, variance * unbiased(weight, math.prod(x.shape[2:]))


def spread(weight: Tensor, samples: int) -> Tensor:
    """Give the weights ``[..., samples]`` where each sample was cut into several, as steps of a sequence may be."""
    times, rest = divmod(samples, max(1, weight.shape[-1]))
    if rest:
        raise ModelError(f"BatchNorm is given {samples} samples of a batch of {weight.shape[-1]}: use nn.GroupNorm")
    return weight if times == 1 else weight.repeat_interleave(times, -1) / times


def unbiased(weight: Tensor, places: int) -> Tensor:
    """Give the factor ``n / (n − 1)`` for the ``n`` values of a channel, those of samples with a weight."""
    values = (weight > 0).sum(-1).to(weight.dtype) * places
    return values / (values - 1).clamp_min(1)


def use_running_statistics(module: nn.Module) -> None:
    """Change a module in place so that its BatchNorm layers take their running statistics from rows."""
    for layer in list(module.modules()):
        if type(layer) in PLAIN:
            layer.plain = type(layer)  # type: ignore[assignment]
            layer.__class__ = RowBatchNorm


def use_plain_layers(module: nn.Module) -> None:
    """Undo :func:`use_running_statistics`."""
    for layer in list(module.modules()):
        if isinstance(layer, RowBatchNorm):
            layer.__class__ = layer.plain  # type: ignore[assignment]


def layers_of(module: nn.Module) -> Iterator[tuple[str, RowBatchNorm]]:
    """Give the BatchNorm layers with their names."""
    for name, layer in module.named_modules():
        if isinstance(layer, RowBatchNorm):
            yield name, layer


def norms_of(module: nn.Module) -> Iterator[tuple[str, RowBatchNorm]]:
    """Give the BatchNorm layers whose running statistics lie in rows, with what stands before those's names."""
    for name, layer in layers_of(module):
        if not layer.frozen:
            yield f"{name}." if name else "", layer


def statistics_layout(module: nn.Module) -> Layout:
    """Say where each running statistic, and each buffer that a module changes by itself, lies in a row of them."""
    found: list[tuple[str, tuple[int, ...]]] = [
        (prefix + name, shape)
        for prefix, layer in norms_of(module)
        for name, shape in ((MEAN, (layer.num_features,)), (VARIANCE, (layer.num_features,)), (COUNT, ()))
    ]
    found += [(each.name, tuple(each.value.shape)) for each in moving_buffers(module)]
    offsets = (0, *accumulate(math.prod(shape) for _, shape in found))
    return Layout(tuple(name for name, _ in found), tuple(shape for _, shape in found), offsets)


def statistics_row(module: nn.Module, like: Tensor) -> Tensor:
    """Give a module's own running statistics as a row of the type of ``like``."""
    values = [getattr(layer, name) for _, layer in norms_of(module) for name in (MEAN, VARIANCE, COUNT)]
    values += [each.value for each in moving_buffers(module)]
    return torch.cat([value.reshape(-1).to(like) for value in values]) if values else like.new_zeros(0)


def statistics_state(module: nn.Module, row: Tensor) -> dict[str, Tensor]:
    """Give a row of a module's running statistics as a ``state_dict`` has them."""
    held = dict(module.named_buffers())
    # The mean of clients' counts need not be whole.
    return {
        name: value if held[name].is_floating_point() else value.round().to(held[name].dtype)
        for name, value in statistics_layout(module).state_dict(row).items()
    }
