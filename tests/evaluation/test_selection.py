"""HybridChoice models and best rounds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from coterie.errors import ConfigError
from coterie.evaluation.selection import best_round, hybrid_oracle, hybrid_validation

scores = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=1, max_size=20)


@given(scores)
def test_oracle_is_at_least_both(pairs):
    personal, global_ = (torch.tensor(values, dtype=torch.float64) for values in zip(*pairs, strict=True))
    found = hybrid_oracle(personal, global_)
    assert found.accuracy.tolist() == [max(pair) for pair in pairs]
    assert found.personal.tolist() == [p >= g for p, g in pairs]
    assert found.mean >= max(float(personal.mean()), float(global_.mean())) - 1e-12


def validated(personal_acc: float, global_acc: float, personal_loss: float, global_loss: float) -> bool:
    found = hybrid_validation(
        torch.tensor([0.3]),
        torch.tensor([0.6]),
        personal_validation=torch.tensor([personal_acc]),
        global_validation=torch.tensor([global_acc]),
        personal_loss=torch.tensor([personal_loss]),
        global_loss=torch.tensor([global_loss]),
    )
    chosen = bool(found.personal[0])
    assert float(found.accuracy[0]) == pytest.approx(0.3 if chosen else 0.6)
    return chosen


@pytest.mark.parametrize(
    ("case", "personal"),
    [
        ((0.9, 0.8, 2.0, 1.0), True),  # accuracy decides, whatever the loss and the test data say
        ((0.8, 0.9, 1.0, 2.0), False),
        ((0.8, 0.8, 1.0, 2.0), True),  # equal: the lower loss
        ((0.8, 0.8, 2.0, 1.0), False),
        ((0.8, 0.8, 1.0, 1.0), True),  # equal again: personal
        ((math.nan, math.nan, math.nan, math.nan), True),  # no validation data: personal
        ((0.8, 0.8, math.nan, 1.0), True),
    ],
)
def test_validation_decides(case, personal):
    assert validated(*case) is personal


@given(scores, st.integers(0, 3))
def test_validation_never_beats_the_oracle(pairs, shift):
    personal, global_ = (torch.tensor(values, dtype=torch.float64) for values in zip(*pairs, strict=True))
    rolled = {
        "personal_validation": personal.roll(shift),
        "global_validation": global_.roll(1),
        "personal_loss": 1 - personal,
        "global_loss": 1 - global_,
    }
    found = hybrid_validation(personal, global_, **rolled)
    assert bool((found.accuracy <= hybrid_oracle(personal, global_).accuracy).all())
    assert bool(((found.accuracy == personal) | (found.accuracy == global_)).all())


def test_best_round():
    assert best_round(torch.tensor([0.5, 0.9, 0.9, 0.7])) == 1
    assert best_round(torch.tensor([3.0, 1.0, 2.0, 1.0]), higher_is_better=False) == 1
    assert best_round(torch.tensor([math.nan, 0.1, math.inf])) == 1
    # means over clients: 0.5, 0.6 (one client without a score), 0.4
    by_client = torch.tensor([[0.4, 0.6], [math.nan, 0.6], [0.4, 0.4]])
    assert best_round(by_client) == 1
    assert best_round(by_client, higher_is_better=False) == 2


def test_best_on_validation_is_not_best_on_test():
    validation, test = torch.tensor([0.6, 0.8, 0.7]), torch.tensor([0.5, 0.6, 0.9])
    assert float(test[best_round(validation)]) == pytest.approx(0.6)
    assert float(test[best_round(test)]) == pytest.approx(0.9)


def test_refusals():
    with pytest.raises(ConfigError, match="--validation above 0"):
        best_round(torch.full((3, 2), math.nan))
    with pytest.raises(ConfigError, match="--validation"):
        best_round(torch.tensor([]))
    with pytest.raises(ConfigError, match="one number a client"):
        hybrid_oracle(torch.zeros(2), torch.zeros(3))
