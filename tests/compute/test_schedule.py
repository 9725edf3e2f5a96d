"""Sizes of tables that few recordings can serve."""

from __future__ import annotations

from coterie.compute.schedule import padded_size


def test_padded_sizes_are_four_to_an_octave_and_at_most_a_fifth_is_padding() -> None:
    assert [padded_size(samples) for samples in (0, 1, 7, 9, 33, 200)] == [0, 1, 7, 10, 40, 224]
    sizes = [padded_size(samples) for samples in range(1, 1025)]
    assert all(samples <= size for samples, size in enumerate(sizes, 1))
    assert all(5 * (size - samples) <= size for samples, size in enumerate(sizes, 1))
    assert len({size for size in sizes if 512 < size <= 1024}) == 4
