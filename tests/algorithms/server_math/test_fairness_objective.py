"""FedPG's fairness objective and its derivatives."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.algorithms.server_math.fairness import fairness_coefficients, unfairness
from coterie.randomness import stream

seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=50, deadline=None)
F64 = torch.float64


@given(losses=st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12))
@quick
def test_h_is_perpendicular_to_the_losses(losses: list[float]) -> None:
    values = torch.tensor(losses, dtype=F64)
    h = fairness_coefficients(values)
    assert abs(float(h @ values)) <= 1e-14 * float(h.norm() * values.norm()) + 1e-300


@given(losses=st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=12))
@quick
def test_h_is_the_closed_form_of_the_specification(losses: list[float]) -> None:
    values = torch.tensor(losses, dtype=F64)
    length, one = values.norm(), math.sqrt(len(losses))
    expected = (values.sum() * values / (one * length**2) - 1 / one) / length
    torch.testing.assert_close(fairness_coefficients(values), expected, rtol=1e-9, atol=float(1e-14 / length))


@given(seed=seeds, online=st.integers(2, 8))
@quick
def test_sum_of_h_times_gradients_is_the_gradient_of_f(seed: int, online: int) -> None:
    draw = stream(seed, "quadratics")
    centres, curvatures = (
        torch.from_numpy(draw.normal(size=(online, 5))),
        torch.from_numpy(draw.uniform(0.5, 2, online)),
    )
    omega = torch.from_numpy(draw.normal(size=5)).requires_grad_()
    losses = curvatures / 2 * (omega - centres).square().sum(1) + 0.1
    objective = -losses.sum() / (losses.norm() * math.sqrt(online))
    (expected,) = torch.autograd.grad(objective, omega)
    gradients = curvatures.unsqueeze(1) * (omega - centres).detach()
    found = fairness_coefficients(losses.detach()) @ gradients
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("losses", [[0.7], [0.1] * 5, [0.0, 0.0], [3e-9] * 3])
def test_h_is_exactly_zero_for_equal_losses(losses: list[float]) -> None:
    assert fairness_coefficients(torch.tensor(losses)).tolist() == [0.0] * len(losses)


@given(losses=st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12))
@quick
def test_unfairness_is_f_plus_one(losses: list[float]) -> None:
    values = torch.tensor(losses, dtype=F64)
    cosine = values.sum() / (values.norm() * math.sqrt(len(losses)))
    torch.testing.assert_close(unfairness(values), 1 - cosine, rtol=1e-9, atol=1e-14)


def test_unfairness_resolves_losses_that_are_nearly_equal() -> None:
    # 1 - cos of (1 + t, 1 - t) with (1, 1) is t^2/2 to leading order: far below what 1 - cos leaves in float64.
    t = 1e-9
    assert unfairness(torch.tensor([1 + t, 1 - t], dtype=F64)).item() == pytest.approx(t**2 / 2, rel=1e-6)
    batch = unfairness(torch.tensor([[1.0, 1.0], [3.0, 0.0], [0.0, 0.0]], dtype=F64))
    torch.testing.assert_close(batch, torch.tensor([0.0, 1 - math.sqrt(0.5), 0.0], dtype=F64))
