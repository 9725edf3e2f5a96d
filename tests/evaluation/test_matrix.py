"""Measures of the accuracy matrix."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.evaluation import accuracy_matrix as m


def random_matrix(clients: int, seed: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).random((clients, clients))).to(dtype)


@given(st.integers(1, 40), st.integers(0, 5), st.sampled_from([torch.float32, torch.float64]), st.booleans())
@settings(max_examples=40, deadline=None)
def test_ends_of_s_acc_are_l_acc_and_g_acc_exactly(clients, seed, dtype, transposed):
    matrix = random_matrix(clients, seed, dtype)
    matrix = matrix.T if transposed else matrix
    assert torch.equal(m.s_acc(matrix, 0.0, seed), m.l_acc(matrix))
    assert torch.equal(m.s_acc(matrix, 1.0, seed), m.g_acc(matrix))
    assert torch.equal(m.l_acc(matrix), matrix.diagonal().double())
    np.testing.assert_allclose(m.g_acc(matrix).numpy(), matrix.double().numpy().mean(1), rtol=1e-13)


def test_by_hand():
    matrix = torch.tensor([[1.0, 0.5, 0.0], [0.2, 0.8, 0.6], [0.0, 0.0, 0.9]], dtype=torch.float64)
    assert m.l_acc(matrix).tolist() == [1.0, 0.8, 0.9]
    assert m.g_acc(matrix).tolist() == pytest.approx([0.5, 1.6 / 3, 0.3], rel=1e-14)
    # c = 1/2 of two others is one other: the mean of the diagonal and one more entry of the row.
    for row, value in enumerate(m.s_acc(matrix, 0.5, seed=4).tolist()):
        others = [(matrix[row, row] + matrix[row, k]) / 2 for k in range(3) if k != row]
        assert any(value == pytest.approx(float(other), rel=1e-14) for other in others)


@given(st.integers(2, 25), st.floats(0, 1), st.floats(0, 1), st.integers(0, 3))
@settings(max_examples=40, deadline=None)
def test_the_clients_of_s_acc_has_the_right_size_and_grows_with_c(clients, one, other, seed):
    small, large = (m.s_acc_clients(clients, c, seed) for c in sorted((one, other)))
    assert bool(small.diagonal().all())
    assert small.sum(1).tolist() == [1 + round(min(one, other) * (clients - 1))] * clients
    assert not bool((small & ~large).any())
    assert torch.equal(small, m.s_acc_clients(clients, min(one, other), seed))


def test_the_clients_of_s_acc_is_drawn_for_each_client_and_seed():
    drawn = m.s_acc_clients(40, 0.5, 1)
    assert not torch.equal(drawn, m.s_acc_clients(40, 0.5, 2))
    # A column's count is binomial about 19.5 + 1 with std 3.1: every client is drawn for some, none for all.
    assert bool((drawn.sum(0) > 3).all())
    assert bool((drawn.sum(0) < 40).all())


def test_clients_that_are_not_drawn_do_not_count():
    matrix = random_matrix(6, 0)
    matrix[:, 2] = math.nan
    kept = ~m.s_acc_clients(6, 0.4, 0)[:, 2]
    assert torch.equal(m.s_acc(matrix, 0.4, 0).isnan(), ~kept)


def test_read_gives_table_values():
    matrix = random_matrix(5, 3)
    readings = m.summarise_matrix(
        matrix, seed=1, fractions=(0.0, 0.5, 1.0), global_accuracy=torch.tensor([0.5, 1, 1, 1, 1])
    )
    assert readings.synthetic[0.0].mean == readings.local.mean
    assert readings.synthetic[1.0].mean == readings.everyone.mean
    assert readings.global_model is not None
    assert readings.global_model.mean == pytest.approx(0.9, rel=1e-14)
    assert readings.global_model.std == pytest.approx(math.sqrt((0.4**2 + 4 * 0.1**2) / 5), rel=1e-12)
    assert m.summarise_matrix(matrix, seed=1).global_model is None


def test_refusals():
    with pytest.raises(ConfigError, match="a row and a column"):
        m.s_acc(torch.zeros(2, 3), 0.5, 0)
    with pytest.raises(ConfigError, match=r"between 0 and 1, not 1\.5"):
        m.s_acc(torch.zeros(2, 2), 1.5, 0)
