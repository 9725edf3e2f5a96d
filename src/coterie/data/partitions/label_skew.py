"""Label skew by hand: each client holds only a few classes."""

from __future__ import annotations

from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from coterie.data.partitions.scheme import Assignment, Indices, SamplePool, Scheme, cut, shuffled_classes
from coterie.errors import PartitionError
from coterie.randomness import stream

_MCMAHAN = "McMahan et al., Communication-efficient learning of deep networks from decentralized data, AISTATS 2017"


class Shards(Scheme):
    """Sort by label, cut into clients x c shards, and give every client c of them at random."""

    name: ClassVar[str] = "shards"
    by_label: ClassVar[bool] = True
    positional: ClassVar[str | None] = "per_client"
    citation: ClassVar[str] = _MCMAHAN

    per_client: int = Field(2, ge=1, description="shards of each client")

    def assign(self, pool: SamplePool, clients: int, seed: int) -> Assignment:
        """Deal shards."""
        if clients * self.per_client > len(pool.labels):
            raise PartitionError(
                self.cannot(
                    f"{len(pool.labels)} samples cannot be cut into {clients * self.per_client} shards",
                    f"ask for at most {max(len(pool.labels) // clients, 1)} of each client",
                )
            )
        draw = stream(seed, "partition: shards")
        pieces = np.array_split(
            np.concatenate(shuffled_classes(pool.labels, pool.classes, draw)), clients * self.per_client
        )
        order = draw.permutation(len(pieces)).reshape(clients, self.per_client)
        return Assignment([np.concatenate([pieces[piece] for piece in mine]) for mine in order])


class Pathological(Scheme):
    """Every client holds exactly c classes, and every class goes to equally many clients."""

    name: ClassVar[str] = "pathological"
    by_label: ClassVar[bool] = True
    positional: ClassVar[str | None] = "classes"
    citation: ClassVar[str] = _MCMAHAN

    classes: int = Field(2, ge=1, description="classes of each client")
    balanced: bool = Field(True, description="cut a class into equal pieces; otherwise into pieces of random size")
    order: Literal["client", "random"] = Field("client", description="give a class to clients in order, or at random")
    least: int = Field(1, ge=1, description="smallest piece of a class when they are not balanced")

    def assign(self, pool: SamplePool, clients: int, seed: int) -> Assignment:
        """Deal classes to clients, then each class's samples to its holders."""
        if self.classes > pool.classes:
            raise PartitionError(
                self.cannot(
                    f"a client cannot hold {self.classes} classes of {pool.classes}", f"ask for at most {pool.classes}"
                )
            )
        slots = clients * self.classes
        if slots < pool.classes:
            raise PartitionError(
                self.cannot(
                    f"{clients} clients with {self.classes} classes each cannot hold all {pool.classes} classes",
                    f"use at least {-(-pool.classes // self.classes)} clients or more classes a client",
                )
            )
        draw = stream(seed, "partition: pathological")
        holders = self._holders(pool.classes, clients, draw)
        pieces: list[list[Indices]] = [[] for _ in range(clients)]
        for label, samples in enumerate(shuffled_classes(pool.labels, pool.classes, draw)):
            count = len(holders[label])
            if len(samples) < count * self._smallest:
                raise PartitionError(
                    self.cannot(
                        f"class {pool.class_names[label]!r} has {len(samples)} samples for {count} clients",
                        "use fewer clients",
                    )
                )
            for client, piece in zip(holders[label], self._pieces(samples, count, draw), strict=True):
                pieces[client].append(piece)
        return Assignment([np.concatenate(mine) for mine in pieces])

    @property
    def _smallest(self) -> int:
        # A client needs a sample to train on and one to test on, also where all it has is one piece.
        return max(self.least, 2 if self.classes == 1 else 1)

    def _holders(self, classes: int, clients: int, draw: np.random.Generator) -> list[Indices]:
        slots = np.arange(clients * self.classes)
        if self.order == "client":
            # A class takes the next run of slots; slot s is client s mod m, so a run of at most m never meets a
            # client twice.
            return [run % clients for run in np.array_split(slots, classes)]
        counts = draw.permutation([len(run) for run in np.array_split(slots, classes)])
        room = np.full(clients, self.classes)
        holders = []
        for count in counts:
            # The clients with most room first, ties at random: this always ends well (Gale and Ryser).
            chosen = np.lexsort((draw.random(clients), -room))[:count]
            room[chosen] -= 1
            holders.append(chosen)
        return holders

    def _pieces(self, samples: Indices, count: int, draw: np.random.Generator) -> list[Indices]:
        if self.balanced or count == 1:
            return np.array_split(samples, count)
        each = len(samples) / count
        least = min(max(each / 10, self.least), each)
        sizes = np.floor(draw.uniform(least, each, count - 1)).astype(np.int64).clip(self._smallest)
        return cut(samples, [*sizes, len(samples) - int(sizes.sum())])


class QLabel(Scheme):
    """Cut every class into ceil(q*clients/classes) pieces and give every client q of them at random."""

    name: ClassVar[str] = "q_label"
    by_label: ClassVar[bool] = True
    positional: ClassVar[str | None] = "q"
    citation: ClassVar[str] = (
        "Li, Diao, Chen, He, Federated learning on non-IID data silos: an experimental study, ICDE 2022"
    )

    q: int = Field(2, ge=1, description="pieces of each client; two of them may be of one class")

    def assign(self, pool: SamplePool, clients: int, seed: int) -> Assignment:
        """Deal pieces of classes; pieces that are left over are dropped."""
        draw = stream(seed, "partition: q_label")
        return Assignment(q_label(shuffled_classes(pool.labels, pool.classes, draw), clients, self.q, draw))


def q_label(members: list[Indices], clients: int, q: int, draw: np.random.Generator) -> list[Indices]:
    """Deal ``q`` pieces of classes to every client."""
    samples = sum(map(len, members))
    if q * clients > samples:
        raise PartitionError(
            f"q is {q}, but {samples} samples cannot be cut into {q * clients} pieces: with {clients} clients, ask for "
            f"at most {max(samples // clients, 1)}"
        )
    count = -(-q * clients // len(members))
    pieces = [piece for each in members for piece in np.array_split(each, count)]
    order = draw.permutation(len(pieces))[: q * clients].reshape(clients, q)
    return [np.concatenate([pieces[piece] for piece in mine]) for mine in order]
