"""Fairness, by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.evaluation.fairness import fairness, variance, worst_decile


def test_by_hand():
    scores, losses = torch.tensor([0.5, 0.9, 0.7]), torch.tensor([1.0, 2.0, 6.0])
    found = fairness(scores.double(), losses)
    # losses: mean 3, squares 4 + 1 + 9 = 14
    assert found.loss_variance == pytest.approx(14 / 3, rel=1e-14)
    assert found.loss_variance_sample == pytest.approx(7.0, rel=1e-14)
    # scores: mean 0.7, squares 0.04 + 0.04
    assert found.mean == pytest.approx(0.7, rel=1e-7)
    assert found.std == pytest.approx(math.sqrt(0.08 / 3), rel=1e-6)
    assert found.worst_client == found.worst_decile == pytest.approx(0.5)
    assert found.clients == 3


def test_benign_clients_alone():
    scores, losses = torch.tensor([0.5, 0.1, 0.7]).double(), torch.tensor([1.0, 900.0, 3.0])
    found = fairness(scores, losses, benign=torch.tensor([True, False, True]))
    assert (found.clients, found.worst_client, found.loss_variance) == (2, 0.5, 1.0)
    assert found.loss_variance_sample == 2.0
    assert found == fairness(scores[[0, 2]], losses[[0, 2]])


def test_undefined_scores_are_left_out_and_counted():
    found = fairness(torch.tensor([0.5, math.nan]), torch.tensor([1.0, 7.0]))
    assert (found.clients, found.mean, found.loss_variance) == (1, 0.5, 0.0)
    assert math.isnan(found.loss_variance_sample)


def test_a_lost_loss_is_not_hidden():
    assert math.isnan(fairness(torch.tensor([0.5, 0.6]), torch.tensor([1.0, math.nan])).loss_variance)


def test_nobody():
    found = fairness(torch.tensor([0.5]), torch.tensor([1.0]), benign=torch.tensor([False]))
    assert found.clients == 0
    for value in (found.mean, found.std, found.worst_decile, found.worst_client, found.loss_variance):
        assert math.isnan(value)


@pytest.mark.parametrize(("clients", "count"), [(1, 1), (9, 1), (10, 1), (19, 1), (20, 2), (29, 2), (30, 3), (100, 10)])
def test_worst_decile_counts_clients(clients, count):
    scores = torch.arange(clients).double().flip(0)
    assert worst_decile(scores) == (count - 1) / 2
    assert worst_decile(scores, higher_is_better=False) == clients - 1 - (count - 1) / 2


def test_lower_is_better():
    found = fairness(torch.tensor([1.0, 5.0]), torch.zeros(2), higher_is_better=False)
    assert found.worst_client == found.worst_decile == 5.0


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=30))
def test_variance_is_numpys(values):
    for ddof in (0, 1):
        found = variance(torch.tensor(values, dtype=torch.float64), ddof)
        assert found == pytest.approx(np.var(values, ddof=ddof), rel=1e-9, abs=1e-12)


def test_variance_of_large_equal_losses_is_zero_in_float32():
    # The difference of squares would lose this: the mean of squares of 4096.5 needs 26 bits.
    assert variance(torch.full((7,), 4096.5)) == 0.0


def test_shapes_are_checked():
    with pytest.raises(ConfigError, match="one score, loss and mark"):
        fairness(torch.zeros(3), torch.zeros(2))
    with pytest.raises(ConfigError, match="one score, loss and mark"):
        fairness(torch.zeros(2, 2), torch.zeros(2, 2))
