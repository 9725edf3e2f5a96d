"""The clients that the data came with: writers, hospitals, the values of a client column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from coterie.data.partitions.scheme import Assignment, Indices, SamplePool, Scheme
from coterie.errors import PartitionError


class Natural(Scheme):
    """Return every client one natural owner of samples (a writer, a hospital), or whole owners together if asked."""

    name: ClassVar[str] = "natural"
    by_label: ClassVar[bool] = False
    positional: ClassVar[str | None] = "owners"
    remedy: ClassVar[str] = "leave such owners out with --partition natural:least=N"
    citation: ClassVar[str] = "Caldas et al., LEAF: a benchmark for federated settings, arXiv:1812.01097, 2018"

    owners: int | None = Field(
        None, ge=1, description="owners of each client, and those left over are left out; auto: one, and none left over"
    )
    least: int = Field(0, ge=0, description="leave out owners with fewer samples")
    merge: bool = Field(False, description="deal all owners out to fewer clients, neighbours in order together")

    def client_count(self, sizes: Sequence[int]) -> int:
        """Say how many clients there are unless that is given, from the samples of each owner."""
        known = sum(size >= max(1, self.least) for size in sizes)
        return known // (self.owners or 1)

    def assign(self, pool: SamplePool, clients: int, seed: int) -> Assignment:
        """Deal whole owners, in their order."""
        if pool.owner is None:
            raise PartitionError(
                self.cannot(
                    f"the data set {pool.name!r} does not say whose a sample is",
                    "use another partition, or give the data a client column",
                )
            )
        counts = np.bincount(pool.owner)
        known = np.flatnonzero(counts >= max(1, self.least))
        taken = self._taken(known, clients, pool.name)
        order = np.argsort(pool.owner, kind="stable")
        ends = np.cumsum(counts)
        parts = [np.concatenate([order[ends[one] - counts[one] : ends[one]] for one in mine]) for mine in taken]
        groups = None
        if pool.owner_groups is not None:
            of_owner = [pool.owner_groups[mine] for mine in taken]
            alone = all((each == each[0]).all() for each in of_owner)
            groups = np.array([each[0] for each in of_owner]) if alone else None
        names = tuple(" + ".join(pool.owner_names[one] for one in mine) for mine in taken) if pool.owner_names else ()
        if not pool.test_apart:
            return Assignment(parts, groups=groups, names=names)
        test = [part[part >= pool.train_count] for part in parts]
        for number, (part, tested) in enumerate(zip(parts, test, strict=True)):
            if not 0 < len(tested) < len(part):
                lacking = "test" if len(tested) < len(part) else "training"
                raise PartitionError(
                    self.cannot(
                        f"client {names[number] if names else number} has no {lacking} samples",
                        "give it some, or leave it out",
                    )
                )
        parts = [part[part < pool.train_count] for part in parts]
        return Assignment(parts, test=test, groups=groups, names=names)

    def _taken(self, known: Indices, clients: int, data: str) -> list[Indices]:
        if self.merge and self.owners is not None:
            raise PartitionError(self.cannot("owners and merge contradict each other", "give one of them"))
        each = self.owners or 1
        found = f"the data set {data!r} has {len(known)} natural clients"
        found += f" of at least {self.least} samples" if self.least else ""
        if each * clients > len(known):
            raise PartitionError(
                self.cannot(
                    f"{found}, which is too few for {clients} clients" + (f" of {each} each" if each > 1 else ""),
                    f"use at most {len(known) // each} clients",
                )
            )
        if self.merge:
            return list(np.array_split(known, clients))
        if self.owners is None and clients != len(known):
            raise PartitionError(
                self.cannot(
                    f"{found}, but clients is {clients}",
                    f"give --clients {len(known)}, put owners together with natural:merge=true, or take the first "
                    f"{clients} with natural:1",
                )
            )
        return list(known[: each * clients].reshape(clients, each))
