"""Layers with parameters in stacked form: row ``r`` of the weights applied to row ``r`` of the samples.

Activations come and go folded, ``[rows × samples, ...]``; weights are ``[rows, ...]``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie import kernels
from coterie.compute.nets import products
from coterie.compute.nets.fusion import Fusion, finished, pooled, side_by_side
from coterie.rows import Rows

Convolution = Literal["auto", "fused", "grouped", "unfold", "single"]
"""How convolutions are computed.

- ``fused``: by a kernel of our own that gathers patches while it multiplies;
- ``grouped``: as one grouped convolution with a group for each row;
- ``unfold``: as a batched matrix product of patches that are written out;
- ``single``: one row after another;
- ``auto``: by the way that was the fastest where we measured, which is ``fused`` on a GPU (``unfold`` where that kernel
  cannot run) and ``single`` on a CPU.
"""

StackedForm = Callable[[Any, Rows, Tensor, int, Convolution], Tensor]
"""From a layer, its stacked weights, folded activations, the number of rows and :data:`Convolution` to activations."""


def few_samples(batch: Tensor, most: int) -> bool:
    """Return whether a layer takes as long as reading its weights does, rather than as the arithmetic with them."""
    return batch.shape[1] <= most and batch.stride(2) == 1


def _linear(layer: nn.Linear, weights: Rows, x: Tensor, rows: int, convolution: Convolution) -> Tensor:
    batch = x.reshape(rows, -1, x.shape[-1])
    weight, bias = weights["weight"], weights.get("bias")
    if products.goes_by_rows(batch, weight):
        return products.linear(batch, weight, bias).view(*x.shape[:-1], weight.shape[1])
    if rows == 1:  # PyTorch shares the rows of a batched product among threads, but not the product of a single row
        return F.linear(x, *_of_one_row(weights))
    # The fused step of GradientTap changes the weights itself, so that the kernel needs no gradient for them.
    if few_samples(batch, 64) and not weight.requires_grad and kernels.usable(batch, weight):
        from coterie.kernels.linear import apply

        folded = apply(batch, weight, bias, kernels.precision())
        return folded.view(*x.shape[:-1], folded.shape[-1])
    # A CPU multiplies faster with the longer side last: 17 instead of 41 us for 50x784 by 784x10. Of sequences the
    # product is long, and to turn it back took longer than was won: a transformer's round 260 instead of 197 ms.
    flipped = not x.is_cuda and x.dim() == 2 and weight.shape[1] < batch.shape[1]
    left, right = (weight, batch.transpose(1, 2)) if flipped else (batch, weight.transpose(1, 2))
    shift = None if bias is None else bias.unsqueeze(2 if flipped else 1)
    out = torch.bmm(left, right) if shift is None else torch.baddbmm(shift, left, right)
    out = out.transpose(1, 2).contiguous() if flipped else out
    return out.view(*x.shape[:-1], out.shape[-1])


def convolved(
    layer: nn.Conv2d, weights: Rows, x: Tensor, rows: int, convolution: Convolution, then: Fusion | None = None
) -> Tensor:
    """Convolve each row's images with its own filters, and do what is computed together with that."""
    weight, bias = weights["weight"], weights.get("bias")
    if convolution in ("auto", "fused"):
        if has_kernel(layer) and kernels.usable(x, weight):
            return _conv2d_fused(layer, weight, bias, x, then)
        convolution = "unfold" if x.is_cuda else "single"
    return finished(then, _conv2d(layer, weight, bias, x, rows, convolution))


def has_kernel(layer: nn.Conv2d) -> bool:
    """Say whether there is a kernel of ours for a convolution."""
    return _pads_plainly(layer) and layer.groups == 1 and set(layer.stride) == {1}


def _pads_plainly(layer: nn.Conv2d) -> bool:
    return isinstance(layer.padding, tuple) and layer.padding_mode == "zeros"


def _conv2d(
    layer: nn.Conv2d,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    rows: int,
    convolution: Convolution,
) -> Tensor:
    if convolution == "single" or not _pads_plainly(layer):
        x = _laid_out(x, weight)
        if rows == 1:
            alone: Tensor = layer._conv_forward(x, weight.squeeze(0), None if bias is None else bias.squeeze(0))
            return alone
        # One unbind rather than a selection each: its backward pass joins all rows' gradients at once.
        biases = [None] * rows if bias is None else bias.unbind(0)
        pieces = x.unflatten(0, (rows, -1)).unbind(0)
        each = zip(pieces, weight.unbind(0), biases, strict=True)
        return torch.cat([layer._conv_forward(piece, own, shift) for piece, own, shift in each])
    if convolution == "unfold" and layer.groups == 1:
        return _conv2d_unfold(layer, weight, bias, x, rows)
    # cuDNN loops over the groups in float32, so that this way is seldom the fastest on a GPU.
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


def _laid_out(x: Tensor, weight: Tensor) -> Tensor:
    """Return images as a CPU convolves them fastest: with channels last in memory, unless the filters outweigh them."""
    # A round of a CNN with batches of 50 went from 0.94 to 1.26 times the speed of the loop engine. The results of the
    # following layers have channels last too, until they are flattened.
    if x.is_cuda or x.dtype != torch.float32:
        return x
    if weight.numel() > _HEAVY * x.numel():
        return x.contiguous()  # filters would be brought into the other order at every pass
    if not x.is_contiguous():
        return x
    if x.shape[1] > 1:
        return x.contiguous(memory_format=torch.channels_last)
    samples, line, place = x.stride()[0], x.stride()[2], x.stride()[3]
    return x.as_strided(x.shape, (samples, 1, line, place))  # a single channel needs other strides, but no copy


def _conv2d_fused(layer: nn.Conv2d, weight: Tensor, bias: Tensor | None, x: Tensor, then: Fusion | None) -> Tensor:
    from coterie.kernels.convolution import ConvolutionGeometry, Pooling, can_pool, convolve

    geometry = ConvolutionGeometry(
        *(_two(value) for value in (layer.kernel_size, layer.stride, layer.padding, layer.dilation))
    )
    if then is None or then.pool is None:
        return convolve(x, weight, bias, geometry, then is not None and then.relu, kernels.precision())
    window = side_by_side(then.pool)
    if window is None or not can_pool(window):
        return pooled(then, convolve(x, weight, bias, geometry, False, kernels.precision()))
    pooling = Pooling(window, then.flattened)
    return convolve(x, weight, bias, geometry, then.relu, kernels.precision(), pooling)


def _two(value: Any) -> tuple[int, int]:
    first, second = value
    return int(first), int(second)


class _Patches(torch.autograd.Function):
    """Every window of an image as one row ``[samples, down, across, window × channels]``, channels last.

    The forward pass is one strided copy; ``F.unfold`` launches a kernel for every sample on a GPU, which took 22 of 50
    ms of a CNN's round. The backward pass is one strided sum for each place in the window.
    """

    @staticmethod
    def forward(x: Tensor, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Tensor:
        last = x.permute(0, 2, 3, 1)
        if any(padding):
            last = F.pad(last, (0, 0, padding[1], padding[1], padding[0], padding[0]))
        samples, height, width, channels = last.shape
        down = (height - dilation[0] * (kernel[0] - 1) - 1) // stride[0] + 1
        across = (width - dilation[1] * (kernel[1] - 1) - 1) // stride[1] + 1
        each, line, place, channel = last.stride()
        windows = last.as_strided(
            (samples, down, across, kernel[0], kernel[1], channels),
            (each, line * stride[0], place * stride[1], line * dilation[0], place * dilation[1], channel),
        )
        return windows.reshape(samples, down, across, kernel[0] * kernel[1] * channels)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.kernel, ctx.dilation, ctx.padding, ctx.stride = inputs
        ctx.shape = x.shape

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        samples, channels, height, width = ctx.shape
        (up, left), (down, across) = ctx.padding, gradient.shape[1:3]
        whole = gradient.new_zeros(samples, height + 2 * up, width + 2 * left, channels)
        windows = gradient.reshape(samples, down, across, *ctx.kernel, channels)
        for i in range(ctx.kernel[0]):
            for j in range(ctx.kernel[1]):
                top, side = i * ctx.dilation[0], j * ctx.dilation[1]
                rows = slice(top, top + (down - 1) * ctx.stride[0] + 1, ctx.stride[0])
                columns = slice(side, side + (across - 1) * ctx.stride[1] + 1, ctx.stride[1])
                whole[:, rows, columns] += windows[:, :, :, i, j]
        inner = whole[:, up : up + height, left : left + width]
        return inner.permute(0, 3, 1, 2), None, None, None, None


def _conv2d_unfold(layer: nn.Conv2d, weight: Tensor, bias: Tensor | None, x: Tensor, rows: int) -> Tensor:
    unfold: Any = _Patches.apply
    patches: Tensor = unfold(x, layer.kernel_size, layer.dilation, layer.padding, layer.stride)
    samples, down, across, window = patches.shape
    filters = weight.permute(0, 3, 4, 2, 1).reshape(rows, window, -1)
    flat = patches.reshape(rows, -1, window)  # windows of one place are a view with strides of their own
    out = torch.bmm(flat, filters) if bias is None else torch.baddbmm(bias.unsqueeze(1), flat, filters)
    return out.view(samples, down, across, -1).permute(0, 3, 1, 2)


def _group_norm(layer: nn.GroupNorm, weights: Rows, x: Tensor, rows: int, convolution: Convolution) -> Tensor:
    if rows == 1:  # a row by itself needs no passes of their own for its weights
        return F.group_norm(x, layer.num_groups, *_of_one_row(weights), layer.eps)
    plain = F.group_norm(x, layer.num_groups, None, None, layer.eps)
    return _affine(weights, plain, rows, (1, -1, *(1,) * (x.dim() - 2)))


def _layer_norm(layer: nn.LayerNorm, weights: Rows, x: Tensor, rows: int, convolution: Convolution) -> Tensor:
    if rows == 1:
        return F.layer_norm(x, layer.normalized_shape, *_of_one_row(weights), layer.eps)
    plain = F.layer_norm(x, layer.normalized_shape, None, None, layer.eps)
    return _affine(weights, plain, rows, (*(1,) * (x.dim() - len(layer.normalized_shape)), *layer.normalized_shape))


def _of_one_row(weights: Rows) -> tuple[Tensor, Tensor | None]:
    bias = weights.get("bias")
    return weights["weight"].squeeze(0), None if bias is None else bias.squeeze(0)


def _affine(weights: Rows, plain: Tensor, rows: int, shape: tuple[int, ...]) -> Tensor:
    out = plain.unflatten(0, (rows, -1)) * weights["weight"].view(rows, *shape)
    if "bias" in weights:
        out = out + weights["bias"].view(rows, *shape)
    folded: Tensor = out.flatten(0, 1)
    return folded


def _embedding(layer: nn.Embedding, weights: Rows, x: Tensor, rows: int, convolution: Convolution) -> Tensor:
    weight = weights["weight"]
    places = x.reshape(rows, -1)
    found = weight[torch.arange(rows, device=x.device).unsqueeze(1), places]
    if layer.padding_idx is not None:  # its entry is used, but not trained
        found = torch.where((places == layer.padding_idx).unsqueeze(-1), found.detach(), found)
    return found.view(*x.shape, weight.shape[-1])


_HEAVY = 8  # times as many numbers in filters as in images

STACKED: dict[type[nn.Module], StackedForm] = {
    nn.Linear: _linear,
    nn.Conv2d: convolved,
    nn.GroupNorm: _group_norm,
    nn.LayerNorm: _layer_norm,
    nn.Embedding: _embedding,
}
"""The stacked form of each kind of layer. Layers without one are vectorised by ``torch.func.vmap``, which is slower."""
