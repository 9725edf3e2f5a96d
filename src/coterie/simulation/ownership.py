"""Which clients are computed in this process, and how what was found for them becomes everybody's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor

from coterie.rows import take_rows

Result = TypeVar("Result")


class Ownership:
    """All clients are computed in this process; a sharded simulation says otherwise."""

    def mine(self, clients: Tensor) -> Tensor:
        """Say which of some clients are computed in this process.

        Parameters
        ----------
        clients
            The clients.

        Returns
        -------
        Tensor
            All of them, unless others compute some.
        """
        return clients

    def my_rows(self, rows: Tensor, clients: Tensor) -> Tensor:
        """Give the rows of those of some clients that are computed in this process.

        Parameters
        ----------
        rows
            A tensor of the server's with a row per client of the federation.
        clients
            The clients.

        Returns
        -------
        Tensor
            A copy.
        """
        return take_rows(rows, clients)

    def apart(self, work: Callable[[], Result]) -> Result:
        """Do something for the clients of this process alone.

        Parameters
        ----------
        work
            What to do.

        Returns
        -------
        Result
            What it gave.
        """
        return work()

    def everyones(self, values: Tensor, clients: Tensor) -> Tensor:
        """Put together what was found for some clients.

        Parameters
        ----------
        values
            A column for each of :meth:`mine` ``[..., clients]``.
        clients
            All these clients.

        Returns
        -------
        Tensor
            A column for each.
        """
        return values
