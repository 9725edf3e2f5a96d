"""Convolution of each row's samples with its own filters, as products of matrices that are never written out.

A convolution is a product of the matrix of all windows of the images with the matrix of filters. The windows of a 3x3
filter take nine times the memory of the images, to be written and read again. So each tile of them is gathered when it
is multiplied. Images may have any strides; results have channels last. Programs never add to the same number, so
results repeat bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coterie.kernels._convolution_products import (
    ConvolutionGeometry,
    Pooling,
    arranged,
    images_with_filters,
    pooled_images_with_filters,
)
from coterie.kernels._filters_gradients import filters_gradient, from_pooled, pooled_filters_gradient
from coterie.kernels.pooling import unpooled

__all__ = ["ConvolutionGeometry", "Pooling", "can_pool", "convolve"]


def _result_size(image: Tensor, shape: ConvolutionGeometry) -> tuple[int, int]:
    sides = zip(image.shape[2:], *shape, strict=True)
    down, across = (
        (side + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1 for side, kernel, stride, pad, dilation in sides
    )
    return down, across


class RowConvolution(torch.autograd.Function):
    """Convolution of each row with its own filters, with a bias and, if wanted, ReLU; the stride must be 1."""

    @staticmethod
    def forward(
        image: Tensor, weight: Tensor, bias: Tensor | None, shape: ConvolutionGeometry, relu: bool, precision: str
    ) -> Tensor:
        """Convolve ``[rows × samples, channels, height, width]`` with ``[rows, features, channels, ...]``."""
        size = _result_size(image, shape)
        filters = arranged(weight, precision)
        return images_with_filters(image, filters, bias, shape, size, relu=relu, precision=precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save what the backward pass needs."""
        image, weight, bias, ctx.shape, relu, ctx.precision = inputs
        ctx.shifted = bias is not None
        ctx.save_for_backward(image, weight, output if relu else None)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        """Return the gradients of images, filters and biases."""
        image, weight, output = ctx.saved_tensors
        return *_gradients(ctx, image, weight, gradient, mask=output), None, None, None


class PooledConvolution(torch.autograd.Function):
    """The same with max pooling: what is not the largest of its window is never written."""

    @staticmethod
    def forward(
        image: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        shape: ConvolutionGeometry,
        pooling: Pooling,
        relu: bool,
        precision: str,
    ) -> tuple[Tensor, Tensor]:
        """Return the pooled images, and where the largest values were."""
        size, filters = _result_size(image, shape), arranged(weight, precision)
        return pooled_images_with_filters(image, filters, bias, shape, size, pooling, relu=relu, precision=precision)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save what the backward pass needs."""
        image, weight, bias, ctx.shape, ctx.pooling, _, ctx.precision = inputs
        ctx.shifted = bias is not None
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(image, weight, output[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor | None, _: Any) -> Any:
        """Return the gradients of images, filters and biases."""
        if gradient is None:
            return (None,) * 7
        image, weight, where = ctx.saved_tensors
        alone = ctx.needs_input_grad[1] and not ctx.needs_input_grad[0]
        if alone and from_pooled(ctx.shape, image.shape[1], ctx.pooling):
            of_weight, of_bias = pooled_filters_gradient(
                image, gradient, where, len(weight), ctx.shape, ctx.pooling, bias=ctx.shifted
            )
            return None, of_weight, of_bias, None, None, None, None
        # Written out first: to look each number's place up while it is fetched for a product took five times as long.
        gradient = unpooled(gradient, where, ctx.pooling.window, _result_size(image, ctx.shape))
        return *_gradients(ctx, image, weight, gradient), None, None, None, None


def _gradients(
    ctx: Any, image: Tensor, weight: Tensor, gradient: Tensor, mask: Tensor | None = None
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of images, filters and biases, those that are needed."""
    shape, rows = ctx.shape, len(weight)
    of_image = of_weight = of_bias = None
    if ctx.needs_input_grad[0]:
        # The images' gradient is the result's gradient, convolved with the filters turned by half a turn.
        turned = arranged(weight, ctx.precision, turned=True)
        padding = tuple(d * (k - 1) - p for d, k, p in zip(shape.dilation, shape.kernel, shape.padding, strict=True))
        back = ConvolutionGeometry(shape.kernel, (1, 1), padding, shape.dilation)
        of_image = images_with_filters(
            gradient,
            turned,
            None,
            back,
            (image.shape[2], image.shape[3]),
            mask=mask,
            precision=ctx.precision,
            kind="images",
        )
    if ctx.needs_input_grad[1]:
        of_weight, of_bias = filters_gradient(
            image, gradient, rows, shape, bias=ctx.shifted, mask=mask, precision=ctx.precision
        )
    return of_image, of_weight, of_bias


def can_pool(window: tuple[int, int]) -> bool:
    """Return whether a convolution can be pooled while it is computed: each place of a window takes registers."""
    return 1 < window[0] * window[1] <= 8


def convolve(
    image: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shape: ConvolutionGeometry,
    relu: bool,
    precision: str,
    pooling: Pooling | None = None,
) -> Tensor:
    """Convolve each row's images with its own filters ``[rows, features, channels, height, width]``.

    The stride must be 1. The result has channels last in memory, and can be differentiated once.
    """
    if image.shape[1] > 1 and image.stride(1) == 0 and not image.requires_grad:
        # Channels that are one in memory: convolved once, with the sum of their filters.
        image, weight = image[:, :1], weight.sum(2, keepdim=True)
    if pooling is None:
        plain: Any = RowConvolution.apply
        out: Tensor = plain(image, weight, bias, shape, relu, precision)
        return out
    function: Any = PooledConvolution.apply
    pooled: Tensor = function(image, weight, bias, shape, pooling, relu, precision)[0]
    return pooled
