r"""The practical setting of FedAMP: clients in groups, each with its own dominating classes.

A fraction (0.8) of every client's samples comes uniformly from its group's dominating classes, the rest uniformly from
all other classes; its test samples follow the same law. Clients never share training samples; they may share
test samples.

For EMNIST the paper gives the sizes. For its other data sets they stand in an appendix that was not available to us,
and the sizes here are our own. Both are used when nothing is set and the number of clients is the paper's. For all
other data the sizes are as large as the classes allow, falling from the first group to the last in the proportion 1 to
0.6.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import BeforeValidator, Field

from coterie import options
from coterie.data.partitions.scheme import Assignment, Indices, SamplePool, Scheme, shuffled_classes
from coterie.errors import PartitionError
from coterie.randomness import stream

_SMALLEST_SHARE = 0.6  # samples of a client of the last group, per sample of one of the first: 300 to 500 below


Sizes = Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(options.split_at_plus)]


@dataclass(frozen=True)
class GroupPlan:
    """How many clients each group has, how many samples each of its clients, and which classes dominate.

    Parameters
    ----------
    members
        Clients of each group.
    train
        Training samples of each of them.
    test
        Test samples of each of them.
    dominating
        The dominating classes of each group.
    """

    members: tuple[int, ...]
    train: tuple[int, ...]
    test: tuple[int, ...]
    dominating: tuple[Indices, ...]


# members, training samples and test samples of the clients of each group
_FIVE_OF_TWENTY = ((20,) * 5, (500, 450, 400, 350, 300), 100)
GIVEN = {
    ("emnist", 62): ((10, 26, 26), (1000, 700, 400), 100),
    ("mnist", 10): _FIVE_OF_TWENTY,
    ("fashion_mnist", 10): _FIVE_OF_TWENTY,
    ("cifar100", 100): _FIVE_OF_TWENTY,
}


class Groups(Scheme):
    """Groups of clients with their own dominating classes, in group order; the known groups are kept."""

    name: ClassVar[str] = "groups"
    by_label: ClassVar[bool] = True
    positional: ClassVar[str | None] = "groups"
    citation: ClassVar[str] = "Huang et al., Personalized cross-silo federated learning on non-IID data, AAAI 2021"

    groups: int | None = Field(None, ge=2, description="groups; auto: 5, or fewer where classes are few")
    dominating: float = Field(0.8, gt=0, le=1, description="share of the dominating classes in a client's samples")
    members: Sizes | None = Field(None, description="clients of each group, as 10+26+26; auto: as equal as can be")
    train: Sizes | None = Field(None, description="training samples of a client of each group; auto: what there is")
    test: int | None = Field(None, ge=1, description="test samples of a client; auto: in proportion")

    def assign(self, pool: SamplePool, clients: int, seed: int) -> Assignment:
        """Deal training samples without replacement and test samples client by client."""
        draw = stream(seed, "partition: groups")
        train_samples, test_samples = self._samples(pool, draw)
        plan, counts = self._plan(pool, clients, np.array([len(samples) for samples in train_samples]), seed)
        group = np.repeat(np.arange(len(plan.members)), plan.members)
        test_available = np.array([len(samples) for samples in test_samples])
        used = np.zeros(pool.classes, dtype=np.int64)
        parts, tests = [], []
        for client in range(clients):
            mine = counts[client]
            parts.append(np.concatenate([train_samples[c][used[c] : used[c] + mine[c]] for c in range(pool.classes)]))
            used += mine
            own = stream(seed, "partition: groups test", client=client)
            wanted, rests = self._law(plan.test[group[client]], plan.dominating[group[client]], pool.classes)
            _draw_rests(wanted, rests, test_available - wanted, own)
            short = np.flatnonzero(wanted > test_available)
            if len(short):
                raise PartitionError(
                    self.cannot(
                        f"client {client} needs {wanted[short[0]]} test samples of class "
                        f"{pool.class_names[short[0]]!r}, of which there are {test_available[short[0]]}",
                        "ask for fewer test samples",
                    )
                )
            drawn = [
                own.choice(samples, size, replace=False) for samples, size in zip(test_samples, wanted, strict=True)
            ]
            tests.append(np.concatenate(drawn))
        return Assignment(parts, test=tests, groups=group, scheme=self._resolved(plan).text())

    def _resolved(self, plan: GroupPlan) -> Groups:
        test = plan.test[0] if len(set(plan.test)) == 1 else self.test
        return self.model_copy(
            update={"groups": len(plan.members), "members": plan.members, "train": plan.train, "test": test}
        )

    def _samples(self, pool: SamplePool, draw: np.random.Generator) -> tuple[list[Indices], list[Indices]]:
        members = shuffled_classes(pool.labels, pool.classes, draw)
        if pool.train_count < len(pool):
            return [m[m < pool.train_count] for m in members], [m[m >= pool.train_count] for m in members]
        ends = [min(max(1, round(pool.test_fraction * len(m))), len(m) - 1) if len(m) else 0 for m in members]
        return [m[end:] for m, end in zip(members, ends, strict=True)], [
            m[:end] for m, end in zip(members, ends, strict=True)
        ]

    def _plan(self, pool: SamplePool, clients: int, available: Indices, seed: int) -> tuple[GroupPlan, Indices]:
        given = GIVEN.get((pool.name.partition(":")[0], pool.classes))
        if self == Groups(dominating=self.dominating) and given is not None and sum(given[0]) == clients:
            members, train, test = given
            plan = GroupPlan(members, train, (test,) * len(members), self._dominating(pool, len(members)))
            return plan, self._counts(pool, plan, available, seed)
        members = self._members(pool, clients)
        dominating = self._dominating(pool, len(members))
        if self.train:
            plan = GroupPlan(members, self.train, self._test(pool, self.train), dominating)
            if len(self.train) != len(members):
                raise PartitionError(
                    self.cannot(f"train has {len(self.train)} sizes for {len(members)} groups", "give one a group")
                )
            return plan, self._counts(pool, plan, available, seed)
        return self._scaled(pool, members, dominating, available, seed)

    def _members(self, pool: SamplePool, clients: int) -> tuple[int, ...]:
        if self.members:
            if sum(self.members) != clients:
                raise PartitionError(
                    self.cannot(
                        f"members sum to {sum(self.members)}, but there are {clients} clients",
                        "make them agree",
                    )
                )
            if self.groups not in (None, len(self.members)):
                raise PartitionError(
                    self.cannot(f"groups is {self.groups}, but members has {len(self.members)}", "leave one out")
                )
            count = len(self.members)
        elif self.groups is not None:
            count = self.groups
        else:
            named = len(set(pool.superclasses))
            count = named if 2 <= named <= 10 else min(5, max(2, pool.classes // 2))
            count = max(2, min(count, clients))
        if count > min(clients, pool.classes):
            raise PartitionError(
                self.cannot(
                    f"{clients} clients and {pool.classes} classes do not make {count} groups",
                    f"use at most {min(clients, pool.classes)} groups"
                    if min(clients, pool.classes) >= 2
                    else "use at least 2 clients and 2 classes",
                )
            )
        return self.members or tuple(len(part) for part in np.array_split(np.arange(clients), count))

    def _dominating(self, pool: SamplePool, count: int) -> tuple[Indices, ...]:
        families = np.array(pool.superclasses) if pool.superclasses else np.arange(pool.classes)
        if len(np.unique(families)) < count:
            families = np.arange(pool.classes)
        return tuple(np.flatnonzero(np.isin(families, part)) for part in np.array_split(np.unique(families), count))

    def _test(self, pool: SamplePool, train: tuple[int, ...]) -> tuple[int, ...]:
        if self.test is not None:
            return (self.test,) * len(train)
        ratio = pool.test_fraction / (1 - pool.test_fraction)
        return tuple(max(1, int(size * ratio)) for size in train)

    def _law(self, size: int, dominating: Indices, classes: int) -> tuple[Indices, list[tuple[Indices, int]]]:
        """Count a client's samples of each class, and say among which classes how many more are to be drawn.

        Counts are equal within the dominating classes and within the others; what does not divide is drawn.
        """
        chosen = np.zeros(classes, dtype=bool)
        chosen[dominating] = True
        of_dominating = size if chosen.all() else round(self.dominating * size)
        counts = np.zeros(classes, dtype=np.int64)
        rests = []
        for members, total in (
            (np.flatnonzero(chosen), of_dominating),
            (np.flatnonzero(~chosen), size - of_dominating),
        ):
            if len(members):
                counts[members] = total // len(members)
                rests.append((members, total % len(members)))
        return counts, rests

    def _try_counts(self, plan: GroupPlan, available: Indices, seed: int) -> Indices:
        # A stream of its own, so that given sizes and the same sizes found by scaling deal the same samples.
        draw = stream(seed, "partition: groups law")
        laws = [
            self._law(size, dominating, len(available))
            for count, size, dominating in zip(plan.members, plan.train, plan.dominating, strict=True)
            for _ in range(count)
        ]
        rows = np.stack([counts for counts, _ in laws])
        room = available - rows.sum(0)
        for row, (_, rests) in zip(rows, laws, strict=True):
            _draw_rests(row, rests, room, draw)
        return rows

    def _counts(self, pool: SamplePool, plan: GroupPlan, available: Indices, seed: int) -> Indices:
        counts = self._try_counts(plan, available, seed)
        short = np.flatnonzero(counts.sum(0) > available)
        if len(short):
            label = short[0]
            raise PartitionError(
                self.cannot(
                    f"class {pool.class_names[label]!r} has {available[label]} training samples in {pool.name!r}, but "
                    f"the groups need {counts.sum(0)[label]}",
                    "ask for smaller groups, or leave the sizes out to have them scaled",
                )
            )
        return counts

    def _scaled(
        self,
        pool: SamplePool,
        members: tuple[int, ...],
        dominating: tuple[Indices, ...],
        available: Indices,
        seed: int,
    ) -> tuple[GroupPlan, Indices]:
        weights = np.linspace(1.0, _SMALLEST_SHARE, len(members))
        demand = np.zeros(pool.classes)
        for count, weight, classes in zip(members, weights, dominating, strict=True):
            others = np.setdiff1d(np.arange(pool.classes), classes)
            demand[classes] += count * weight * (self.dominating if len(others) else 1.0) / len(classes)
            demand[others] += count * weight * (1 - self.dominating) / max(1, len(others))
        scale = float((available / demand)[demand > 0].min())
        while scale * _SMALLEST_SHARE >= 1:
            train = tuple(int(scale * weight) for weight in weights)
            plan = GroupPlan(members, train, self._test(pool, train), dominating)
            counts = self._try_counts(plan, available, seed)
            if (counts.sum(0) <= available).all():
                return plan, counts
            scale *= 0.99  # rounding asked for a sample too many
        raise PartitionError(
            self.cannot(
                f"the rarest class of {pool.name!r} has {int(available.min())} training samples, too few for "
                f"{sum(members)} clients",
                "use fewer clients",
            )
        )


def _draw_rests(counts: Indices, rests: list[tuple[Indices, int]], room: Indices, draw: np.random.Generator) -> None:
    """Add what did not divide, in place, to classes drawn among those with room; without room, to any."""
    for members, extra in rests:
        free = members[room[members] > 0]
        drawn = draw.choice(free if len(free) >= extra else members, extra, replace=False)
        counts[drawn] += 1
        room[drawn] -= 1
