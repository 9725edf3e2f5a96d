"""FedFomo's weights."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie.algorithms.server_math.fomo import fomo_weights
from coterie.randomness import stream

F64 = torch.float64


def test_weights_by_hand() -> None:
    own, candidates = torch.tensor([2.0]), torch.tensor([[1.0, 1.5, 3.0, 2.0]])
    distances = torch.tensor([[2.0, 0.5, 1.0, 1.0]])
    normalised, raw = fomo_weights(own, candidates, distances)
    torch.testing.assert_close(raw, torch.tensor([[0.5, 1.0, 0.0, 0.0]], dtype=F64), rtol=1e-9, atol=0)
    torch.testing.assert_close(normalised, torch.tensor([[1 / 3, 2 / 3, 0.0, 0.0]], dtype=F64), rtol=1e-9, atol=0)


@given(seed=st.integers(0, 2**32 - 1), clients=st.integers(1, 6), candidates=st.integers(1, 6))
@settings(max_examples=40, deadline=None)
def test_weights_sum_to_one_or_are_all_zero(seed: int, clients: int, candidates: int) -> None:
    draw = stream(seed, "fomo")
    own = torch.from_numpy(draw.uniform(0, 2, clients))
    losses = torch.from_numpy(draw.uniform(0, 3, (clients, candidates)))
    distances = torch.from_numpy(draw.uniform(0, 2, (clients, candidates)))
    normalised, raw = fomo_weights(own, losses, distances)
    assert (normalised >= 0).all()
    better = losses < own.unsqueeze(1)
    assert torch.equal(normalised > 0, better)
    torch.testing.assert_close(normalised.sum(1), better.any(1).double(), rtol=0, atol=1e-13)
    torch.testing.assert_close(normalised * raw.sum(1, keepdim=True), raw, rtol=1e-12, atol=0)


def test_the_clients_own_model_among_the_candidates_takes_no_weight() -> None:
    # Its loss may differ in the last bits when computed in another batch; at distance 0 that would be a huge ratio.
    normalised, raw = fomo_weights(torch.tensor([1.0 + 1e-7]), torch.tensor([[1.0, 0.5]]), torch.tensor([[0.0, 1.0]]))
    assert raw[0, 0] == 0
    assert normalised.tolist() == [[0.0, 1.0]]


def test_nothing_better_leaves_the_client_as_it_is() -> None:
    normalised, raw = fomo_weights(torch.tensor([1.0]), torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 1.0]]))
    assert not normalised.any()
    assert not raw.any()


def test_models_that_diverged_take_no_weight() -> None:
    losses = torch.tensor([[math.nan, math.inf, 0.5, 0.5]])
    distances = torch.tensor([[1.0, 1.0, math.nan, 2.0]])
    normalised, _ = fomo_weights(torch.tensor([1.0]), losses, distances)
    assert normalised.tolist() == [[0.0, 0.0, 0.0, 1.0]]


def test_a_client_whose_own_model_diverged_has_nothing_to_compare_with() -> None:
    for own in (math.inf, math.nan):
        normalised, raw = fomo_weights(torch.tensor([own]), torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 3.0]]))
        assert not raw.any()
        assert not normalised.any()
