"""FedPG's direction and drift factors, against the statements its mathematics makes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.algorithms.server_math.common_descent import (
    CommonDescent,
    common_descent,
    drift_factors,
    rescale,
)
from coterie.algorithms.server_math.fairness import fairness_coefficients
from coterie.algorithms.server_math.min_norm import min_norm_point
from coterie.errors import AlgorithmError
from coterie.randomness import stream

seeds = st.integers(0, 2**32 - 1)
quick = settings(max_examples=50, deadline=None)
F64 = torch.float64


def problem(seed: int, online: int, absent: int, parameters: int = 60) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients with unequal norms and conflicts, losses, and gradients of absent clients."""
    draw = stream(seed, "gradients")
    rows = draw.normal(size=(online + absent, parameters)) + 0.3 * draw.normal(size=parameters)
    rows *= 10.0 ** draw.uniform(-2, 1, size=(online + absent, 1))
    losses = draw.uniform(0.1, 4.0, size=online)
    return torch.from_numpy(rows[:online]), torch.from_numpy(losses), torch.from_numpy(rows[online:])


def columns_of(found: CommonDescent, gradients: Tensor, losses: Tensor, history: Tensor) -> tuple[Tensor, Tensor]:
    """The scaled columns Q (as rows) and their weights, built in full."""
    rows = [g for g, kept in zip(gradients, found.online_kept, strict=True) if kept]
    rows += [g for g, kept in zip(history, found.history_kept, strict=True) if kept]
    weights = [*found.online_weights[found.online_kept], *found.history_weights[found.history_kept]]
    if found.fair == "kept":
        rows.append(fairness_coefficients(losses) @ gradients)
        weights.append(torch.tensor(found.fair_weight, dtype=F64))
    scaled = [found.mu * row / row.norm() for row in rows]
    return torch.stack(scaled), torch.stack(weights)


# ----------------------------------------------------------------------------------------------------------- rescaling


def test_rescale_brings_rows_to_their_mean_norm() -> None:
    gradients = torch.tensor([[3.0, 4.0], [0.0, 1.0], [0.0, 1e-7]], dtype=F64)
    factors, mu = rescale(gradients)
    assert mu == 3.0  # of 5 and 1: the third is dropped
    torch.testing.assert_close(factors, torch.tensor([0.6, 3.0, 0.0], dtype=F64))
    unit, one = rescale(gradients, norm=1.0)
    assert one == 1.0
    torch.testing.assert_close(unit, torch.tensor([0.2, 1.0, 0.0], dtype=F64))
    everything, _ = rescale(gradients, norm=1.0, smallest=0.0)
    torch.testing.assert_close(everything[2], torch.tensor(1e7, dtype=F64))


def test_rescale_of_nothing_but_zeros_drops_all() -> None:
    factors, mu = rescale(torch.zeros(2, 3))
    assert factors.tolist() == [0.0, 0.0]
    assert mu == 0.0


# ----------------------------------------------------------------------------------------------------------- direction


@given(seed=seeds, online=st.integers(1, 8), absent=st.integers(0, 8), fair=st.booleans())
@quick
def test_weights_are_feasible_and_satisfy_kkt(seed: int, online: int, absent: int, fair: bool) -> None:
    gradients, losses, history = problem(seed, online, absent)
    found = common_descent(gradients, losses, history, fair=fair)
    columns, weights = columns_of(found, gradients, losses, history)
    assert (weights >= 0).all()
    assert float(weights.sum()) == pytest.approx(1.0, abs=1e-13)
    point = weights @ columns
    torch.testing.assert_close(found.raw, -point, rtol=0, atol=1e-11 * found.mu)
    slack = (columns @ point - point.square().sum()) / found.mu**2
    assert float(slack.min()) >= -1e-9
    assert float(slack[weights > 0].abs().max()) <= 1e-9


@given(seed=seeds, online=st.integers(1, 8), absent=st.integers(0, 8), single=st.booleans())
@quick
def test_direction_descends_for_every_online_and_absent_client_and_for_f(
    seed: int, online: int, absent: int, single: bool
) -> None:
    gradients, losses, history = problem(seed, online, absent)
    if single:
        gradients, history = gradients.float(), history.float()
    found = common_descent(gradients, losses, history)
    assert not found.stationary
    assert found.direction.dtype == gradients.dtype
    direction = found.direction.double()
    assert (gradients.double() @ direction < 0).all()
    assert (history.double() @ direction < 0).all()
    fair_gradient = fairness_coefficients(losses) @ gradients.double()
    if found.fair == "kept":
        assert found.fair_slope is not None
        assert float(fair_gradient @ direction) < 0
        assert found.fair_slope == pytest.approx(float(fair_gradient @ direction), rel=1e-9)
    elif online > 1:  # only where it all but closes the hull around the origin
        assert found.fair == "collapsed"
        columns = torch.cat([gradients, history, fair_gradient.unsqueeze(0)]).double()
        columns = columns / columns.norm(dim=1, keepdim=True)
        assert float((min_norm_point(columns @ columns.T) @ columns).norm()) < 1e-4
    torch.testing.assert_close(found.slopes, gradients.double() @ direction, rtol=1e-10, atol=0)


@given(seed=seeds, online=st.integers(1, 8), absent=st.integers(0, 8), fair=st.booleans())
@quick
def test_inner_products_that_are_known_need_not_be_computed(seed: int, online: int, absent: int, fair: bool) -> None:
    gradients, losses, history = problem(seed, online, absent)
    every = torch.cat([gradients, history])
    one = common_descent(gradients, losses, history, fair=fair)
    other = common_descent(gradients, losses, history, products=every @ every.T, fair=fair)
    torch.testing.assert_close(other.raw, one.raw, rtol=0, atol=1e-9 * one.mu)
    assert (other.fair, other.stationary) == (one.fair, one.stationary)
    among = gradients @ gradients.T
    for stale, products in ((None, among), (history, torch.cat([among, gradients @ history.T], 1))):
        found = drift_factors(gradients, one.direction, products=products, history=stale)
        expected = drift_factors(gradients, one.direction, history=stale)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@given(seed=seeds, online=st.integers(1, 8), absent=st.integers(0, 4))
@quick
def test_direction_has_the_norm_of_the_mean_gradient(seed: int, online: int, absent: int) -> None:
    gradients, losses, history = problem(seed, online, absent)
    found = common_descent(gradients, losses, history)
    assert float(found.direction.norm()) == pytest.approx(float(gradients.mean(0).norm()), rel=1e-12)
    torch.testing.assert_close(found.direction, found.raw * found.scale, rtol=1e-12, atol=0)
    assert found.mu == pytest.approx(float(gradients.norm(dim=1).mean()), rel=1e-13)


def test_two_orthogonal_gradients_of_equal_norm_are_halved() -> None:
    found = common_descent(torch.eye(2, dtype=F64) * 2, torch.tensor([1.0, 1.0]))
    torch.testing.assert_close(found.online_weights, torch.tensor([0.5, 0.5], dtype=F64))
    torch.testing.assert_close(found.raw, torch.tensor([-1.0, -1.0], dtype=F64))
    assert found.fair == "zero"  # equal losses: a zero column would force d = 0
    assert found.fair_slope is None


def test_one_client_descends_along_its_own_gradient() -> None:
    gradient = torch.tensor([[0.3, -0.4, 1.2]], dtype=F64)
    found = common_descent(gradient, torch.tensor([0.8]))
    torch.testing.assert_close(found.direction, -gradient[0], rtol=1e-15, atol=0)
    assert found.online_weights.tolist() == [1.0]
    assert found.fair == "zero"
    assert found.scale == pytest.approx(1.0)


@given(seed=seeds, online=st.integers(2, 7), absent=st.integers(0, 5))
@quick
def test_permuting_clients_leaves_the_direction(seed: int, online: int, absent: int) -> None:
    gradients, losses, history = problem(seed, online, absent)
    order = torch.from_numpy(stream(seed, "order").permutation(online))
    one = common_descent(gradients, losses, history)
    other = common_descent(gradients[order], losses[order], history.flip(0))
    torch.testing.assert_close(other.direction, one.direction, rtol=0, atol=1e-10 * float(one.direction.norm()))
    torch.testing.assert_close(other.online_weights, one.online_weights[order], rtol=0, atol=1e-10)


@given(seed=seeds, absent=st.integers(1, 5))
@quick
def test_duplicating_a_column_leaves_the_direction(seed: int, absent: int) -> None:
    gradients, losses, history = problem(seed, 4, absent)
    one = common_descent(gradients, losses, history)
    doubled = common_descent(gradients, losses, torch.cat([history, history[:1], gradients[:1]]))
    torch.testing.assert_close(doubled.raw, one.raw, rtol=0, atol=1e-10 * one.mu)


@given(seed=seeds, scale=st.floats(1e-3, 1e3), at=st.integers(0, 3))
@quick
def test_scaling_a_clients_gradient_changes_d_only_through_mu(seed: int, scale: float, at: int) -> None:
    # Without the fair column (which is made of the raw gradients) the direction does not change at all.
    gradients, losses, history = problem(seed, 4, 3)
    scaled = gradients.clone()
    scaled[at] *= scale
    one, other = (common_descent(g, losses, history, fair=False) for g in (gradients, scaled))
    torch.testing.assert_close(other.raw / other.mu, one.raw / one.mu, rtol=0, atol=1e-10)


def test_stale_gradients_count_whatever_their_length() -> None:
    gradients, losses, history = problem(1, 3, 3)
    one, other = (common_descent(gradients, losses, h) for h in (history, 1e3 * history))
    torch.testing.assert_close(other.direction, one.direction, rtol=1e-9, atol=1e-12)


def test_opposite_gradients_are_pareto_stationary() -> None:
    gradients = torch.tensor([[1.0, 2.0], [-2.0, -4.0]], dtype=F64)
    found = common_descent(gradients, torch.tensor([1.0, 2.0]))
    assert found.stationary
    assert found.direction.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("lift", "stationary"), [(0.0, True), (5e-9, True), (2e-8, False), (1e-3, False)])
def test_directions_shorter_than_1e_8_mu_are_stationary(lift: float, stationary: bool) -> None:
    # d is the middle of two all but opposite gradients of length mu: as long as they are lifted off the origin.
    gradients = torch.tensor([[1.0, lift], [-1.0, lift]], dtype=F64)
    assert common_descent(gradients, torch.ones(2)).stationary is stationary


@given(seed=seeds, online=st.integers(2, 6), lift=st.floats(-9, -5), single=st.booleans(), fair=st.booleans())
@settings(max_examples=200, deadline=None)
def test_near_stationarity_the_direction_descends_for_all_or_is_zero(
    seed: int, online: int, lift: float, single: bool, fair: bool
) -> None:
    draw = stream(seed, "around the origin")
    flat = draw.normal(size=(online, 10))
    flat -= draw.dirichlet(np.ones(online)) @ flat
    lifted = np.concatenate([flat, 10.0**lift * draw.uniform(0.5, 2.0, size=(online, 1))], 1)
    gradients = torch.from_numpy(lifted).to(torch.float32 if single else F64)
    found = common_descent(gradients, torch.from_numpy(draw.uniform(0.5, 2.0, size=online)), fair=fair)
    if found.stationary:
        assert not found.direction.any()
    else:
        assert (gradients.double() @ found.direction.double() < 0).all()


def test_vanishing_gradients_are_left_out() -> None:
    gradients = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1e-8]], dtype=F64)
    history = torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.0, 2.0]], dtype=F64)
    found = common_descent(gradients, torch.tensor([1.0, 1.0, 1.0]), history)
    assert found.online_kept.tolist() == [True, True, False]
    assert found.history_kept.tolist() == [False, True]
    third = torch.full((3,), -1 / 3, dtype=F64)
    torch.testing.assert_close(found.raw, third, rtol=0, atol=1e-14)
    assert found.online_weights[2] == 0
    assert found.history_weights[0] == 0


def test_nothing_but_vanishing_gradients_is_stationary() -> None:
    found = common_descent(torch.zeros(2, 3), torch.tensor([1.0, 2.0]), torch.ones(1, 3))
    assert found.stationary
    assert not found.direction.any()
    assert found.history_weights.tolist() == [0.0]


def test_fair_column_is_dropped_where_it_alone_makes_d_collapse() -> None:
    # g_1 = g_2 = g and L = (1, 2): grad F is a negative multiple of g, and the hull contains 0 although g is not 0.
    gradient = torch.tensor([0.6, -0.8], dtype=F64)
    found = common_descent(gradient.repeat(2, 1), torch.tensor([1.0, 2.0]))
    assert found.fair == "collapsed"
    assert found.fair_weight == 0.0
    assert found.fair_slope is None
    assert not found.stationary
    torch.testing.assert_close(found.direction, -gradient, rtol=1e-12, atol=0)


def test_without_the_fair_column_the_losses_play_no_part() -> None:
    gradients, losses, history = problem(2, 5, 2)
    one, other = (common_descent(gradients, values, history, fair=False) for values in (losses, losses.flip(0)))
    assert torch.equal(one.direction, other.direction)
    assert one.fair == "off"
    assert one.fair_slope is None
    assert not torch.allclose(common_descent(gradients, losses, history).direction, one.direction)


def test_without_history_is_an_empty_history() -> None:
    gradients, losses, history = problem(3, 5, 2)
    one, other = (common_descent(gradients, losses, h) for h in (None, history[:0]))
    assert torch.equal(one.direction, other.direction)
    assert one.history_weights.shape == (0,)


def test_mean_direction_is_the_plain_mean() -> None:
    gradients, losses, history = problem(4, 5, 2)
    found = common_descent(gradients, losses, history, mean_direction=True)
    torch.testing.assert_close(found.direction, -gradients.mean(0), rtol=1e-14, atol=1e-16)
    assert torch.equal(found.direction, found.raw)
    assert found.scale == 1.0
    torch.testing.assert_close(found.online_weights, torch.full((5,), 0.2, dtype=F64))
    assert found.history_weights.tolist() == [0.0, 0.0]
    assert found.fair == "off"


def test_wide_rows_are_treated_in_blocks() -> None:
    draw = stream(6, "wide")
    gradients = torch.from_numpy(draw.normal(size=(3, 1_600_000))).float()  # 4.8 million entries: more than one block
    found = common_descent(gradients, torch.tensor([1.0, 2.0, 3.0]), gradients[:1] + gradients[1:2])
    assert (gradients.double() @ found.direction.double() < 0).all()
    assert float(found.direction.double().norm()) == pytest.approx(float(gradients.double().mean(0).norm()), rel=1e-6)


def test_gradients_and_losses_that_do_not_fit_are_refused() -> None:
    with pytest.raises(AlgorithmError, match="3 gradients but 2 losses"):
        common_descent(torch.ones(3, 4), torch.ones(2))
    with pytest.raises(AlgorithmError, match="not finite"):
        common_descent(torch.tensor([[1.0, float("inf")], [1.0, 0.0]]), torch.ones(2))


def test_inputs_are_left_as_they_are() -> None:
    inputs = problem(7, 4, 3)
    before = [x.clone() for x in inputs]
    common_descent(*inputs)
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))
