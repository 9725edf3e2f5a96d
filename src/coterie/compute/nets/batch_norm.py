"""BatchNorm for all rows at once: each row by the statistics of its own samples."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coterie.models.batch_norm import spread, unbiased

_LARGE = 6000  # numbers of a row from which on a CPU normalises it faster by itself than together with others


def normalised(
    x: Tensor, mean: Tensor, variance: Tensor, affine: tuple[Tensor | None, Tensor | None], eps: float, rows: int
) -> Tensor:
    """Normalise folded activations by given statistics ``[rows, channels]``, or by ``[channels]`` for all rows."""
    gain, bias = affine
    scale = torch.rsqrt(variance + eps)
    scale = scale if gain is None else scale * gain
    shift = -mean * scale if bias is None else bias - mean * scale
    shape = (-1, 1, x.shape[1], *(1,) * (x.dim() - 2))
    return torch.addcmul(shift.reshape(shape), x.unflatten(0, (rows, -1)), scale.reshape(shape)).flatten(0, 1)


def normalised_by_batch(
    x: Tensor, weight: Tensor, affine: tuple[Tensor | None, Tensor | None], eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise folded activations by the samples of each row that count; ``weight`` is ``[rows, samples]``.

    Gives the activations, and the means and unbiased variances ``[rows, channels]`` of the batches.
    """
    rows, channels = len(weight), x.shape[1]
    weight = spread(weight, len(x) // rows)
    gain, bias = (
        x.new_full((rows, channels), value) if given is None else given.expand(rows, channels)
        for given, value in zip(affine, (1.0, 0.0), strict=True)
    )
    if not x.is_cuda and x.numel() >= _LARGE * rows:
        return _one_by_one(x.unflatten(0, (rows, -1)), gain, bias, weight, eps)
    apply: Any = _ByBatch.apply
    out, mean, variance, _ = apply(x.unflatten(0, (rows, -1)), gain, bias, weight, eps)
    return out.flatten(0, 1), mean, variance * unbiased(weight, math.prod(x.shape[2:])).unsqueeze(1)


def _one_by_one(x: Tensor, gain: Tensor, bias: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise one row after another by PyTorch's own function."""
    counts = (weight > 0).sum(1).tolist()
    mean, variance = x.new_zeros(2, *gain.shape).unbind(0)
    out = []
    # One unbind rather than a selection each: its backward pass joins all rows' gradients at once.
    for row, (own, scale, shift) in enumerate(zip(x.unbind(0), gain.unbind(0), bias.unbind(0), strict=True)):
        real, padding = own.split([counts[row], len(own) - counts[row]])
        # With a momentum of 1 it writes the batch's own statistics, with the unbiased variance.
        out += [F.batch_norm(real, mean[row], variance[row], scale, shift, True, 1.0, eps)] if len(real) else []
        out += [torch.zeros_like(padding)] if len(padding) else []
    return torch.cat(out) if len(out) > 1 else out[0], mean, variance


class _ByBatch(torch.autograd.Function):
    """Normalises ``[rows, samples, channels, ...]``; the only tensor of that size that it keeps is the centred one.

    What was centred is kept rather than what came in: sums over the latter lose digits where the mean is large.
    """

    @staticmethod
    def forward(
        x: Tensor, gain: Tensor, bias: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        share, places = weight.unsqueeze(-1), tuple(range(3, x.dim()))
        if places:
            within, means = torch.var_mean(x, places, correction=0)
            mean = (share * means).sum(1)
            variance = (share * (means - mean.unsqueeze(1)).square().add_(within)).sum(1)
            centred = x - _along(mean, x)
        else:
            mean = (share * x).sum(1)
            centred = x - mean.unsqueeze(1)
            variance = (share * centred.square()).sum(1)
        out = torch.addcmul(_along(bias, x), centred, _along(torch.rsqrt(variance + eps) * gain, x))
        return out, mean, variance, centred

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        _, gain, _, weight, ctx.eps = inputs
        _, mean, variance, centred = output
        ctx.mark_non_differentiable(mean, variance, centred)
        ctx.save_for_backward(centred, gain, weight, variance)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, *_: Any) -> Any:
        centred, gain, weight, variance = ctx.saved_tensors
        over = (1, *range(3, centred.dim()))
        rstd = torch.rsqrt(variance + ctx.eps)
        summed, gained = gradient.sum(over), (gradient * centred).sum(over) * rstd
        # gain rstd (g − weight (Σ g + x̂ Σ g x̂)), in the form  a (x − mean) + b + c g
        each, c = -weight.unsqueeze(-1) / math.prod(centred.shape[3:]), gain * rstd
        a, b = each * (c * rstd * gained).unsqueeze(1), each * (c * summed).unsqueeze(1)
        below = torch.addcmul(_each(b, centred), centred, _each(a, centred)).addcmul_(gradient, _along(c, centred))
        return below, gained, summed, None, None


def _along(values: Tensor, x: Tensor) -> Tensor:
    """Give ``[rows, channels]`` the axes of activations."""
    return values.view(len(values), 1, -1, *(1,) * (x.dim() - 3))


def _each(values: Tensor, x: Tensor) -> Tensor:
    """Give ``[rows, samples, channels]`` the axes of activations."""
    return values.view(*values.shape, *(1,) * (x.dim() - 3))
