"""A residual network of eighteen layers with BatchNorm, narrow, from plain modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Block(nn.Module):
    """Two convolutions around which the input goes on."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample: nn.Module | None = None
        if stride != 1 or before != width:
            self.downsample = nn.Sequential(nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResidualNet(nn.Module):
    """The shape of ResNet-18: a stem, four stages of two blocks, a mean over places, a linear layer.

    The stem is the one for small images. With the usual one the last stages see a single place of 32 by 32 pixels, and
    of so few values normalisation makes rounding errors grow a hundredfold with every step.
    """

    def __init__(self, channels: int = 1, outputs: int = 3, width: int = 4) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Block(width, width, 1), Block(width, width, 1))
        self.layer2 = nn.Sequential(Block(width, 2 * width, 2), Block(2 * width, 2 * width, 1))
        self.layer3 = nn.Sequential(Block(2 * width, 4 * width, 2), Block(4 * width, 4 * width, 1))
        self.layer4 = nn.Sequential(Block(4 * width, 8 * width, 2), Block(8 * width, 8 * width, 1))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        out: Tensor = self.fc(torch.flatten(self.avgpool(x), 1))
        return out
