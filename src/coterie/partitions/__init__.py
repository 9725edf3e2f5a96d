"""Partitions: pure functions from (labels, scheme, seed) to who holds which samples."""

from __future__ import annotations

from coterie.partitions.base import Deal, Deck, Scheme
from coterie.partitions.catalogue import SCHEMES, SchemeInfo, describe, parse
from coterie.partitions.deal_out import share_out
from coterie.partitions.shares import Ragged, Shares
from coterie.partitions.show import plot

__all__ = [
    "SCHEMES",
    "Deal",
    "Deck",
    "Ragged",
    "Scheme",
    "SchemeInfo",
    "Shares",
    "describe",
    "parse",
    "plot",
    "share_out",
]
