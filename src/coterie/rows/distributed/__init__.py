"""Processes that compute one experiment together, and what they tell each other.

Every rank runs the same programme on the same numbers. What is not a rank's own is computed by all of them alike, bit
for bit, so that all come to the same next step. What is a rank's own (its clients) is computed in
:meth:`Ranks.together`, which ends on all ranks alike: where one fails, all raise what it raised, before any of them
waits for another.

A rank that fails elsewhere has left: it waits for no other any more (:meth:`Ranks.leave`), and the others find its
connection closed once its process ends.
"""

from __future__ import annotations

from coterie.rows.distributed.digests import checksum, number_of
from coterie.rows.distributed.placement import ShardedPlacement, sharded_placement
from coterie.rows.distributed.ranks import Ranks, first, launched, started_together

__all__ = [
    "Ranks",
    "ShardedPlacement",
    "checksum",
    "first",
    "launched",
    "number_of",
    "sharded_placement",
    "started_together",
]
