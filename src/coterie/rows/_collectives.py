"""The one hook by which several processes compute a product together; without them, nothing here is used.

:mod:`coterie.rows.algebra` says what to compute of which rows or columns, and a :class:`Collectives` says who computes
which of them and how the parts become the whole. The only implementation is in :mod:`coterie.rows.distributed`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Protocol

from torch import Tensor

RowsPart = Callable[["slice | Tensor", Tensor], Tensor]
"""From the numbers of some rows (as an index of a tensor) and the rows themselves to their part of a sum."""


class Collectives(Protocol):
    """Sums and maps that some processes compute together, seen from one of them; all get the same bits."""

    @property
    def size(self) -> int:
        """How many processes there are."""
        ...

    def pays(self, multiplications: int) -> bool:
        """Say whether a product that takes so many is worth dividing."""
        ...

    def takes(self, number: int) -> bool:
        """Say whether a numbered piece of work is this process's."""
        ...

    def sum(self, value: Tensor) -> Tensor:
        """Add up the processes' tensors."""
        ...

    # Of a matrix whose rows are spread over the processes.

    def sum_rows(self, rows: Tensor, out: Tensor, part: RowsPart) -> Tensor:
        """Add to zeros what ``part`` makes of blocks of rows."""
        ...

    def map_rows(self, rows: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """Put together, in the order of the rows, what ``part`` finds for each row of a block."""
        ...

    def sum_columns(self, rows: Tensor, part: Callable[[Tensor], Tensor]) -> Tensor:
        """Add up what ``part`` makes of some columns of all rows."""
        ...

    # Of matrices that every process has.

    def sum_slices(self, part: Callable[[slice], Tensor], columns: int) -> Tensor:
        """Add up what ``part`` makes of slices of the columns."""
        ...

    def join_slices(self, part: Callable[[slice], Tensor], columns: int) -> Tensor:
        """Put the columns together that ``part`` makes for slices of them."""
        ...


_DIVIDING: ContextVar[Collectives | None] = ContextVar("coterie collectives", default=None)


@contextlib.contextmanager
def dividing(among: Collectives | None) -> Iterator[None]:
    """Divide large products of matrices that every process has; all must compute the same while this is open."""
    token = _DIVIDING.set(among)
    try:
        yield
    finally:
        _DIVIDING.reset(token)


def divided() -> Collectives | None:
    """Give the processes among which large products are divided just now, or ``None``."""
    return _DIVIDING.get()
