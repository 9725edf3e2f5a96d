"""Scaled weight standardisation and the blocks, against their formulas."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from coterie import models
from coterie.models.residual import GroupNormBlock, NormaliserFreeBlock
from coterie.randomness import torch_stream

GAIN = 1.7139588594


def standardised(weight: np.ndarray, gain: np.ndarray) -> np.ndarray:
    out = np.empty_like(weight)
    for f, filter_ in enumerate(weight):
        fan_in = filter_.size
        mean = filter_.sum() / fan_in
        std = math.sqrt(((filter_ - mean) ** 2).sum() / fan_in)
        out[f] = gain[f] * (filter_ - mean) / (std + 1e-5) / math.sqrt(fan_in)
    return out


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def test_filters_follow_the_formula():
    conv = models.ScaledStandardisedConv2d(3, 4, 3, stride=2, padding=1).double()
    with torch.no_grad():
        conv.gain.copy_(torch.tensor([1.0, 2.0, -0.5, 0.0]).reshape(4, 1, 1, 1))
        conv.weight.mul_(3).add_(1)  # standardisation takes shift and scale out again
    wanted = standardised(conv.weight.detach().numpy(), conv.gain.detach().numpy().ravel())
    np.testing.assert_allclose(conv.filters().detach().numpy(), wanted, rtol=1e-12, atol=1e-14)
    x = numbers(2, 3, 5, 5)
    torch.testing.assert_close(
        conv(x), F.conv2d(x, torch.from_numpy(wanted), stride=2, padding=1), rtol=1e-12, atol=1e-13
    )


def test_filters_have_mean_zero_and_norm_gain():
    conv = models.ScaledStandardisedConv2d(8, 6, 3).double()
    filters = conv.filters().detach()
    torch.testing.assert_close(filters.mean((1, 2, 3)), torch.zeros(6, dtype=torch.float64), rtol=0, atol=1e-15)
    # Squared norm is (std / (std + 1e-5))**2, so 1 to about 2e-5 / std with std near 1 / sqrt(72).
    norms = filters.square().sum((1, 2, 3))
    torch.testing.assert_close(norms, torch.ones_like(norms), rtol=3e-4, atol=0)


def test_constant_filters_have_a_finite_gradient():
    conv = models.ScaledStandardisedConv2d(2, 2, 3).double()
    with torch.no_grad():
        conv.weight.zero_()
    conv(numbers(1, 2, 4, 4)).sum().backward()
    assert bool(conv.weight.grad.isfinite().all())


def test_kaiming_normal_fan_in_linear():
    with torch_stream(3, "init"):
        conv = models.ScaledStandardisedConv2d(64, 128, 3)
    # 73,728 draws of std 1 / sqrt(576): the sample's std is within 5 / sqrt(2 n) = 1.3% but for chance of 1e-6
    assert float(conv.weight.detach().std()) == pytest.approx(1 / 24, rel=0.013)
    assert bool((conv.gain == 1).all())


@pytest.mark.parametrize(("inputs", "outputs", "stride"), [(4, 4, 1), (4, 6, 1), (4, 4, 2), (4, 8, 2)])
@pytest.mark.parametrize("beta", [1.0, 1.3])
def test_block_follows_the_formula(inputs, outputs, stride, beta):
    block = NormaliserFreeBlock(inputs, outputs, stride, beta).double()
    x = numbers(2, inputs, 6, 6, seed=1)
    weights = {
        name: torch.from_numpy(standardised(conv.weight.detach().numpy(), np.ones(outputs)))
        for name, conv in block.named_children()
    }
    inner = F.conv2d(GAIN * (x / beta).clamp_min(0), weights["conv1"], stride=stride, padding=1)
    residual = F.conv2d(GAIN * inner.clamp_min(0), weights["conv2"], padding=1)
    changes = stride != 1 or inputs != outputs
    assert ("shortcut" in weights) == changes
    carried = F.conv2d(x / beta, weights["shortcut"], stride=stride) if changes else x
    torch.testing.assert_close(block(x), carried + 0.2 * residual, rtol=1e-12, atol=1e-13)


def test_beta_is_one_as_fedpg_runs_it_or_predicted():
    def betas(name: str) -> list[float]:
        with torch.device("meta"):
            net = models.build(name, (3, 32, 32), 10)
        return [layer.beta for layer in net.body if isinstance(layer, NormaliserFreeBlock)]

    assert betas("nfresnet18_fedpg") == [1.0] * 6
    after_one, after_two = math.sqrt(1.04), math.sqrt(1.08)  # each block adds 0.2**2
    # Every first block of a stage convolves its shortcut here (64 -> 16 -> 32 -> 64) and so starts again from 1.
    assert betas("nfresnet18_fedpg:beta=predicted") == pytest.approx(
        [1.0, after_one, after_two, after_one, after_two, after_one], rel=1e-14
    )
    # In the full model the first stage keeps 64 channels, with the same variances.
    assert betas("nfresnet18_full:beta=predicted") == pytest.approx(
        [1.0, after_one, after_two, after_one, after_two, after_one, after_two, after_one], rel=1e-14
    )


def test_group_norm_block_with_silent_branch_is_relu_of_the_shortcut():
    block = GroupNormBlock(32, 32, 1).double()
    with torch.no_grad():
        block.norm2.weight.zero_()
    x = numbers(2, 32, 4, 4, seed=2)
    torch.testing.assert_close(block(x), x.clamp_min(0), rtol=0, atol=0)


def test_group_norm_block_follows_the_formula():
    block = GroupNormBlock(32, 64, 2).double()
    x = numbers(2, 32, 6, 6, seed=3)

    def norm(maps: torch.Tensor) -> torch.Tensor:
        grouped = maps.reshape(2, 32, -1)
        centred = grouped - grouped.mean(2, keepdim=True)
        return (centred / (centred.square().mean(2, keepdim=True) + 1e-5).sqrt()).reshape(maps.shape)

    inner = norm(F.conv2d(x, block.conv1.weight, stride=2, padding=1)).clamp_min(0)
    carried = norm(F.conv2d(x, block.shortcut[0].weight, stride=2))
    wanted = (norm(F.conv2d(inner, block.conv2.weight, padding=1)) + carried).clamp_min(0)
    torch.testing.assert_close(block(x), wanted, rtol=1e-10, atol=1e-12)


def test_first_layers_of_fedpg_shrink_32_to_16_8_4():
    with torch.device("meta"):
        net = models.build("nfresnet18_fedpg", (3, 32, 32), 100)
        x, sides = torch.empty(1, 3, 32, 32), []
        for layer in net.body[:-2]:
            x = layer(x)
            sides.append(x.shape[-1])
    assert sides == [32, 32, 16, 16, 16, 8, 8, 4, 4]
