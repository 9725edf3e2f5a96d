"""The invariants of FedAMP's and HeurFedAMP's weights."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.algorithms.server_math.attention import fedamp_weights, heurfedamp_weights, median_squared_distance
from coterie.errors import ConfigError
from coterie.randomness import stream

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 9)
quick = settings(max_examples=40, deadline=None)


def random_models(seed: int, clients: int, parameters: int = 7, common: float = 0.0) -> Tensor:
    draw = stream(seed, "test models")
    rows = draw.normal(size=(clients, parameters)) + common * draw.normal(size=parameters)
    return torch.from_numpy(rows)


ROOT = math.sqrt(0.5)
COMPASS = torch.tensor([[1.0, 0.0], [2.0, 2.0], [0.0, 3.0], [-1.0, 0.0]], dtype=torch.float64)
"""Four models at 0, 45, 90 and 180 degrees."""


@given(seed=seeds, clients=sizes, kappa=st.floats(0, 1), sigma=st.floats(0.1, 100), guard=st.booleans())
@quick
def test_fedamp_rows_sum_to_one(seed: int, clients: int, kappa: float, sigma: float, guard: bool) -> None:
    xi, _ = fedamp_weights(random_models(seed, clients), kappa, sigma, guard=guard)
    assert xi.dtype == torch.float64
    torch.testing.assert_close(xi.sum(1), torch.ones(clients, dtype=torch.float64), rtol=0, atol=1e-13)


@given(seed=seeds, clients=sizes, kappa=st.floats(0, 2), sigma=st.floats(0.1, 100))
@quick
def test_fedamp_is_symmetric_off_the_diagonal_without_the_guard(
    seed: int, clients: int, kappa: float, sigma: float
) -> None:
    xi, guarded = fedamp_weights(random_models(seed, clients), kappa, sigma, guard=False)
    assert torch.equal(xi, xi.T)
    assert guarded == 0


@given(seed=seeds, clients=st.integers(2, 9), kappa=st.floats(0, 2), sigma=st.floats(0.1, 100))
@quick
def test_fedamp_is_not_negative_iff_the_attention_sums_to_at_most_one(
    seed: int, clients: int, kappa: float, sigma: float
) -> None:
    models = random_models(seed, clients)
    distance = torch.cdist(models, models).square()
    attention = (kappa * torch.exp(-distance / sigma)).fill_diagonal_(0).sum(1)
    xi, _ = fedamp_weights(models, kappa, sigma, guard=False)
    clear = (attention - 1).abs() > 1e-9
    assert torch.equal((xi >= 0).all(1)[clear], (attention <= 1)[clear])


@pytest.mark.parametrize("clients", [2, 3, 7])
def test_fedamp_identical_models_attend_with_alpha_over_sigma(clients: int) -> None:
    models = torch.full((clients, 5), 0.1)
    xi, _ = fedamp_weights(models, 0.05, 3.0, guard=False)
    off = ~torch.eye(clients, dtype=torch.bool)
    torch.testing.assert_close(xi[off], torch.full_like(xi[off], 0.05), rtol=1e-12, atol=0)
    torch.testing.assert_close(xi.diagonal(), torch.full_like(xi.diagonal(), 1 - 0.05 * (clients - 1)))


def test_fedamp_far_models_or_no_attention_is_local() -> None:
    models = random_models(1, 5)
    identity = torch.eye(5, dtype=torch.float64)
    assert torch.equal(fedamp_weights(1e6 * models, 0.2, 1.0)[0], identity)
    assert torch.equal(fedamp_weights(models, 0.0, 1.0)[0], identity)


@given(seed=seeds, clients=st.integers(2, 6), kappa=st.floats(0.01, 1), sigma=st.floats(0.5, 50))
@quick
def test_fedamp_is_half_a_gradient_step_on_the_attention_penalty(
    seed: int, clients: int, kappa: float, sigma: float
) -> None:
    # U = W - (alpha/2) grad A(W), with A(W) the sum over pairs of 1 - exp(-|w_i - w_j|^2 / sigma).
    models = random_models(seed, clients).requires_grad_()
    i, j = torch.triu_indices(clients, clients, 1)
    penalty = (1 - torch.exp(-(models[i] - models[j]).square().sum(1) / sigma)).sum()
    (gradient,) = torch.autograd.grad(penalty, models)
    models = models.detach()
    xi, _ = fedamp_weights(models, kappa, sigma, guard=False)
    expected = models - kappa * sigma / 2 * gradient
    torch.testing.assert_close(xi @ models, expected, rtol=1e-10, atol=1e-11)


def test_fedamp_with_exact_local_solutions_descends_the_penalised_objective() -> None:
    # With F_i = b/2 |w - c_i|^2 the local solution is (b c + prox u)/(b + prox). One round is a proximal gradient step
    # on sum F_i + (lambda/2) A(W) (half of A: the printed update drops a factor 2), so that objective cannot rise
    # while alpha/lambda times the penalty's curvature (at most 2 clients/sigma) is at most 1.
    clients, b, sigma, kappa = 5, 1.3, 4.0, 0.02
    centres = random_models(2, clients)
    strength = kappa * sigma  # lambda = alpha, hence prox = 1
    models = random_models(4, clients)

    def objective(rows: Tensor) -> float:
        pairs = torch.pdist(rows).square()
        return float(b / 2 * (rows - centres).square().sum() + strength / 2 * (1 - torch.exp(-pairs / sigma)).sum())

    values = [objective(models)]
    for _ in range(20):
        xi, guarded = fedamp_weights(models, kappa, sigma)
        assert guarded == 0
        models = (b * centres + xi @ models) / (b + 1.0)
        values.append(objective(models))
    assert all(after <= before + 1e-13 for before, after in pairwise(values))
    assert values[1] < values[0] - 0.1


@given(seed=seeds, clients=st.integers(2, 8), kappa=st.floats(0, 3), xi_min=st.sampled_from([0.0, 0.1, 0.5]))
@quick
def test_fedamp_guard_rescales_only_the_rows_that_exceed(seed: int, clients: int, kappa: float, xi_min: float) -> None:
    models = random_models(seed, clients)
    free, _ = fedamp_weights(models, kappa, 20.0, guard=False)
    xi, guarded = fedamp_weights(models, kappa, 20.0, guard=True, xi_min=xi_min)
    attention = free.clone().fill_diagonal_(0).sum(1)
    over = attention > 1 - xi_min
    assert guarded == int(over.sum())
    torch.testing.assert_close(xi[~over], free[~over], rtol=0, atol=0)
    assert (xi >= 0).all()
    assert torch.equal(xi.diagonal()[over], torch.full((guarded,), xi_min, dtype=torch.float64))
    torch.testing.assert_close(xi.sum(1), torch.ones(clients, dtype=torch.float64), rtol=0, atol=1e-13)
    off = ~torch.eye(clients, dtype=torch.bool)
    ratio = (1 - xi_min) / attention[over]
    torch.testing.assert_close((xi * off)[over], (free * off)[over] * ratio.unsqueeze(1), rtol=1e-12, atol=1e-300)


@pytest.mark.parametrize("method", ["fedamp", "heurfedamp"])
def test_rows_gives_those_clients_rows_over_all_stored_models(method: str) -> None:
    models = random_models(8, 7, common=1.0)
    clients = torch.tensor([5, 0, 2])
    own = torch.linspace(0.1, 0.7, 7, dtype=torch.float64)
    if method == "fedamp":
        whole, _ = fedamp_weights(models, 0.4, 5.0)
        some, guarded = fedamp_weights(models, 0.4, 5.0, rows=clients)
        attention = 0.4 * torch.exp(-torch.cdist(models, models).square() / 5.0).fill_diagonal_(0)
        assert guarded == int(((attention.sum(1) - 0.4 * 0 > 1)[clients]).sum())
    else:
        whole = heurfedamp_weights(models, 30.0, own)
        some = heurfedamp_weights(models, 30.0, own, rows=clients)
    assert some.shape == (3, 7)
    torch.testing.assert_close(some, whole[clients], rtol=1e-12, atol=1e-15)


@given(seed=seeds, clients=st.integers(2, 9))
@quick
def test_median_squared_distance_is_the_median_over_pairs(seed: int, clients: int) -> None:
    models = random_models(seed, clients)
    expected = np.median(torch.pdist(models).square().numpy())
    torch.testing.assert_close(
        median_squared_distance(models), torch.tensor(expected, dtype=torch.float64), rtol=1e-11, atol=0
    )


def test_median_squared_distance_skips_coinciding_models_and_is_one_where_all_coincide() -> None:
    row = torch.full((1, 6), 0.1)
    assert median_squared_distance(row).item() == 1.0
    assert median_squared_distance(row.repeat(7, 1)).item() == 1.0
    # Eight of ten clients have not trained yet: 28 of 45 pairs coincide, and 16 of the other 17 lie 24 apart.
    models = torch.cat([row.repeat(8, 1), row + 2.0, row - 2.0])
    assert median_squared_distance(models).item() == pytest.approx(24.0, rel=1e-5)


def test_fedamp_and_median_accept_distances_already_known() -> None:
    models = random_models(4, 6)
    distances = torch.cdist(models, models).square()
    sigma = median_squared_distance(models, distances=distances)
    torch.testing.assert_close(sigma, median_squared_distance(models))
    known, _ = fedamp_weights(models, 0.3, sigma, distances=distances)
    torch.testing.assert_close(known, fedamp_weights(models, 0.3, sigma)[0], rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"alpha_over_sigma": -0.1, "sigma": 1.0}, "alpha_over_sigma must be"),
        ({"alpha_over_sigma": 0.1, "sigma": 0.0}, "sigma must be"),
        ({"alpha_over_sigma": 0.1, "sigma": 1.0, "xi_min": 1.5}, "xi_min must lie in"),
    ],
)
def test_fedamp_refuses_values_out_of_range(arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        fedamp_weights(COMPASS, **arguments)


@given(seed=seeds, clients=st.integers(2, 9), sigma=st.floats(0, 1e3), own=st.floats(0, 1))
@quick
def test_heurfedamp_rows_sum_to_one_with_the_given_diagonal(seed: int, clients: int, sigma: float, own: float) -> None:
    xi = heurfedamp_weights(random_models(seed, clients), sigma, own)
    assert (xi >= 0).all()
    assert torch.equal(xi.diagonal(), torch.full((clients,), own, dtype=torch.float64))
    torch.testing.assert_close(xi.sum(1), torch.ones(clients, dtype=torch.float64), rtol=0, atol=1e-13)


def test_heurfedamp_is_a_softmax_of_cosines() -> None:
    sigma, own = 2.0, torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    xi = heurfedamp_weights(COMPASS, sigma, own)
    e = [math.exp(sigma * ROOT), 1.0, math.exp(-sigma)]  # client 0 towards clients 1, 2 and 3
    expected = torch.tensor([0.1, *(0.9 * value / sum(e) for value in e)], dtype=torch.float64)
    torch.testing.assert_close(xi[0], expected, rtol=1e-13, atol=0)
    assert torch.equal(xi.diagonal(), own)


def test_heurfedamp_sigma_zero_is_uniform() -> None:
    xi = heurfedamp_weights(random_models(1, 5), 0.0, 0.2)
    off = ~torch.eye(5, dtype=torch.bool)
    torch.testing.assert_close(xi[off], torch.full((20,), 0.2, dtype=torch.float64), rtol=1e-15, atol=0)


def test_heurfedamp_large_sigma_attends_to_the_most_similar_alone() -> None:
    xi = heurfedamp_weights(COMPASS, 1e6, 0.25)
    expected = torch.tensor(
        [[0.25, 0.75, 0, 0], [0.375, 0.25, 0.375, 0], [0, 0.75, 0.25, 0], [0, 0, 0.75, 0.25]], dtype=torch.float64
    )  # 0 and 2 are equally similar to 1: they share
    torch.testing.assert_close(xi, expected, rtol=0, atol=1e-9)


@given(seed=seeds, scale=st.floats(1e-3, 1e3), at=st.integers(0, 4))
@quick
def test_heurfedamp_is_invariant_to_rescaling_one_model(seed: int, scale: float, at: int) -> None:
    models = random_models(seed, 5)
    scaled = models.clone()
    scaled[at] *= scale
    torch.testing.assert_close(
        heurfedamp_weights(scaled, 100.0, 0.1), heurfedamp_weights(models, 100.0, 0.1), rtol=1e-10, atol=1e-14
    )


def test_heurfedamp_self_weight_one_is_local_and_one_client_has_weight_one() -> None:
    assert torch.equal(heurfedamp_weights(random_models(1, 4), 10.0, 1.0), torch.eye(4, dtype=torch.float64))
    assert heurfedamp_weights(random_models(1, 1), 10.0, 0.1).tolist() == [[1.0]]


def test_heurfedamp_refuses_values_out_of_range() -> None:
    with pytest.raises(ConfigError, match="self_weight must lie in"):
        heurfedamp_weights(COMPASS, 1.0, 1.2)
    with pytest.raises(ConfigError, match="self_weight must be one number or one a client"):
        heurfedamp_weights(COMPASS, 1.0, torch.tensor([0.1, 0.2]))
    with pytest.raises(ConfigError, match="sigma must be"):
        heurfedamp_weights(COMPASS, -1.0, 0.1)


def test_inputs_are_left_as_they_are() -> None:
    models = random_models(9, 5)
    before = models.clone()
    fedamp_weights(models, 2.0, 5.0)
    fedamp_weights(models, 2.0, 5.0, rows=torch.tensor([1]))
    heurfedamp_weights(models, 5.0, 0.1)
    median_squared_distance(models)
    assert torch.equal(models, before)
