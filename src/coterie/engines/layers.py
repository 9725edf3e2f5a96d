"""Layers with parameters in stacked form: row ``r`` of the weights applied to row ``r`` of the samples.

Activations come and go folded, ``[rows × samples, ...]``; weights are ``[rows, ...]``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.rows import Rows

Convolution = Literal["auto", "grouped", "unfold", "single"]
"""One grouped convolution, a batched matrix product of unfolded patches, one row after another, or the one that was
fastest where we measured: on a CPU one row after another; on a GPU grouped where TF32 is allowed (cuDNN has grouped
kernels for the matrix units only) and the input's gradient is wanted too, otherwise unfolded."""

Form = Callable[[Any, Rows, Tensor, int, Convolution], Tensor]


def _linear(layer: nn.Linear, weights: Rows, x: Tensor, rows: int, convolution: Convolution) -> Tensor:
    batch = x.reshape(rows, -1, x.shape[-1])
    weight, bias = weights["weight"], weights.get("bias")
    flipped = not x.is_cuda and weight.shape[1] < batch.shape[1]  # a CPU's products like the longer side last
    left, right = (weight, batch.transpose(1, 2)) if flipped else (batch, weight.transpose(1, 2))
    shift = None if bias is None else bias.unsqueeze(2 if flipped else 1)
    out = torch.bmm(left, right) if shift is None else torch.baddbmm(shift, left, right)
    out = out.transpose(1, 2).contiguous() if flipped else out
    return out.view(*x.shape[:-1], out.shape[-1])


def _conv2d(layer: nn.Conv2d, weights: Rows, x: Tensor, rows: int, convolution: Convolution) -> Tensor:
    weight, bias = weights["weight"], weights.get("bias")
    if convolution == "auto":
        grouped = x.is_cuda and x.requires_grad and torch.backends.cudnn.allow_tf32 and x.dtype == torch.float32
        convolution = "single" if not x.is_cuda else "grouped" if grouped else "unfold"
    plain_padding = isinstance(layer.padding, tuple) and layer.padding_mode == "zeros"
    if convolution == "single" or not plain_padding:
        # One unbind rather than a selection each: its backward pass joins all rows' gradients at once.
        biases = [None] * rows if bias is None else bias.unbind(0)
        pieces = x.unflatten(0, (rows, -1)).unbind(0)
        each = zip(pieces, weight.unbind(0), biases, strict=True)
        return torch.cat([layer._conv_forward(piece, own, shift) for piece, own, shift in each])
    if convolution == "unfold" and layer.groups == 1:
        return _conv2d_unfold(layer, weight, bias, x, rows)
    samples = len(x) // rows
    wide = x.unflatten(0, (rows, samples)).transpose(0, 1).flatten(1, 2)
    out = F.conv2d(
        wide,
        weight.flatten(0, 1),
        None if bias is None else bias.flatten(),
        layer.stride,
        layer.padding,
        layer.dilation,
        rows * layer.groups,
    )
    image: Tensor = out.unflatten(1, (rows, -1)).transpose(0, 1).flatten(0, 1)
    return image


class _Patches(torch.autograd.Function):
    """``F.unfold`` as one strided copy: PyTorch's own launches a kernel for every sample on a GPU."""

    @staticmethod
    def forward(x: Tensor, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Tensor:
        if any(padding):
            x = F.pad(x, (padding[1], padding[1], padding[0], padding[0]))
        count, channels, height, width = x.shape
        down = (height - dilation[0] * (kernel[0] - 1) - 1) // stride[0] + 1
        across = (width - dilation[1] * (kernel[1] - 1) - 1) // stride[1] + 1
        sample, channel, line, place = x.stride()
        windows = x.as_strided(
            (count, channels, kernel[0], kernel[1], down, across),
            (sample, channel, line * dilation[0], place * dilation[1], line * stride[0], place * stride[1]),
        )
        return windows.reshape(count, channels * kernel[0] * kernel[1], down * across)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, *ctx.shape = inputs
        ctx.size = x.shape[2:]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return F.fold(gradient, ctx.size, *ctx.shape), None, None, None, None


def _conv2d_unfold(layer: nn.Conv2d, weight: Tensor, bias: Tensor | None, x: Tensor, rows: int) -> Tensor:
    padding: Any = layer.padding
    cut: Any = _Patches.apply
    patches: Tensor = cut(x, layer.kernel_size, layer.dilation, padding, layer.stride)
    batch = patches.unflatten(0, (rows, -1))
    out = torch.matmul(weight.flatten(2).unsqueeze(1), batch)
    if bias is not None:
        out = out + bias[:, None, :, None]
    height = (x.shape[2] + 2 * padding[0] - layer.dilation[0] * (layer.kernel_size[0] - 1) - 1) // layer.stride[0] + 1
    image: Tensor = out.flatten(0, 1).unflatten(2, (height, -1))
    return image


def _group_norm(layer: nn.GroupNorm, weights: Rows, x: Tensor, rows: int, convolution: Convolution) -> Tensor:
    plain = F.group_norm(x, layer.num_groups, None, None, layer.eps)
    return _affine(weights, plain, rows, (1, -1, *(1,) * (x.dim() - 2)))


def _layer_norm(layer: nn.LayerNorm, weights: Rows, x: Tensor, rows: int, convolution: Convolution) -> Tensor:
    plain = F.layer_norm(x, layer.normalized_shape, None, None, layer.eps)
    return _affine(weights, plain, rows, (*(1,) * (x.dim() - len(layer.normalized_shape)), *layer.normalized_shape))


def _affine(weights: Rows, plain: Tensor, rows: int, shape: tuple[int, ...]) -> Tensor:
    out = plain.unflatten(0, (rows, -1)) * weights["weight"].view(rows, *shape)
    if "bias" in weights:
        out = out + weights["bias"].view(rows, *shape)
    folded: Tensor = out.flatten(0, 1)
    return folded


STACKED: dict[type[nn.Module], Form] = {
    nn.Linear: _linear,
    nn.Conv2d: _conv2d,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
}
"""The stacked form of each kind of layer that has one."""


@dataclass(frozen=True)
class Tap:
    """Where the backward pass is read off for :meth:`coterie.engines.nets.StackedNet.descend_`.

    Parameters
    ----------
    weights
        The parameters that will change, stacked views of the rows.
    entered
        What came into a linear layer, or ``None`` if ``watched`` is the parameter itself.
    watched
        The tensor whose gradient is taken: the layer's output, or the parameter.
    """

    weights: Rows
    entered: Tensor | None
    watched: Tensor

    def update_(self, gradient: Tensor, rate: Tensor) -> None:
        """Step the parameters.

        Parameters
        ----------
        gradient
            Gradient of what was watched.
        rate
            Step of each row ``[rows, 1]``.
        """
        rows = len(rate)
        if self.entered is None:
            (weight,) = self.weights.values()
            weight.addcmul_(gradient, rate.view(rows, *(1,) * (weight.dim() - 1)), value=-1)
            return
        step = gradient.reshape(rows, -1, gradient.shape[-1]) * -rate.unsqueeze(-1)
        self.weights["weight"].baddbmm_(step.transpose(1, 2), self.entered.reshape(rows, -1, self.entered.shape[-1]))
        if "bias" in self.weights:
            self.weights["bias"].add_(step.sum(1))
