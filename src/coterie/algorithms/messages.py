"""What passes between the two halves, and what each is told: asks, messages, replies, cohorts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from coterie.algorithms.batch import Net
from coterie.errors import AlgorithmError
from coterie.rows import Layout, Rows, nbytes, repeat_row
from coterie.rows.host_copies import on_device, on_host


@dataclass(frozen=True)
class Message:
    """What a server sends.

    Parameters
    ----------
    shared
        Tensors that all get alike, without a client axis.
    each
        Tensors with a row for each client that is asked, in increasing order of client.
    """

    shared: Rows = field(default_factory=dict)
    each: Rows = field(default_factory=dict)

    def rows(self, count: int) -> Rows:
        """Return the message as rows; what is shared is repeated without a copy.

        Parameters
        ----------
        count
            How many clients are asked.

        Returns
        -------
        Rows
            A row per client for every name.
        """
        return {name: value.expand(count, *value.shape) for name, value in self.shared.items()} | self.each

    @property
    def bytes_each(self) -> int:
        """Bytes that one client receives."""
        return nbytes(self.shared) + nbytes({name: value[:1] for name, value in self.each.items()})


@dataclass(frozen=True)
class Ask:
    """What the server's half yields: a task for some clients, with messages.

    Parameters
    ----------
    task
        A name from :meth:`Algorithm.tasks`.
    message
        What to send.
    clients
        Whom to ask, in increasing order; ``None`` for the whole cohort.
    """

    task: str
    message: Message = field(default_factory=Message)
    clients: Tensor | None = None


@dataclass(frozen=True)
class Replies:
    """What the server's half is handed: the rows that came back.

    Parameters
    ----------
    clients
        Who replied, in increasing order: some or all of those asked, never none.
    rows
        Their replies.
    """

    clients: Tensor
    rows: Rows

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.rows:
            have = ", ".join(map(repr, self.rows)) or "none"
            raise AlgorithmError(f"there is no {name!r} among the replies' tensors, which are {have}")
        return self.rows[name]

    def __len__(self) -> int:
        return len(self.clients)


@dataclass(frozen=True)
class Cohort:
    """The clients of a round, as the server knows them.

    Parameters
    ----------
    clients
        Their numbers, in increasing order.
    round
        The round, counted from 1.
    sizes
        Training samples of every client of the federation ``[clients of the federation]``.
    seed
        The experiment's seed, for what the server draws.
    layout
        Where parameters lie in a row.
    """

    clients: Tensor
    round: int
    sizes: Tensor
    seed: int
    layout: Layout

    @property
    def total(self) -> int:
        """Clients in the federation."""
        return len(self.sizes)

    def shares(self, clients: Tensor) -> Tensor:
        """Return each of some clients' part of their samples, ``N_i / Σ N_k``, in float64.

        Parameters
        ----------
        clients
            Clients, usually those that replied.

        Returns
        -------
        Tensor
            Weights that sum to one.
        """
        # On the host, where both are known: whoever looks at the shares need not wait for a GPU.
        sizes = on_host(self.sizes).numpy()[on_host(clients).numpy()].astype(np.float64)
        return on_device(torch.from_numpy(sizes / sizes.sum()), self.sizes.device)

    def among(self, clients: Tensor) -> Tensor:
        """Return the places of some clients within the cohort.

        Parameters
        ----------
        clients
            Clients of the cohort.

        Returns
        -------
        Tensor
            Their places in :attr:`clients`.
        """
        return torch.searchsorted(self.clients, clients)


@dataclass(frozen=True)
class Weights:
    """Who listened to whom: a row of weights for each of ``rows`` over ``columns``.

    Parameters
    ----------
    values
        Weights ``[rows, columns]``.
    rows
        The clients that listen.
    columns
        The clients listened to.
    """

    values: Tensor
    rows: Tensor
    columns: Tensor


@dataclass(frozen=True)
class Start:
    """What there is before the first round.

    Parameters
    ----------
    row
        The initial model ``[parameters]``.
    clients
        Clients in the federation.
    net
        The model.
    sizes
        Training samples of each client.
    seed
        The experiment's seed.
    fresh
        Gives a client an initial model of its own ``[parameters]``, for methods that start apart.
    probe
        A few made-up samples ``[samples, ...]`` of the data's shape and type, to try the model on.
    members
        Clients that take part in training, in increasing order; ``None`` for all of them.
    """

    row: Tensor
    clients: int
    net: Net
    sizes: Tensor
    seed: int
    fresh: Callable[[int], Tensor]
    probe: Tensor
    members: Tensor | None = None

    @property
    def layout(self) -> Layout:
        """Where parameters lie in a row."""
        return self.net.layout

    def rows(self, row: Tensor | None = None) -> Tensor:
        """Return every client the same row.

        Parameters
        ----------
        row
            The row; by default the initial model.

        Returns
        -------
        Tensor
            A new matrix ``[clients, ...]``; it is kept where there is room for it, and takes none before that is known.
        """
        return repeat_row(self.row if row is None else row, self.clients)
