"""The invariants of FedACS's weights."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.algorithms.server_math.attention import fedacs_weights, quantile, select_by_quantile
from coterie.errors import ConfigError
from coterie.randomness import stream
from coterie.rows import cosines

seeds = st.integers(0, 2**32 - 1)
sizes = st.integers(1, 9)
quick = settings(max_examples=40, deadline=None)


def random_models(seed: int, clients: int, parameters: int = 7, common: float = 0.0) -> Tensor:
    draw = stream(seed, "test models")
    rows = draw.normal(size=(clients, parameters)) + common * draw.normal(size=parameters)
    return torch.from_numpy(rows)


@given(seed=seeds, count=st.integers(1, 60), level=st.floats(0.0, 1.0))
@quick
def test_quantile_is_numpys_linear_one(seed: int, count: int, level: float) -> None:
    values = stream(seed, "values").normal(size=count).round(1)  # rounded: with ties
    assert quantile(torch.from_numpy(values), level).item() == np.quantile(values, level, method="linear")


def test_quantile_has_no_limit_on_the_number_of_entries() -> None:
    count = 2**24 + 3
    values = torch.arange(count, dtype=torch.float64).flip(0)
    with pytest.raises(RuntimeError, match="too large"):
        torch.quantile(values, 0.25)
    assert quantile(values, 0.25).item() == 0.25 * (count - 1)


ROOT = math.sqrt(0.5)
COMPASS = torch.tensor([[1.0, 0.0], [2.0, 2.0], [0.0, 3.0], [-1.0, 0.0]], dtype=torch.float64)
"""Four models at 0, 45, 90 and 180 degrees.

Their 16 cosines, sorted: -1 twice, -r twice, 0 four times, r four times, 1 four times, with r = sqrt(1/2).
"""


@pytest.mark.parametrize(
    ("p", "offdiag", "neighbours"),
    [
        (0.5, False, {(0, 1), (1, 2)}),  # position 7.5: halfway between 0 and r
        (0.5, True, {(0, 1), (1, 2)}),  # position 5.5 of the 12 off-diagonal ones: 0, and strictly above it is r
        (0.75, False, set()),  # position 11.25: above r
        (0.75, True, set()),  # position 8.25: exactly r, and strictly above it is nobody
        (0.0, False, {(0, 1), (1, 2)}),  # every positive cosine; 0 and 2 are orthogonal
    ],
)
def test_fedacs_selects_strictly_above_the_quantile(p: float, offdiag: bool, neighbours: set[tuple[int, int]]) -> None:
    expected = torch.eye(4, dtype=torch.bool)
    for i, j in neighbours:
        expected[i, j] = expected[j, i] = True
    assert torch.equal(select_by_quantile(cosines(COMPASS), p, offdiag), expected)
    weights = fedacs_weights(COMPASS, p, offdiag=offdiag)
    similarity = torch.eye(4, dtype=torch.float64)
    for i, j in neighbours:
        similarity[i, j] = similarity[j, i] = ROOT
    torch.testing.assert_close(weights, similarity / similarity.sum(1, keepdim=True), rtol=1e-14, atol=1e-15)


@given(seed=seeds, clients=sizes, p=st.floats(-0.5, 1.0), offdiag=st.booleans(), common=st.floats(0, 3))
@quick
def test_fedacs_rows_sum_to_one_are_not_negative_and_include_self(
    seed: int, clients: int, p: float, offdiag: bool, common: float
) -> None:
    weights = fedacs_weights(random_models(seed, clients, common=common), p, offdiag=offdiag)
    assert weights.dtype == torch.float64
    torch.testing.assert_close(weights.sum(1), torch.ones(clients, dtype=torch.float64), rtol=0, atol=1e-14)
    assert (weights >= 0).all()
    assert (weights.diagonal() > 0).all()


@given(seed=seeds, clients=st.integers(2, 9))
@quick
def test_fedacs_p_zero_with_positive_cosines_weighs_everyone_by_cosine(seed: int, clients: int) -> None:
    models = random_models(seed, clients).abs()
    unit = models / models.norm(dim=1, keepdim=True)
    similarity = unit @ unit.T
    expected = similarity / similarity.sum(1, keepdim=True)
    torch.testing.assert_close(fedacs_weights(models, 0.0), expected, rtol=1e-13, atol=0)
    torch.testing.assert_close(fedacs_weights(models, -1.0), expected, rtol=1e-13, atol=0)


@given(seed=seeds, clients=sizes, offdiag=st.booleans())
@quick
def test_fedacs_p_towards_one_is_local_exactly(seed: int, clients: int, offdiag: bool) -> None:
    weights = fedacs_weights(
        random_models(seed, clients, common=2.0), 1.0 - 1e-9 if not offdiag else 1.0, offdiag=offdiag
    )
    assert torch.equal(weights, torch.eye(clients, dtype=torch.float64))


def test_fedacs_keeps_self_where_the_quantile_is_one() -> None:
    # Ten clients and p = 0.95: the threshold is 1 itself, and a strict ">" alone would leave empty rows.
    weights = fedacs_weights(random_models(3, 10, common=1.0), 0.95)
    assert torch.equal(weights, torch.eye(10, dtype=torch.float64))


@given(seed=seeds, clients=sizes, p=st.floats(0.0, 1.0))
@quick
def test_fedacs_equal_models_are_left_as_they_are(seed: int, clients: int, p: float) -> None:
    models = random_models(seed, 1).repeat(clients, 1)
    torch.testing.assert_close(fedacs_weights(models, p) @ models, models, rtol=1e-13, atol=1e-14)


@given(seed=seeds, clients=sizes, levels=st.tuples(st.floats(0, 1), st.floats(0, 1)), offdiag=st.booleans())
@quick
def test_fedacs_raising_p_never_enlarges_a_rows_support(
    seed: int, clients: int, levels: tuple[float, float], offdiag: bool
) -> None:
    similarity = cosines(random_models(seed, clients, common=0.7))
    loose = select_by_quantile(similarity, min(levels), offdiag)
    tight = select_by_quantile(similarity, max(levels), offdiag)
    assert (loose | ~tight).all()


@given(seed=seeds, clients=st.integers(2, 9), p=st.floats(0, 1), scale=st.floats(1e-3, 1e3), at=st.integers(0, 8))
@quick
def test_fedacs_is_invariant_to_rescaling_one_model(seed: int, clients: int, p: float, scale: float, at: int) -> None:
    models = random_models(seed, clients, common=0.5)
    scaled = models.clone()
    scaled[at % clients] *= scale
    torch.testing.assert_close(fedacs_weights(scaled, p), fedacs_weights(models, p), rtol=1e-11, atol=1e-13)


@given(seed=seeds, clients=st.integers(2, 9), p=st.floats(0, 1))
@quick
def test_fedacs_permuting_clients_permutes_the_weights(seed: int, clients: int, p: float) -> None:
    models = random_models(seed, clients, common=0.5)
    order = torch.from_numpy(stream(seed, "order").permutation(clients))
    expected = fedacs_weights(models, p)[order][:, order]
    torch.testing.assert_close(fedacs_weights(models[order], p), expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("degrees", [[0, 30, 60, 80], [0, 50, 100, 150]])  # complete, and a chain: both connected
def test_fedacs_with_no_learning_contracts_to_consensus_on_a_connected_graph(degrees: list[float]) -> None:
    angle = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    models = torch.stack([angle.cos(), angle.sin()], 1) * torch.tensor([[1.0], [2.0], [0.5], [3.0]])
    diameter = [float(torch.pdist(models).max())]
    for _ in range(60):
        models = fedacs_weights(models, 0.0) @ models
        diameter.append(float(torch.pdist(models).max()))
    # A convex combination never leaves the hull, and where all weights are positive the hull shrinks.
    assert all(after <= before + 1e-14 for before, after in pairwise(diameter))
    assert diameter[-1] < 1e-12


def test_fedacs_one_participant_is_local() -> None:
    for offdiag in (False, True):
        assert torch.equal(fedacs_weights(random_models(0, 1), 0.5, offdiag=offdiag), torch.ones(1, 1).double())


def test_fedacs_zero_model_is_alone() -> None:
    models = torch.stack([torch.zeros(3), torch.ones(3), torch.ones(3) + 0.1])
    weights = fedacs_weights(models, 0.0)
    assert weights[0].tolist() == [1.0, 0.0, 0.0]
    assert weights[:, 0].tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("p", [1.5, math.nan])
def test_fedacs_refuses_a_level_that_is_no_quantile(p: float) -> None:
    with pytest.raises(ConfigError, match="p must be at most 1"):
        fedacs_weights(COMPASS, p)


def test_fedacs_leaves_its_inputs_as_they_are() -> None:
    models = random_models(9, 5)
    before, similarity = models.clone(), cosines(models)
    kept = similarity.clone()
    fedacs_weights(models, 0.5)
    select_by_quantile(similarity, 0.5, True)
    assert torch.equal(models, before)
    assert torch.equal(similarity, kept)
