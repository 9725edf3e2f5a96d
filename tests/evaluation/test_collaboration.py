"""Collaboration weights: contrast and recovery of groups."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.evaluation.collaboration import block_contrast, recover_groups, recovery


def blocks(groups: np.ndarray, inside: float, across: float) -> np.ndarray:
    return np.where(groups[:, None] == groups[None, :], inside, across).astype(float)


def test_contrast_by_hand():
    weights = [[9.0, 4.0, 1.0], [2.0, 9.0, 3.0], [0.0, 2.0, 9.0]]
    # groups 0 0 1: within (4 + 2) / 2 = 3, between (1 + 3 + 0 + 2) / 4 = 1.5; the diagonal does not count
    assert block_contrast(weights, [0, 0, 1]) == pytest.approx(2.0, rel=1e-14)


def test_contrast_at_its_ends():
    groups = np.array([0, 0, 1, 1])
    assert block_contrast(blocks(groups, 0.25, 0.25), groups) == 1.0
    assert block_contrast(blocks(groups, 0.5, 0.0), groups) == math.inf
    assert math.isnan(block_contrast(np.eye(4), groups))
    assert math.isnan(block_contrast(np.ones((3, 3)), [0, 1, 2]))
    assert math.isnan(block_contrast(np.ones((3, 3)), [0, 0, 0]))


def test_contrast_takes_names_of_groups():
    weights = blocks(np.array([0, 0, 1, 1]), 0.4, 0.1)
    assert block_contrast(weights, ["digits", "digits", "upper", "upper"]) == pytest.approx(4.0, rel=1e-14)


@given(st.integers(0, 100), st.lists(st.integers(2, 7), min_size=2, max_size=4))
@settings(max_examples=30, deadline=None)
def test_noisy_row_normalised_blocks_are_recovered(seed, sizes):
    generator = np.random.default_rng(seed)
    groups = generator.permutation(np.repeat(np.arange(len(sizes)), sizes))
    weights = blocks(groups, 1.0, 0.2) * generator.uniform(0.8, 1.2, (len(groups),) * 2)
    np.fill_diagonal(weights, generator.uniform(0, 50, len(groups)))  # a self weight says nothing
    off = weights * (1 - np.eye(len(groups)))
    weights = weights / off.sum(1, keepdims=True).max()  # one scale for all: FedAMP's weights are not row-normalised
    assert recovery(weights, groups) == 1.0


def test_asymmetric_weights_count_in_both_directions():
    # 0 and 1 weigh only from one side, 2 and 3 from the other; the means of both directions show the pairs.
    weights = np.full((4, 4), 0.1)
    weights[0, 1], weights[3, 2] = 0.9, 0.9
    assert recover_groups(weights, 2).tolist() == [0, 0, 1, 1]


def test_emnist_like_groups():
    groups = np.repeat([0, 1, 2], [10, 26, 26])
    generator = np.random.default_rng(1)
    weights = blocks(groups, 0.03, 0.01) * generator.uniform(0.7, 1.3, (62, 62))
    assert block_contrast(weights, groups) == pytest.approx(3.0, rel=0.05)
    assert recover_groups(weights, 3).tolist() == groups.tolist()


def test_no_structure_is_not_recovered():
    groups = np.repeat([0, 1], 15)
    weights = np.random.default_rng(2).random((30, 30))
    assert recovery(weights, groups) < 0.3


def test_exactly_as_many_groups_as_asked_even_with_ties():
    for count in range(1, 6):
        found = recover_groups(np.full((5, 5), 0.2), count)
        assert sorted(set(found.tolist())) == list(range(count))
        assert found[0] == 0
    assert recover_groups([[1.0]], 1).tolist() == [0]


def test_refusals():
    with pytest.raises(ConfigError, match="3 clients cannot be cut into 4 groups"):
        recover_groups(np.ones((3, 3)), 4)
    with pytest.raises(ConfigError, match="finite square matrix"):
        block_contrast(np.ones((3, 2)), [0, 0, 1])
    with pytest.raises(ConfigError, match="finite square matrix"):
        recover_groups([[1.0, math.nan], [0.0, 1.0]], 2)
    with pytest.raises(ConfigError, match="one group each"):
        block_contrast(np.ones((3, 3)), [0, 1])
