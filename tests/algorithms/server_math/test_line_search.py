"""S-FedPG's line search: candidate steps and the test they must pass."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.algorithms.server_math.common_descent import common_descent
from coterie.algorithms.server_math.fairness import unfairness
from coterie.algorithms.server_math.line_search import armijo_accepts, first_accepted, trial_steps
from coterie.errors import ConfigError
from coterie.randomness import stream

F64 = torch.float64
quick = settings(max_examples=50, deadline=None)


def test_steps_halve_from_the_largest_to_the_floor() -> None:
    # From 2^1 eta down to 2^-1 eta / 4: 2, 1, 1/2, 1/4, 1/8 times eta.
    torch.testing.assert_close(
        trial_steps(0.1, 1, 4.0), torch.tensor([0.2, 0.1, 0.05, 0.025, 0.0125], dtype=F64), rtol=0, atol=0
    )


@given(eta=st.floats(1e-6, 10), s=st.integers(0, 6), sigma=st.floats(1, 1e8))
@quick
def test_number_of_trials_is_bounded(eta: float, s: int, sigma: float) -> None:
    steps = trial_steps(eta, s, sigma)
    assert 1 <= len(steps) <= 2 * s + 1 + math.ceil(math.log2(sigma))
    assert steps[0] == 2.0**s * eta
    assert torch.equal(steps[1:], steps[:-1] / 2)
    floor = 2.0**-s * eta / sigma
    assert steps[-1] >= floor
    assert steps[-1] / 2 < floor


def test_there_is_always_one_trial() -> None:
    # The rescaled direction is so much shorter than the raw one that the floor lies above the first step.
    assert trial_steps(0.1, 1, 0.1).tolist() == [0.2]


@pytest.mark.parametrize(
    ("arguments", "field"),
    [((0.0, 1, 1.0), "eta"), ((0.1, -1, 1.0), "s"), ((0.1, 1, 0.0), "sigma_resc"), ((0.1, 1, math.inf), "sigma_resc")],
)
def test_values_out_of_range_are_refused(arguments: tuple[float, int, float], field: str) -> None:
    with pytest.raises(ConfigError, match=f"^{field} must be"):
        trial_steps(*arguments)


def quadratics(seed: int, online: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Curvatures, centres, a point, and its losses, for L_i(w) = Lip_i/2 |w - c_i|^2 + 0.1."""
    draw = stream(seed, "quadratics")
    curvatures = torch.from_numpy(10.0 ** draw.uniform(-1, 1, size=online))
    centres = torch.from_numpy(draw.normal(size=(online, 12)) + 2 * draw.normal(size=12))
    omega = torch.zeros(12, dtype=F64)
    return curvatures, centres, omega, curvatures / 2 * (omega - centres).square().sum(1) + 0.1


@given(seed=st.integers(0, 2**32 - 1), online=st.integers(1, 6), fair=st.booleans(), eta=st.floats(0.01, 3))
@quick
def test_accepted_steps_on_quadratics(seed: int, online: int, fair: bool, eta: float) -> None:
    curvatures, centres, omega, losses = quadratics(seed, online)
    gradients = curvatures.unsqueeze(1) * (omega - centres)
    found = common_descent(gradients, losses, fair=fair)
    assert not found.stationary
    steps, beta = trial_steps(eta, 5, found.scale), 1e-4
    points = omega + steps.unsqueeze(1) * found.direction
    trials = curvatures / 2 * (points.unsqueeze(1) - centres).square().sum(2) + 0.1
    accepted = armijo_accepts(losses, trials, steps, found.slopes, found.fair_slope, beta=beta)

    decrease = trials - losses
    expected = (decrease <= beta * steps.unsqueeze(1) * found.slopes).all(1)
    by_losses = armijo_accepts(losses, trials, steps, found.slopes, None, beta=beta)
    assert torch.equal(by_losses, expected)
    # On a quadratic with L_i'' = Lip_i the loss test is eta <= 2 (1 - beta) |g_i.d| / (Lip_i |d|^2), for every client.
    bound = float((2 * (1 - beta) * found.slopes.abs() / (curvatures * found.direction.square().sum())).min())
    clear = (steps / bound - 1).abs() > 1e-6
    assert torch.equal(by_losses[clear], (steps <= bound)[clear])

    at, success = first_accepted(accepted)
    if success:
        assert (trials[at] < losses).all()
        if found.fair_slope is not None:
            assert float(unfairness(trials[at])) < float(unfairness(losses))
            change = float(unfairness(trials[at]) - unfairness(losses))
            assert change <= beta * float(steps[at]) * found.fair_slope
        assert not accepted[:at].any()
    if found.fair_slope is None and float(steps[-1]) <= bound:
        assert success
        assert at == 0 or float(steps[at]) >= bound / 2 * (1 - 1e-6)


def test_one_client_that_does_not_descend_enough_rejects_the_step() -> None:
    losses, slopes, steps = torch.tensor([1.0, 1.0]), torch.tensor([-1.0, -2.0]), torch.tensor([0.5, 0.25])
    # With beta = 1/2 the losses must fall by 0.25 and 0.5 at the first step, by 0.125 and 0.25 at the second.
    trials = torch.tensor([[0.75, 0.51], [0.875, 0.75]])
    assert armijo_accepts(losses, trials, steps, slopes, None, beta=0.5).tolist() == [False, True]
    protected = torch.tensor([True, False])
    assert armijo_accepts(losses, trials, steps, slopes, None, beta=0.5, protected=protected).tolist() == [True, True]


def test_a_step_that_widens_the_gap_is_rejected_by_the_fair_test_alone() -> None:
    losses, steps = torch.tensor([2.0, 1.0]), torch.tensor([1.0])
    slopes, trials = torch.tensor([-0.1, -0.1]), torch.tensor([[1.9, 0.5]])
    assert armijo_accepts(losses, trials, steps, slopes, None).tolist() == [True]
    assert armijo_accepts(losses, trials, steps, slopes, -0.01).tolist() == [False]
    closer = torch.tensor([[1.4, 0.9]])
    assert armijo_accepts(losses, closer, steps, slopes, -0.01).tolist() == [True]


def test_losses_that_are_not_numbers_are_rejected() -> None:
    trials = torch.tensor([[math.nan, 0.1], [math.inf, 0.1], [0.1, 0.1]])
    found = armijo_accepts(torch.ones(2), trials, torch.ones(3), -torch.ones(2), None)
    assert found.tolist() == [False, False, True]
    unprotected = torch.tensor([False, True])
    found = armijo_accepts(torch.ones(2), trials, torch.ones(3), -torch.ones(2), None, protected=unprotected)
    assert found.tolist() == [False, False, True]


def test_first_accepted_falls_back_on_the_last_tried() -> None:
    assert first_accepted(torch.tensor([False, True, True])) == (1, True)
    assert first_accepted(torch.tensor([False, False])) == (1, False)
