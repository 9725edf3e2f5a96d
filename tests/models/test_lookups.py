"""A word that a model has no entry for is told of before a GPU meets it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from coterie.models.lookups import CheckedLookups


@pytest.mark.parametrize("layer", [nn.Embedding(5, 2), nn.EmbeddingBag(5, 2)])
@pytest.mark.parametrize(
    ("word", "said"), [(5, "5 entries is asked for entry 5"), (-1, "5 entries is asked for entry -1")]
)
def test_an_entry_that_is_not_there_is_refused_before_it_is_looked_up(layer: nn.Module, word: int, said: str) -> None:
    with CheckedLookups(), pytest.raises(IndexError, match=said):
        layer(torch.tensor([[0, 4], [word, 1]]))


def test_what_is_there_is_looked_up() -> None:
    layer = nn.Embedding(5, 2)
    words = torch.tensor([[0, 4], [3, 1]])
    with CheckedLookups():
        assert torch.equal(layer(words), layer.weight[words])
        assert layer(words[:0]).shape == (0, 2, 2)


def test_rows_that_cannot_be_read_are_left_to_the_lookup() -> None:
    words = torch.tensor([[0, 4], [3, 1]])
    weights = torch.randn(3, 5, 2)
    with CheckedLookups():
        found = torch.func.vmap(lambda weight: nn.functional.embedding(words, weight))(weights)
    assert torch.equal(found, weights[:, words])


def test_within_vmap_words_of_rows_are_left_to_the_lookup() -> None:
    words = torch.tensor([[0, 4], [3, 1]])
    weight = torch.randn(5, 2)
    with CheckedLookups():
        found = torch.func.vmap(lambda own: nn.functional.embedding(own, weight))(words)
    assert torch.equal(found, weight[words])
