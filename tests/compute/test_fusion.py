"""What is computed together must give what it gives one after another."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie.compute.nets import fusion
from coterie.compute.nets.row_net import ModuleNet
from coterie.compute.nets.stacked import StackedNet
from coterie.rows import Layout


class _Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.pool = nn.Conv2d(1, 3, 3), nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(x))
        return self.pool(self.second(x).relu()).flatten(1)


class _Shared(nn.Module):
    """The values before the cut are used again, so that they must not be cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.pool = nn.Conv2d(1, 3, 3), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        before = self.layer(x)
        cut = torch.relu(before)
        return (before + cut).flatten(1) + self.pool(cut).sum((1, 2, 3)).unsqueeze(1)


class _TwoUsers(nn.Module):
    """The rectified values are pooled, and used as they are too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.pool = nn.Conv2d(1, 3, 3), nn.MaxPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        cut = self.layer(x).relu()
        return cut.flatten(1) + self.pool(cut).sum((1, 2, 3)).unsqueeze(1)


def steps(module: nn.Module) -> dict[str, tuple[str, bool, bool]]:
    net = StackedNet(module, Layout.of(module))
    return {str(node): (step.kind, step.relu, step.pool is not None) for node, step in net._fused.items()}


def test_what_is_planned() -> None:
    skipped = ("skip", False, False)
    assert steps(_Functional()) == {
        "first": ("convolve", True, False),
        "relu": skipped,
        "second": ("convolve", True, True),
        "relu_1": skipped,
        "pool": skipped,
    }
    plain = nn.Sequential(nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Flatten())
    assert steps(plain) == {"_0": ("convolve", False, True), "_1": skipped}
    assert steps(_Shared()) == {"pool": ("pool", False, True)}
    assert steps(_TwoUsers()) == {
        "layer": ("convolve", True, False),
        "relu": skipped,
        "pool": ("pool", False, True),
    }


@pytest.mark.parametrize(
    "module",
    [
        _Functional(),
        _Shared(),
        _TwoUsers(),
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1), nn.Flatten()),
        nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True), nn.Conv2d(4, 2, 2), nn.Flatten()),
    ],
)
def test_outputs_and_gradients_are_those_of_the_plain_module(module: nn.Module) -> None:
    module = module.double()
    layout = Layout.of(module)
    start = layout.row_of(dict(module.named_parameters())).detach()
    rows = start * torch.tensor([[1.0], [-1.2], [0.7]], dtype=torch.float64)
    x = torch.linspace(-1, 1, 3 * 2 * 81, dtype=torch.float64).sin().mul(7).sin().view(3, 2, 1, 9, 9)
    ends = []
    for net in (StackedNet(module, layout), ModuleNet(module, layout)):
        leaf = rows.clone().requires_grad_()
        out = net.outputs(leaf, x)
        ends.append((out.detach(), torch.autograd.grad(out.sin().sum(), leaf)[0]))
    for got, wanted in zip(*ends, strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def test_the_largest_of_the_cut_values_is_the_largest_value_cut() -> None:
    x = torch.tensor([[-3.0, -1.0, 2.0, 5.0], [-2.0, -4.0, 1.0, 5.0]]).view(1, 1, 2, 4)
    pool = nn.MaxPool2d(2)
    cut = fusion.pooled(fusion.Fusion("pool", True, pool), x)
    assert cut.flatten().tolist() == [0.0, 5.0]
    assert fusion.pooled(fusion.Fusion("pool", False, pool), x).flatten().tolist() == [-1.0, 5.0]
