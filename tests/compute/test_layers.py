"""Layers in stacked form: each row as the plain layer would have it, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coterie import randomness
from coterie.compute.nets.layers import Convolution
from coterie.compute.nets.row_net import ModuleNet, VmapNet
from coterie.compute.nets.stacked import StackedNet

ROWS, SAMPLES = 3, 4


def check_against_plain(module: nn.Module, shape: tuple[int, ...], convolution: Convolution = "auto") -> None:
    module = module.double()
    draw = randomness.stream(1, "layers")
    net, plain = StackedNet(module, convolution=convolution), ModuleNet(module)
    params = torch.from_numpy(draw.normal(size=(ROWS, net.layout.size)))
    x = torch.from_numpy(draw.normal(size=(ROWS, SAMPLES, *shape)))
    pull = None
    ends = []
    for each in (net, plain, VmapNet(module)):
        p, s = params.clone().requires_grad_(), x.clone().requires_grad_()
        out = each.outputs(p, s)
        pull = torch.from_numpy(randomness.stream(2, "pull").normal(size=tuple(out.shape)))
        ends.append((out, *torch.autograd.grad((out * pull).sum(), (p, s))))
    for found in (ends[0], ends[2]):
        for got, wanted in zip(found, ends[1], strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("convolution", ["grouped", "unfold", "single", "auto"])
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 5, 3),
        nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 2)),
        nn.Conv2d(3, 4, 3, dilation=2, padding=2, bias=False),
        nn.Conv2d(3, 6, 3, groups=3, padding=1),
        nn.Conv2d(3, 4, 3, padding="same"),
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"),
    ],
    ids=["plain", "strided", "dilated", "groups", "same", "reflect"],
)
def test_convolutions(layer: nn.Module, convolution: Convolution) -> None:
    check_against_plain(nn.Sequential(nn.Tanh(), layer, nn.ReLU()), (3, 9, 8), convolution)


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Linear(6, 9), (6,)),
        (nn.Linear(6, 2, bias=False), (6,)),
        (nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2)), (5, 6)),
        (nn.GroupNorm(2, 6), (6, 4, 3)),
        (nn.LayerNorm((4, 3)), (6, 4, 3)),
        (nn.Sequential(nn.Conv1d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2)), (2, 6)),
        (nn.PReLU(3), (3, 4)),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 2)), (1, 8, 8)),
    ],
    ids=["linear", "flipped", "deep", "group norm", "layer norm", "conv1d", "prelu", "cnn"],
)
def test_layers(module: nn.Module, shape: tuple[int, ...]) -> None:
    check_against_plain(nn.Sequential(module), shape)


def test_frozen_parameters_are_shared() -> None:
    module = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 2))
    for value in module[0].parameters():
        value.requires_grad_(False)
    check_against_plain(module, (5,))
    assert StackedNet(module).layout.size == 4 * 2 + 2


@pytest.mark.parametrize(
    ("module", "once"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 6 * 6, 2)), True),
        (nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.Flatten(), nn.Linear(4 * 3 * 3, 2)), False),
        (nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 2)), False),
        (nn.Sequential(nn.ReLU(), nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 6 * 6, 2)), False),
    ],
)
def test_which_models_may_be_given_channels_that_are_one_in_memory(module: nn.Module, once: bool) -> None:
    assert StackedNet(module).reads_channels_once is once
    assert not StackedNet(module, convolution="unfold").reads_channels_once
