"""One row per client: how models lie in a ``[clients, parameters]`` matrix, and the algebra of such matrices."""

from __future__ import annotations

from coterie.rows.access import look_at_rows, put_rows, row_blocks, take_rows
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
from coterie.rows.backends import Backend, DeviceBackend, InitialBackend, RowIndex
from coterie.rows.layout import Columns, Layout, Rows, nbytes
from coterie.rows.matrix import ClientMatrix, chosen_of, repeated

__all__ = [
    "Backend",
    "ClientMatrix",
    "Columns",
    "DeviceBackend",
    "InitialBackend",
    "Layout",
    "RowIndex",
    "Rows",
    "chosen_of",
    "column_blocks",
    "cosines",
    "distances_from",
    "gram",
    "look_at_rows",
    "mix",
    "nbytes",
    "norms",
    "put_rows",
    "repeated",
    "row_blocks",
    "squared_distances",
    "take_rows",
    "total",
]
