"""The ranks of a run: who owns which clients, and how rows and products reach all of them."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from coterie.errors import ConfigError
from coterie.rows._collectives import dividing
from coterie.rows.distributed._agreement import LEFT, ProcessAgreement
from coterie.rows.distributed._collectives import RankCollectives
from coterie.rows.distributed.digests import number_of

_WAIT = datetime.timedelta(days=1)  # a rank may train for long; one that ends closes its connections at once
_SEND_BYTES = 2**30  # that are sent at a time
_WORTH = 2**28  # multiplications from which on dividing a product pays


def launched() -> int:
    """Say how many processes ``torchrun`` started together; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def started_together() -> bool:
    """Say whether ``torchrun`` started this process, be it alone, or it has joined a process group."""
    return "TORCHELASTIC_RUN_ID" in os.environ or (dist.is_available() and dist.is_initialized())


def first() -> bool:
    """Say whether this process speaks for all: the first that ``torchrun`` started, and any without it."""
    return launched() == 1 or os.environ.get("RANK", "0") == "0"


class Ranks(ProcessAgreement):
    """The processes of a sharded run, seen from one of them; client ``i`` belongs to rank ``i`` modulo their number.

    Parameters
    ----------
    rank
        The number of this one, counted from 0.
    count
        How many there are.
    local_count
        How many of them share this machine.
    local_rank
        The number of this one among those.
    worth
        Multiplications from which on a product of matrices is divided among them.

    Attributes
    ----------
    device
        Where this rank computes.
    moved
        Bytes of rows and products that have reached this rank so far, or left it.
    """

    def __init__(
        self, rank: int = 0, count: int = 1, *, local_count: int = 1, local_rank: int = 0, worth: int = _WORTH
    ) -> None:
        super().__init__(rank, count)
        self.local_count, self.local_rank, self.worth = local_count, local_rank, worth
        self.moved, self.device = 0, torch.device("cpu")
        self._by_nccl = count > 1 and "cuda:nccl" in str(dist.get_backend_config())

    @classmethod
    def join(cls) -> Ranks:
        """Meet the ranks of the process group that is there already, or else those that ``torchrun`` started.

        Where there is neither, this is one rank alone.
        """
        if not dist.is_available():
            return cls()
        if not dist.is_initialized():
            if launched() == 1:
                return cls()
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
            dist.init_process_group(backend, timeout=_WAIT)
            atexit.register(_leave_group)
        if dist.get_world_size() == 1:
            return cls()
        if "cpu:gloo" not in str(dist.get_backend_config()):
            raise ConfigError(
                f"the process group's backend is {dist.get_backend_config()}, but a sharded run needs gloo for what "
                "lies on the host: use cpu:gloo,cuda:nccl"
            )
        rank, count = dist.get_rank(), dist.get_world_size()
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_count = int(os.environ.get("LOCAL_WORLD_SIZE", count))
        return cls(rank, count, local_count=local_count, local_rank=local_rank)

    def owner(self, clients: Tensor) -> Tensor:
        """Say to which rank each client belongs."""
        return clients % self.count

    def owns(self, clients: Tensor) -> Tensor:
        """Say of each client whether it is this rank's."""
        return self.owner(clients) == self.rank

    def count_owned(self, clients: int, rank: int | None = None) -> int:
        """Count those of so many clients that belong to a rank, by default to this one."""
        return len(range(self.rank if rank is None else rank, clients, self.count))

    def column_bounds(self, size: int) -> list[tuple[int, int]]:
        """Cut so many columns into one slice a rank: its first column and one past its last."""
        width = -(-size // self.count)
        return [(min(size, rank * width), min(size, (rank + 1) * width)) for rank in range(self.count)]

    @contextlib.contextmanager
    def sharing(self) -> Iterator[None]:
        """Divide large products of matrices among the ranks; all must compute the same while this is open."""
        with dividing(RankCollectives(self)):
            yield

    def sum(self, value: Tensor) -> Tensor:
        """Add the ranks' tensors up, this one's in place if it can be; the sum has the same bits on all ranks."""
        if self.count == 1:
            return value
        wire = self._on_wire(value.contiguous())
        self.moved += 2 * wire.nbytes
        with self.reachable():
            dist.all_reduce(wire)
        return wire.to(value.device)

    def all_gather(self, pieces: Sequence[Tensor]) -> list[Tensor]:
        """Give every rank one tensor of each.

        ``pieces`` has, for each rank, a tensor of the right shape and type: this rank's own, and for the others' memory
        that is overwritten. One broadcast each, as ranks may have tensors of different lengths, or empty ones.
        """
        out = []
        for rank, piece in enumerate(pieces):
            wire = self._on_wire(piece.contiguous())
            if wire.numel():
                self.moved += wire.nbytes
                with self.reachable():
                    for part in _bytes(wire).split(_SEND_BYTES):
                        dist.broadcast(part, rank)
            out.append(piece if rank == self.rank else wire.to(piece.device))
        return out

    def collect(self, own: Tensor, owner: Tensor) -> Tensor:
        """Put the ranks' rows together in the order of ``owner``, which on the host names the rank of every row."""
        places = [(owner == rank).nonzero().squeeze(1) for rank in range(self.count)]
        if self.count == 1:
            return own
        pieces = [
            own if rank == self.rank else own.new_empty((len(there), *own.shape[1:]))
            for rank, there in enumerate(places)
        ]
        out = own.new_empty((len(owner), *own.shape[1:]))
        for there, piece in zip(places, self.all_gather(pieces), strict=True):
            out.index_copy_(0, there.to(out.device), piece)
        return out

    def collect_on_first(self, own: Tensor, owner: Tensor) -> Tensor:
        """Put the ranks' rows, which lie on the host, together on the first rank; others get their own back."""
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
        """Put named rows of all ranks together, as :meth:`collect` does, also where some ranks have none.

        The names are those of a rank that has some; a tensor that has two names is sent once.
        """
        counts = torch.bincount(owner, minlength=self.count).tolist()
        form: list[tuple[str, tuple[int, ...], torch.dtype, int]] = []
        seen: list[Tensor] = []
        for name, value in own.items():
            # One tensor under two names. Comparing numbers would not do: they may be equal on one rank alone.
            same = next((at for at, each in enumerate(seen) if each is value), len(seen))
            seen.append(value)
            form.append((name, tuple(value.shape[1:]), value.dtype, same))
        if min(counts) == 0:  # then a rank does not know what will be sent
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

    def exchange_columns(self, own: Tensor, clients: int, begin: int, width: int) -> Tensor:
        """Give up columns of this rank's rows ``[its clients, columns]`` for others of all ``clients``' rows.

        From column ``begin`` on each rank gets ``width`` columns ``[clients, width]``, the last ones maybe fewer.
        """
        edges = [min(own.shape[1], begin + rank * width) for rank in range(self.count + 1)]
        parts = [own[:, first:last].reshape(-1) for first, last in itertools.pairwise(edges)]
        sent = self._on_wire(torch.cat(parts))
        here = edges[self.rank + 1] - edges[self.rank]
        sizes = [self.count_owned(clients, rank) * here for rank in range(self.count)]
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


def _leave_group() -> None:
    if dist.is_initialized() and not LEFT:  # of those that are left behind, the operating system takes care
        with contextlib.suppress(Exception):
            dist.destroy_process_group()


def _bytes(value: Tensor) -> Tensor:
    return value.view(-1).view(torch.uint8)
