"""Residual models without batch statistics.

Batch normalisation keeps running statistics that are neither trained nor a client's own to average, so ResNet-18 is
offered with group normalisation, and without any normalisation after Brock, De and Smith, "Characterizing signal
propagation to close the performance gap in unnormalized ResNets", ICLR 2021.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.models.network import Network, Stack

# The reference's constant. sqrt(2 / (1 - 1/pi)) = 1.71286 would give gain * ReLU(z) variance 1 for standard normal z.
_RELU_GAIN = 1.7139588594
_RESIDUAL_SCALE = 0.2


class ScaledStandardisedConv2d(nn.Module):
    """A convolution whose filters are standardised before each use.

    Each output filter has its mean subtracted, is divided by its population standard deviation plus ``eps``, and is
    multiplied by ``fan_in ** -0.5`` and by a learnable gain of its own that starts at 1. There is no bias.

    Parameters
    ----------
    inputs
        Channels that enter.
    outputs
        Channels that leave.
    kernel
        Side of the window.
    stride
        Step of the window.
    padding
        Rows and columns of zeros added on each side.
    eps
        Added to the standard deviation.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel: int, stride: int = 1, padding: int = 0, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, kernel, kernel))
        self.gain = nn.Parameter(torch.ones(outputs, 1, 1, 1))
        self.stride, self.padding, self.eps = stride, padding, eps
        self.scale = 1 / math.sqrt(inputs * kernel * kernel)
        nn.init.kaiming_normal_(self.weight, mode="fan_in", nonlinearity="linear")

    def filters(self) -> Tensor:
        """Return the standardised filters."""
        deviation, mean = torch.std_mean(self.weight, (1, 2, 3), correction=0, keepdim=True)
        return (self.weight - mean) / (deviation + self.eps) * (self.scale * self.gain)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve a batch with the standardised filters."""
        return F.conv2d(x, self.filters(), stride=self.stride, padding=self.padding)


class NormaliserFreeBlock(nn.Module):
    """``y = x' + 0.2 * conv2(act(conv1(act(x / beta))))`` with ``act = 1.7139588594 * ReLU``.

    ``x'`` is ``x``, or a 1x1 scaled standardised convolution of ``x / beta`` where the shape changes.

    Parameters
    ----------
    inputs
        Channels that enter.
    outputs
        Channels that leave.
    stride
        Step of the first convolution.
    beta
        What the block's input is divided by.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, beta: float = 1.0) -> None:
        super().__init__()
        self.conv1 = ScaledStandardisedConv2d(inputs, outputs, 3, stride, 1)
        self.conv2 = ScaledStandardisedConv2d(outputs, outputs, 3, 1, 1)
        self.shortcut: ScaledStandardisedConv2d | None = None
        if stride != 1 or inputs != outputs:
            self.shortcut = ScaledStandardisedConv2d(inputs, outputs, 1, stride)
        self.beta = beta

    def forward(self, x: Tensor) -> Tensor:
        """Transform a batch."""
        scaled = x if self.beta == 1.0 else x / self.beta
        carried = x if self.shortcut is None else self.shortcut(scaled)
        inner = self.conv1(F.relu(scaled) * _RELU_GAIN)
        residual: Tensor = self.conv2(F.relu(inner) * _RELU_GAIN)
        return carried + _RESIDUAL_SCALE * residual


class GroupNormBlock(nn.Module):
    """The basic block of ResNet-18 with ``GroupNorm(32)`` in the place of batch normalisation.

    Parameters
    ----------
    inputs
        Channels that enter.
    outputs
        Channels that leave.
    stride
        Step of the first convolution.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm1 = nn.GroupNorm(32, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm2 = nn.GroupNorm(32, outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.GroupNorm(32, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Transform a batch."""
        inner = F.relu(self.norm1(self.conv1(x)))
        carried: Tensor = self.shortcut(x)
        return F.relu(self.norm2(self.conv2(inner)) + carried)


def nfresnet18_fedpg(
    input_shape: tuple[int, ...], outputs: int, *, beta: Literal["one", "predicted"] = "one"
) -> Network:
    """NF-ResNet-18 with three stages of widths 16, 32 and 64: FedPG's model for CIFAR-100."""
    return _nf_resnet("nfresnet18_fedpg", input_shape, outputs, (16, 32, 64), beta == "predicted")


def nfresnet18_full(
    input_shape: tuple[int, ...], outputs: int, *, beta: Literal["one", "predicted"] = "one"
) -> Network:
    """NF-ResNet-18 with all four stages, widths 64, 128, 256 and 512."""
    return _nf_resnet("nfresnet18_full", input_shape, outputs, (64, 128, 256, 512), beta == "predicted")


def _nf_resnet(
    name: str, input_shape: tuple[int, ...], outputs: int, widths: tuple[int, ...], predicted: bool
) -> Network:
    stack = Stack(name, input_shape).images()
    stack.add(ScaledStandardisedConv2d(input_shape[0], 64, 3, 1, 1), stack.after("convolution", 64, 3, 1, 1)).add(
        nn.ReLU()
    )
    stack.add(nn.MaxPool2d(3, 2, 1), stack.after("pooling", 64, 3, 2, 1))
    variance = 1.0
    for stage, width in enumerate(widths):
        for stride in (1 if stage == 0 else 2, 1):
            changes = stride != 1 or stack.shape[0] != width
            block = NormaliserFreeBlock(stack.shape[0], width, stride, math.sqrt(variance) if predicted else 1.0)
            # Signal propagation: a block adds the square of its scale; a convolved shortcut starts again from 1.
            variance = (1.0 if changes else variance) + _RESIDUAL_SCALE**2
            stack.add(block, stack.after("convolution", width, 3, stride, 1))
        if stage == len(widths) // 2 - 1:
            stack.split_here()
    return stack.add(nn.AdaptiveAvgPool2d(1), (widths[-1], 1, 1)).flatten().network(outputs)


def resnet18_gn(
    input_shape: tuple[int, ...], outputs: int, *, stem: Literal["torchvision", "3x3"] = "torchvision"
) -> Network:
    """ResNet-18 with ``GroupNorm(32)``: FedAMP's model for CIFAR-100 without batch statistics."""
    stack = Stack("resnet18_gn", input_shape).images()
    kernel, stride, padding = (7, 2, 3) if stem == "torchvision" else (3, 1, 1)
    stack.add(
        nn.Conv2d(input_shape[0], 64, kernel, stride, padding, bias=False),
        stack.after("convolution", 64, kernel, stride, padding),
    )
    stack.add(nn.GroupNorm(32, 64)).add(nn.ReLU())
    if stem == "torchvision":
        stack.add(nn.MaxPool2d(3, 2, 1), stack.after("pooling", 64, 3, 2, 1))
    for stage, width in enumerate((64, 128, 256, 512)):
        for step in (1 if stage == 0 else 2, 1):
            stack.add(GroupNormBlock(stack.shape[0], width, step), stack.after("convolution", width, 3, step, 1))
        if stage == 1:
            stack.split_here()
    return stack.add(nn.AdaptiveAvgPool2d(1), (512, 1, 1)).flatten().network(outputs)
