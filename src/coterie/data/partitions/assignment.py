"""From a data set and a scheme to every client's training, validation and test samples."""

from __future__ import annotations

import numpy as np
import torch

from coterie.data.dataset import Dataset
from coterie.data.partitions.registry import parse
from coterie.data.partitions.scheme import Assignment, Indices, SamplePool, Scheme
from coterie.data.partitions.shares import Ragged, Shares
from coterie.errors import ConfigError, PartitionError
from coterie.randomness import stream


def share_out(
    dataset: Dataset,
    scheme: Scheme | str,
    *,
    clients: int,
    seed: int,
    test_fraction: float | None = None,
    validation: float = 0.1,
    scarcity: int | None = None,
    max_test: int | None = None,
    min_samples: int | None = None,
) -> Shares:
    """Deal a data set out to clients and split every client's samples.

    All samples, official training and test set together, are distributed; then each client's part is split at random.
    Schemes that assign test samples apart (``groups``) take training samples from the official training set only.

    Parameters
    ----------
    dataset
        The samples.
    scheme
        How to distribute them, or its text, as in ``"dirichlet:0.5"``.
    clients
        How many clients there are.
    seed
        The experiment's seed; the same seed gives the same shares.
    test_fraction
        The fraction of a client's samples that is for testing; by default the data set's own, or 0.2 if it has no test
        set.
    validation
        The fraction of a client's training samples that is kept for validation; 0 for none.
    scarcity
        The most training samples (validation included) that a client keeps; test samples are not affected.
    max_test
        The most test samples that a client keeps.
    min_samples
        The fewest samples that a client may get before the split. Schemes that draw sizes draw again until all have
        them.

    Returns
    -------
    Shares
        Who holds which samples.

    Raises
    ------
    PartitionError
        If the samples cannot be distributed so.
    """
    scheme = parse(scheme) if isinstance(scheme, str) else scheme
    _check(clients, test_fraction, validation, scarcity, max_test, min_samples)
    if scheme.by_label and dataset.task == "regression":
        raise PartitionError(
            f"partition {scheme.text()!r} deals by class labels, and the data set {dataset.name!r} is a regression "
            "task without any: use iid, quantity, quality or natural"
        )
    if dataset.test_apart:
        _refuse_mixing(dataset, scheme, test_fraction)
    count = len(dataset.y)
    refuse_too_many(dataset, clients)
    if test_fraction is None:
        test_fraction = 1 - dataset.train_count / count if dataset.train_count < count else 0.2
    assigned = scheme.assign(_pool(dataset, test_fraction, min_samples), clients, seed)
    _check_parts(assigned, scheme, min_samples)
    train, held_back, test = [], [], []
    for client in range(clients):
        rest, mine = _split_test(assigned, client, test_fraction, seed)
        keep = rest[:scarcity]
        size = _part(validation, len(keep)) if validation else 0
        held_back.append(np.sort(keep[:size]))
        train.append(np.sort(keep[size:]))
        test.append(np.sort(mine[:max_test]))
    return Shares(
        train=Ragged.of(train),
        validation=Ragged.of(held_back),
        test=Ragged.of(test),
        noise=None if assigned.noise is None else torch.from_numpy(assigned.noise),
        redraw_noise=assigned.redraw_noise,
        groups=None if assigned.groups is None else torch.from_numpy(np.asarray(assigned.groups, dtype=np.int64)),
        scheme=assigned.scheme or scheme.text(),
        names=assigned.names,
    )


def _refuse_mixing(dataset: Dataset, scheme: Scheme, test_fraction: float | None) -> None:
    if scheme.name != "natural":
        raise PartitionError(
            f"partition {scheme.text()!r} deals all samples of {dataset.name!r} out, but its test samples stand apart, "
            "each with an owner: leave the partition out, or hand all samples over together"
        )
    if test_fraction is not None:
        raise ConfigError(
            f"test_fraction is {test_fraction}, but the test samples of {dataset.name!r} stand apart: leave it out"
        )


def _pool(dataset: Dataset, test_fraction: float, min_samples: int | None) -> SamplePool:
    regression = dataset.task == "regression"
    return SamplePool(
        name=dataset.name,
        labels=np.zeros(len(dataset.y), dtype=np.int64) if regression else dataset.y.cpu().numpy(),
        class_names=dataset.classes,
        train_count=dataset.train_count,
        test_fraction=test_fraction,
        owner=None if dataset.owner is None else dataset.owner.cpu().numpy(),
        owner_groups=None if dataset.groups is None else dataset.groups.cpu().numpy(),
        superclasses=dataset.superclasses,
        min_samples=min_samples,
        owner_names=dataset.owner_names,
        test_apart=dataset.test_apart,
    )


def _split_test(assigned: Assignment, client: int, fraction: float, seed: int) -> tuple[Indices, Indices]:
    # Sorted first, so that the split depends on which samples a client has and not on the order they were dealt in.
    own = stream(seed, "partition: split", client=client).permutation(np.sort(assigned.parts[client]))
    if assigned.test is not None:
        return own, stream(seed, "partition: test order", client=client).permutation(np.sort(assigned.test[client]))
    size = _part(fraction, len(own))
    return own[size:], own[:size]


def _part(fraction: float, count: int) -> int:
    """Return the size of a part: to the nearest, at least one sample, and at least one left where there are two."""
    return min(max(1, round(fraction * count)), count - 1)


def refuse_too_many(dataset: Dataset, clients: int) -> None:
    """Refuse more clients than the samples are enough for with a ``PartitionError``; this takes no time."""
    count = len(dataset.y)
    if clients * 2 > count:
        raise PartitionError(
            f"{clients} clients cannot share {count} samples of {dataset.name!r}: every client needs one to train on "
            f"and one to test on, so use at most {count // 2} clients"
        )


def _check(
    clients: int,
    test_fraction: float | None,
    validation: float,
    scarcity: int | None,
    max_test: int | None,
    min_samples: int | None,
) -> None:
    if clients < 1:
        raise ConfigError(f"clients is {clients}, but must be at least 1")
    if test_fraction is not None and not 0 < test_fraction < 1:
        raise ConfigError(f"test_fraction is {test_fraction}, but must lie between 0 and 1")
    if not 0 <= validation < 1:
        raise ConfigError(f"validation is {validation}, but must be at least 0 and below 1")
    for name, value, least in (("scarcity", scarcity, 1), ("max_test", max_test, 1), ("min_samples", min_samples, 2)):
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}, but must be at least {least}")


def _check_parts(assigned: Assignment, scheme: Scheme, min_samples: int | None) -> None:
    least = min_samples or (2 if assigned.test is None else 1)
    for client, part in enumerate(assigned.parts):
        size = len(part) + (0 if assigned.test is None else len(assigned.test[client]))
        if len(part) < 1 or size < max(2, least):
            raise PartitionError(
                f"partition {scheme.text()!r}: client {assigned.names[client] if assigned.names else client} would "
                f"have {size} samples and needs {max(2, least)}: {scheme.remedy}"
                + (" or a smaller min_samples" if min_samples else "")
            )
