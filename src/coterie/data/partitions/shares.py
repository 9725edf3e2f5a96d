"""Who holds which samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy.typing as npt
import torch
from torch import Tensor

if TYPE_CHECKING:
    from coterie.tables import Table


@dataclass(frozen=True, eq=False)
class Ragged:
    """One index array per client, held flat.

    Parameters
    ----------
    flat
        All arrays, one after the other (int64).
    offsets
        Where each begins, and the end: ``[clients + 1]``.
    """

    flat: Tensor = field(repr=False)
    offsets: Tensor

    def __getitem__(self, client: int) -> Tensor:
        if not -len(self) <= client < len(self):
            raise IndexError(f"client {client} of {len(self)}")
        client %= len(self)
        return self.flat[int(self.offsets[client]) : int(self.offsets[client + 1])]

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def sizes(self) -> Tensor:
        """How many indices each client has."""
        return self.offsets.diff()

    @property
    def clients(self) -> Tensor:
        """The client of each entry of ``flat``."""
        return torch.arange(len(self)).repeat_interleave(self.sizes)

    @classmethod
    def of(cls, arrays: Sequence[Tensor] | Sequence[npt.NDArray[Any]]) -> Ragged:
        """Lay arrays one after the other.

        Parameters
        ----------
        arrays
            One array of indices a client.

        Returns
        -------
        Ragged
            The same arrays, held flat.
        """
        parts = [torch.as_tensor(array, dtype=torch.int64) for array in arrays]
        offsets = torch.tensor([0, *(len(part) for part in parts)]).cumsum(0)
        return cls(torch.cat(parts) if parts else torch.empty(0, dtype=torch.int64), offsets)


@dataclass(frozen=True, eq=False)
class Shares:
    """Who holds which samples, and for what.

    Parameters
    ----------
    train
        The samples each client trains on.
    validation
        The samples each client chooses by; possibly none.
    test
        The samples each client is measured on.
    noise
        The standard deviation of the Gaussian noise on each client's normalised inputs, if any.
    redraw_noise
        Whether that noise is drawn anew at every access, instead of once for each sample.
    groups
        The known group of each client, if any.
    scheme
        The canonical text of the scheme as it was applied.
    names
        The clients' names, where they have any.
    """

    train: Ragged
    validation: Ragged
    test: Ragged
    noise: Tensor | None
    redraw_noise: bool
    groups: Tensor | None
    scheme: str
    names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.train)

    def counts(self, labels: Tensor, classes: int) -> Tensor:
        """Count the training samples of each client and class.

        Parameters
        ----------
        labels
            The class of each sample of the data set.
        classes
            How many classes there are.

        Returns
        -------
        Tensor
            Integers ``[clients, classes]``.
        """
        cell = self.train.clients * classes + labels.cpu()[self.train.flat]
        return torch.bincount(cell, minlength=len(self) * classes).reshape(len(self), classes)

    def table(self, labels: Tensor, classes: Sequence[str] = (), limit: int = 40) -> Table:
        """Show who got what, as a table for the terminal.

        Parameters
        ----------
        labels
            The class of each sample of the data set, or its target.
        classes
            The classes' names; numbers unless given. Of targets no classes are shown.
        limit
            Clients to show at most; the last line sums up all of them.

        Returns
        -------
        Table
            A line a client: sizes, then the training samples of each class.
        """
        from coterie.data.partitions.overview import table

        return table(self, labels, classes, limit)
