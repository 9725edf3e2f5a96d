"""Partitions: pure functions from (labels, scheme, seed) to who holds which samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coterie import lazy

if TYPE_CHECKING:
    from coterie.data.partitions.assignment import share_out
    from coterie.data.partitions.overview import plot
    from coterie.data.partitions.registry import SCHEMES, SchemeInfo, describe, parse
    from coterie.data.partitions.scheme import Assignment, SamplePool, Scheme
    from coterie.data.partitions.shares import Ragged, Shares
else:
    __getattr__ = lazy.exports(
        __name__,
        assignment="share_out",
        overview="plot",
        registry="SCHEMES SchemeInfo describe parse",
        scheme="Assignment SamplePool Scheme",
        shares="Ragged Shares",
    )

__all__ = [
    "SCHEMES",
    "Assignment",
    "Ragged",
    "SamplePool",
    "Scheme",
    "SchemeInfo",
    "Shares",
    "describe",
    "parse",
    "plot",
    "share_out",
]
