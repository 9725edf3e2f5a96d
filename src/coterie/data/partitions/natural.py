"""The clients that the data came with: writers, hospitals, the values of a client column."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from pydantic import Field

from coterie.data.partitions.scheme import Assignment, SamplePool, Scheme
from coterie.errors import PartitionError


class Natural(Scheme):
    """Return every client whole natural owners of samples (writers, a client column), in their order."""

    name: ClassVar[str] = "natural"
    by_label: ClassVar[bool] = False
    positional: ClassVar[str | None] = "owners"
    citation: ClassVar[str] = "Caldas et al., LEAF: a benchmark for federated settings, arXiv:1812.01097, 2018"

    owners: int | None = Field(None, ge=1, description="owners of each client; auto: as many as every client can have")
    least: int = Field(0, ge=0, description="leave out owners with fewer samples")

    def assign(self, pool: SamplePool, clients: int, seed: int) -> Assignment:
        """Deal whole owners; those left over when they do not divide are left out."""
        if pool.owner is None:
            raise PartitionError(
                self.cannot(
                    f"the data set {pool.name!r} does not say whose a sample is",
                    "use another partition, or give the data a client column",
                )
            )
        counts = np.bincount(pool.owner)
        known = np.flatnonzero(counts >= max(1, self.least))
        each = len(known) // clients if self.owners is None else self.owners
        if each < 1 or each * clients > len(known):
            raise PartitionError(
                self.cannot(
                    f"the data set {pool.name!r} has {len(known)} natural clients"
                    + (f" of at least {self.least} samples" if self.least else "")
                    + f", which is too few for {clients} clients"
                    + (f" of {each} each" if each > 1 else ""),
                    f"use at most {len(known) // max(1, each)} clients",
                )
            )
        taken = known[: each * clients].reshape(clients, each)
        order = np.argsort(pool.owner, kind="stable")
        ends = np.cumsum(counts)
        parts = [np.concatenate([order[ends[one] - counts[one] : ends[one]] for one in mine]) for mine in taken]
        groups = None
        if pool.owner_groups is not None:
            of_owner = pool.owner_groups[taken]
            groups = of_owner[:, 0] if (of_owner == of_owner[:, :1]).all() else None
        return Assignment(parts, groups=groups)
