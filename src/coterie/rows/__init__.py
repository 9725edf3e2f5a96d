"""One row per client: how models lie in a ``[clients, parameters]`` matrix, and the algebra of such matrices."""

from __future__ import annotations

from coterie.rows.access import look_at_rows, put_rows, row_blocks, take_local_rows, take_rows
from coterie.rows.algebra import (
    column_blocks,
    cosines,
    distances_from,
    gram,
    mix,
    norms,
    squared_distances,
    total,
)
from coterie.rows.layout import Columns, Layout, Rows, nbytes
from coterie.rows.matrix import ClientMatrix, repeat_row

__all__ = [
    "ClientMatrix",
    "Columns",
    "Layout",
    "Rows",
    "column_blocks",
    "cosines",
    "distances_from",
    "gram",
    "look_at_rows",
    "mix",
    "nbytes",
    "norms",
    "put_rows",
    "repeat_row",
    "row_blocks",
    "squared_distances",
    "take_local_rows",
    "take_rows",
    "total",
]
