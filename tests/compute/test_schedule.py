"""Sizes of tables that few recordings can serve."""

from __future__ import annotations

import torch

from coterie.compute.finiteness import Finiteness
from coterie.compute.schedule import even_width, padded_size


def test_padded_sizes_are_four_to_an_octave_and_at_most_a_fifth_is_padding() -> None:
    assert [padded_size(samples) for samples in (0, 1, 7, 9, 33, 200)] == [0, 1, 7, 10, 40, 224]
    sizes = [padded_size(samples) for samples in range(1, 1025)]
    assert all(samples <= size for samples, size in enumerate(sizes, 1))
    assert all(5 * (size - samples) <= size for samples, size in enumerate(sizes, 1))
    assert len({size for size in sizes if 512 < size <= 1024}) == 4


def test_even_widths_are_few_and_little_wider_than_a_batch() -> None:
    widths = {samples: even_width(samples) for samples in range(1025)}
    assert [widths[samples] for samples in (0, 1, 8, 9, 25, 33, 49, 65, 1000)] == [8, 8, 8, 16, 32, 48, 64, 96, 1024]
    assert all(samples <= width == even_width(width) for samples, width in widths.items())
    assert all(width < 1.5 * samples for samples, width in widths.items() if samples > 16)
    assert len(set(widths.values())) == 4 + 2 * 5


def test_a_sum_that_is_not_finite_is_found_in_any_matrix() -> None:
    fine = torch.tensor([[1.0, -2.0], [3.0, 4.0]])
    assert all(Finiteness(rows).known for rows in ([], [fine], [fine, torch.ones(3, 2, 2)]))
    for bad in (torch.inf, -torch.inf, torch.nan):
        spoilt = torch.ones(3, 2, 2)
        spoilt[1, 0, 1] = bad
        assert not Finiteness([fine, spoilt]).known
    assert not Finiteness([torch.tensor([[torch.inf], [-torch.inf]])]).known
