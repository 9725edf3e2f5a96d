"""What a partition scheme is: a pure function from a pool of samples, its fields and a seed to one part a client."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from coterie.options import Spec

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class SamplePool:
    """The samples that a scheme distributes: all of a data set, seen by their labels and owners alone.

    Parameters
    ----------
    name
        The data set's name.
    labels
        The class of each sample; all 0 when the task is regression.
    class_names
        The classes' names; empty when the task is regression.
    train_count
        The number of samples, from the first on, that are the official training set.
    test_fraction
        The fraction of the samples that is for testing.
    owner
        The natural client of each sample, where there is one.
    owner_groups
        The known group of each natural client, where there is one.
    superclasses
        The super-class of each class, where there are any.
    min_samples
        The fewest samples a client may get, where the caller asks for some.
    owner_names
        The natural clients' names, where they have any.
    test_apart
        Whether the official test set stays one: then a scheme assigns test samples apart.
    """

    name: str
    labels: Indices
    class_names: tuple[str, ...]
    train_count: int
    test_fraction: float
    owner: Indices | None = None
    owner_groups: Indices | None = None
    superclasses: tuple[int, ...] = ()
    min_samples: int | None = None
    owner_names: tuple[str, ...] = ()
    test_apart: bool = False

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.class_names)

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Assignment:
    """Which samples each client gets.

    Parameters
    ----------
    parts
        The samples of each client: all of them, or those for training if ``test`` is given.
    test
        The test samples of each client, where the scheme assigns them apart.
    noise
        The standard deviation of the noise on each client's inputs, if any.
    redraw_noise
        Whether that noise is drawn anew at every access.
    groups
        The known group of each client, if any.
    overlap
        Whether clients may share training samples.
    scheme
        The text of the scheme as it was applied, if that says more than the one that was asked for.
    names
        The clients' names, where they have any.
    """

    parts: Sequence[Indices]
    test: Sequence[Indices] | None = None
    noise: npt.NDArray[np.float32] | None = None
    redraw_noise: bool = False
    groups: Indices | None = None
    overlap: bool = False
    scheme: str | None = None
    names: tuple[str, ...] = ()


class Scheme(Spec, ABC):
    """A way to distribute samples among clients; its fields are its parameters."""

    kind: ClassVar[str] = "partition"
    by_label: ClassVar[bool]  # whether it needs class labels
    remedy: ClassVar[str] = "use fewer clients"  # against a client that gets too little

    @abstractmethod
    def assign(self, pool: SamplePool, clients: int, seed: int) -> Assignment:
        """Distribute the samples; a function of the arguments and the scheme's fields alone.

        Parameters
        ----------
        pool
            The samples.
        clients
            How many clients there are.
        seed
            The experiment's seed.

        Returns
        -------
        Assignment
            One part for each client.
        """

    def cannot(self, reason: str, fix: str) -> str:
        """Write the sentence that refuses an assignment.

        Parameters
        ----------
        reason
            Why it is not possible.
        fix
            What to do about it.

        Returns
        -------
        str
            A sentence that begins with the scheme.
        """
        return f"partition {self.text()!r}: {reason}; {fix}"


def shuffled_classes(labels: Indices, classes: int, draw: np.random.Generator) -> list[Indices]:
    """List the samples of each class in a random order.

    Parameters
    ----------
    labels
        The class of each sample.
    classes
        How many classes there are.
    draw
        Where the order comes from.

    Returns
    -------
    list[Indices]
        One array a class.
    """
    order = np.argsort(labels, kind="stable")
    members = np.split(order, np.cumsum(np.bincount(labels, minlength=classes))[:-1])
    return [draw.permutation(member) for member in members]


def cut(samples: Indices, sizes: Sequence[int] | Indices) -> list[Indices]:
    """Cut an array into consecutive pieces.

    Parameters
    ----------
    samples
        What to cut.
    sizes
        The pieces' lengths.

    Returns
    -------
    list[Indices]
        One array for each size; what is left over is dropped.
    """
    ends = np.cumsum(np.asarray(sizes, dtype=np.int64))
    return [samples[end - size : end] for end, size in zip(ends, sizes, strict=True)]


def apportion(shares: npt.NDArray[np.float64], total: int | Indices) -> Indices:
    """Turn shares into whole numbers that sum to the total, by rounding their running sums.

    Parameters
    ----------
    shares
        Shares that sum to 1 along the last axis.
    total
        What to apportion, one number or one for each row of shares.

    Returns
    -------
    Indices
        Whole numbers of the shape of ``shares``, each within 1 of its share of the total.
    """
    ends = np.rint(np.cumsum(shares, axis=-1) * np.asarray(total)[..., None]).astype(np.int64)
    ends[..., -1] = total  # the running sum may end a rounding error away from 1
    sizes: Indices = np.diff(np.minimum(ends, np.asarray(total)[..., None]), axis=-1, prepend=0)
    return sizes
