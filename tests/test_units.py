"""Numbers of bytes as people read them."""

from __future__ import annotations

import pytest

from coterie.units import bytes_unit, format_bytes


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 bytes"),
        (0.4, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (999_499, "999 kB"),
        (999_999, "1 MB"),
        (12_345_678, "12.3 MB"),
        (2.5e9, "2.5 GB"),
        (2_345_678, "2.35 MB"),
        (5e12, "5 TB"),
        (7e15, "7e+03 TB"),
    ],
)
def test_bytes_have_three_digits_and_the_largest_unit_they_fill(count: float, text: str) -> None:
    assert format_bytes(count) == text


def test_an_axis_has_the_unit_of_its_largest_number() -> None:
    assert bytes_unit(3e6) == (1e6, "MB") and bytes_unit(0) == (1.0, "bytes")
