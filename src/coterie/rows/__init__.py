"""One row per client: how models lie in a ``[clients, parameters]`` matrix, and the algebra of such matrices."""

from __future__ import annotations

from coterie.rows.algebra import column_blocks, cosines, gram, mix, norms, put_rows, squared_distances
from coterie.rows.layout import Columns, Layout, Rows, nbytes

__all__ = [
    "Columns",
    "Layout",
    "Rows",
    "column_blocks",
    "cosines",
    "gram",
    "mix",
    "nbytes",
    "norms",
    "put_rows",
    "squared_distances",
]
