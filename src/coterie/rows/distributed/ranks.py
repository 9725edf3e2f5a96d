"""The ranks of a run: who owns which clients, and how rows and products reach all of them."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from coterie.errors import ConfigError
from coterie.rows.distributed.agreement import LEFT, SHARING, Agreeing
from coterie.rows.distributed.digests import number_of

_WAIT = datetime.timedelta(days=1)  # a rank may train for long; one that ends closes its connections at once
_PIECE = 2**30  # bytes that are sent at a time
_WORTH = 2**28  # multiplications from which on sharing a product out pays


def sharing() -> Ranks | None:
    """Give the ranks among which products of large matrices are shared out just now.

    Returns
    -------
    Ranks or None
        They, inside :meth:`Ranks.sharing`; ``None`` elsewhere, and in what a rank computes apart.
    """
    return cast("Ranks | None", SHARING.get())


def launched() -> int:
    """Say how many processes were started together.

    Returns
    -------
    int
        As many as ``torchrun`` started; 1 without it.
    """
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def first() -> bool:
    """Say whether this process is the one that speaks for all.

    Returns
    -------
    bool
        True for the first that ``torchrun`` started, and without it.
    """
    return launched() == 1 or os.environ.get("RANK", "0") == "0"


class Ranks(Agreeing):
    """The processes of a sharded run, seen from one of them; client ``i`` belongs to rank ``i`` modulo their number.

    Parameters
    ----------
    rank
        The number of this one, counted from 0.
    count
        How many there are.
    beside
        How many of them share this machine.
    place
        The number of this one among those.
    worth
        Multiplications from which on a product of matrices is shared out.

    Attributes
    ----------
    device
        Where this rank computes.
    moved
        Bytes of rows and products that have reached this rank so far, or left it.
    """

    def __init__(self, rank: int = 0, count: int = 1, *, beside: int = 1, place: int = 0, worth: int = _WORTH) -> None:
        super().__init__(rank, count)
        self.beside, self.place, self.worth = beside, place, worth
        self.moved, self.device = 0, torch.device("cpu")
        self._by_nccl = count > 1 and "cuda:nccl" in str(dist.get_backend_config())

    @classmethod
    def join(cls) -> Ranks:
        """Meet the other ranks.

        Returns
        -------
        Ranks
            Those of the process group that is there already, or else those that ``torchrun`` started; one rank alone
            where there is neither.

        Raises
        ------
        ConfigError
            If there is a process group that cannot carry what lies on the host.
        """
        if not dist.is_available():
            return cls()
        if not dist.is_initialized():
            if launched() == 1:
                return cls()
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
            dist.init_process_group(backend, timeout=_WAIT)
            atexit.register(_part)
        if dist.get_world_size() == 1:
            return cls()
        if "cpu:gloo" not in str(dist.get_backend_config()):
            raise ConfigError(
                f"the process group's backend is {dist.get_backend_config()}, but a sharded run needs gloo for what "
                "lies on the host: use cpu:gloo,cuda:nccl"
            )
        rank, count = dist.get_rank(), dist.get_world_size()
        place, beside = int(os.environ.get("LOCAL_RANK", rank)), int(os.environ.get("LOCAL_WORLD_SIZE", count))
        return cls(rank, count, beside=beside, place=place)

    def owner(self, clients: Tensor) -> Tensor:
        """Say to which rank clients belong.

        Parameters
        ----------
        clients
            Their numbers.

        Returns
        -------
        Tensor
            A rank for each.
        """
        return clients % self.count

    def owns(self, clients: Tensor) -> Tensor:
        """Say which clients are this rank's.

        Parameters
        ----------
        clients
            Their numbers.

        Returns
        -------
        Tensor
            A boolean for each.
        """
        return self.owner(clients) == self.rank

    def part(self, count: int, rank: int | None = None) -> int:
        """Count the clients of a rank.

        Parameters
        ----------
        count
            Clients in the federation.
        rank
            The rank; by default this one.

        Returns
        -------
        int
            How many of them are its.
        """
        return len(range(self.rank if rank is None else rank, count, self.count))

    def bounds(self, size: int) -> list[tuple[int, int]]:
        """Cut columns into one slice a rank.

        Parameters
        ----------
        size
            How many columns.

        Returns
        -------
        list of tuple
            For each rank its first column and one past its last.
        """
        width = -(-size // self.count)
        return [(min(size, rank * width), min(size, (rank + 1) * width)) for rank in range(self.count)]

    @contextlib.contextmanager
    def sharing(self) -> Iterator[None]:
        """Share products of large matrices out among the ranks.

        Yields
        ------
        None
            While the context is open; all ranks must compute the same in it.
        """
        token = SHARING.set(self)
        try:
            yield
        finally:
            SHARING.reset(token)

    def sum(self, value: Tensor) -> Tensor:
        """Add the ranks' tensors up.

        Parameters
        ----------
        value
            This one's, changed in place if it can be.

        Returns
        -------
        Tensor
            The sum, with the same bits on all ranks.
        """
        if self.count == 1:
            return value
        wire = self._on_wire(value.contiguous())
        self.moved += 2 * wire.nbytes
        with self.reachable():
            dist.all_reduce(wire)
        return wire.to(value.device)

    def spread(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Let every rank tell all others one tensor.

        Parameters
        ----------
        pieces
            For each rank a tensor of the right shape and type: this rank's own, and memory for the others', which is
            overwritten.

        Returns
        -------
        list of Tensor
            The ranks' tensors, on the device of those that were given.
        """
        out = []
        for rank, piece in enumerate(pieces):
            wire = self._on_wire(piece.contiguous())
            if wire.numel():
                self.moved += wire.nbytes
                with self.reachable():
                    for part in _bytes(wire).split(_PIECE):
                        dist.broadcast(part, rank)
            out.append(piece if rank == self.rank else wire.to(piece.device))
        return out

    def collect(self, own: Tensor, owner: Tensor) -> Tensor:
        """Put the ranks' rows together.

        Parameters
        ----------
        own
            This rank's rows ``[its rows, ...]``.
        owner
            For every row the rank that has it, on the host.

        Returns
        -------
        Tensor
            All rows ``[rows, ...]`` in the order of ``owner``; each rank's keep their order.
        """
        places = [(owner == rank).nonzero().squeeze(1) for rank in range(self.count)]
        if self.count == 1:
            return own
        pieces = [
            own if rank == self.rank else own.new_empty((len(there), *own.shape[1:]))
            for rank, there in enumerate(places)
        ]
        out = own.new_empty((len(owner), *own.shape[1:]))
        for there, piece in zip(places, self.spread(pieces), strict=True):
            out.index_copy_(0, there.to(out.device), piece)
        return out

    def collect_first(self, own: Tensor, owner: Tensor) -> Tensor:
        """Put the ranks' rows together on the first rank.

        Parameters
        ----------
        own
            This rank's rows ``[its rows, ...]``, on the host.
        owner
            For every row the rank that has it, on the host.

        Returns
        -------
        Tensor
            On the first rank all rows in the order of ``owner``; elsewhere this rank's own.
        """
        own = own.contiguous()
        if not self.leads:
            if own.numel():
                self.moved += own.nbytes
                with self.reachable():
                    dist.send(_bytes(own), 0)
            return own
        out = own.new_empty((len(owner), *own.shape[1:]))
        for rank in range(self.count):
            there = (owner == rank).nonzero().squeeze(1)
            piece = own
            if rank and len(there):
                piece = own.new_empty((len(there), *own.shape[1:]))
                self.moved += piece.nbytes
                with self.reachable():
                    dist.recv(_bytes(piece), rank)
            if len(there):
                out.index_copy_(0, there, piece)
        return out

    def collect_rows(self, own: Mapping[str, Tensor], owner: Tensor) -> dict[str, Tensor]:
        """Put named rows of all ranks together, also where some ranks have none.

        Parameters
        ----------
        own
            This rank's rows; whatever it says where it has none.
        owner
            For every row the rank that has it, on the host; at least one.

        Returns
        -------
        dict of str to Tensor
            All rows, under the names of whoever has some; a tensor that has two names is sent once.
        """
        counts = torch.bincount(owner, minlength=self.count).tolist()
        form: list[tuple[str, tuple[int, ...], torch.dtype, int]] = []
        seen: list[Tensor] = []
        for name, value in own.items():
            same = next((at for at, each in enumerate(seen) if each is value), len(seen))
            seen.append(value)
            form.append((name, tuple(value.shape[1:]), value.dtype, same))
        if min(counts) == 0:  # then somebody does not know what comes
            source = next(rank for rank, count in enumerate(counts) if count)
            told: list[Any] = [form]
            with self.reachable():
                dist.broadcast_object_list(told, source)
            form = told[0]
        else:
            self.agree("the ranks of the sharded run made replies of different names or shapes", [number_of(form)])
        out: dict[str, Tensor] = {}
        made: list[Tensor] = []
        for name, shape, dtype, same in form:
            if same < len(made):
                made.append(made[same])
            else:
                mine = own[name] if counts[self.rank] else torch.empty((0, *shape), dtype=dtype, device=self.device)
                made.append(self.collect(mine, owner))
            out[name] = made[-1]
        return out

    def columns(self, own: Tensor, clients: int, begin: int, width: int) -> Tensor:
        """Give this rank some columns of all clients' rows.

        Parameters
        ----------
        own
            The rows of this rank's clients ``[its clients, columns]``.
        clients
            Clients in the federation.
        begin
            The first rank's first column.
        width
            Columns of a rank; the last ranks may get fewer.

        Returns
        -------
        Tensor
            ``[clients, its columns]``.
        """
        edges = [min(own.shape[1], begin + rank * width) for rank in range(self.count + 1)]
        parts = [own[:, first:last].reshape(-1) for first, last in itertools.pairwise(edges)]
        sent = self._on_wire(torch.cat(parts))
        here = edges[self.rank + 1] - edges[self.rank]
        sizes = [self.part(clients, rank) * here for rank in range(self.count)]
        got = sent.new_empty(sum(sizes))
        self.moved += sent.nbytes + got.nbytes
        with self.reachable():
            dist.all_to_all_single(got, sent, sizes, [len(part) for part in parts])
        out = own.new_empty(clients, here)
        if here:
            for rank, piece in enumerate(got.split(sizes)):
                out[rank :: self.count] = piece.view(-1, here).to(out.device)
        return out

    def _on_wire(self, value: Tensor) -> Tensor:
        return value if self._by_nccl or not value.is_cuda else value.cpu()


def _part() -> None:
    if dist.is_initialized() and not LEFT:  # of those that are left behind, the operating system takes care
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _bytes(value: Tensor) -> Tensor:
    return value.view(-1).view(torch.uint8)
