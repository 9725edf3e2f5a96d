"""Who collaborates with whom: whether collaboration weights show the groups that the data has.

``weights[i, j]`` is how much client ``i`` takes from client ``j`` (FedAMP's xi, FedACS's a). A client's weight on
itself says nothing about groups and is ignored.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.errors import ConfigError


def block_contrast(weights: ArrayLike, groups: ArrayLike) -> float:
    """Mean weight within groups over mean weight between groups, the diagonal left out.

    Parameters
    ----------
    weights
        Collaboration weights ``[clients, clients]``.
    groups
        The group of each client, ``[clients]``.

    Returns
    -------
    float
        1 where groups do not matter, above 1 where a group keeps to itself, infinite where nothing crosses groups,
        and NaN where there is no pair within a group, no pair between groups, or no weight at all.
    """
    matrix, label = _checked(weights, groups)
    same = label[:, None] == label[None, :]
    within, between = same & ~np.eye(len(label), dtype=bool), ~same
    if not within.any() or not between.any():
        return math.nan
    inside, across = float(matrix[within].mean()), float(matrix[between].mean())
    if across == 0:
        return math.inf if inside > 0 else math.nan
    return inside / across


def recover_groups(weights: ArrayLike, count: int) -> NDArray[np.int64]:
    """Cut an agglomerative clustering of the clients into groups.

    Two clients are as near as they weigh each other on average of both directions, since weights that are normalised
    by row are not symmetric; clusters are joined by average linkage.

    Parameters
    ----------
    weights
        Collaboration weights ``[clients, clients]``.
    count
        How many groups to cut into.

    Returns
    -------
    numpy.ndarray
        The group of each client, numbered from 0 in the order of the first client of each.

    Raises
    ------
    ConfigError
        If there are fewer clients than groups, or the weights are not a finite square matrix.
    """
    from scipy.cluster import hierarchy
    from scipy.spatial.distance import squareform

    matrix, _ = _checked(weights, None)
    clients = len(matrix)
    if not 1 <= count <= clients:
        raise ConfigError(f"{clients} clients cannot be cut into {count} groups")
    if clients == 1:
        return np.zeros(1, dtype=np.int64)
    mutual = (matrix + matrix.T) / 2
    pairs = squareform(mutual, checks=False)
    tree = hierarchy.linkage(pairs.max() - pairs, method="average")
    _, firsts, found = np.unique(
        hierarchy.cut_tree(tree, n_clusters=[count])[:, 0], return_index=True, return_inverse=True
    )
    return np.argsort(np.argsort(firsts))[found].astype(np.int64)


def recovery(weights: ArrayLike, groups: ArrayLike) -> float:
    """How well the weights alone recover the groups.

    Parameters
    ----------
    weights
        Collaboration weights ``[clients, clients]``.
    groups
        The group of each client, ``[clients]``.

    Returns
    -------
    float
        The adjusted Rand index between the groups and :func:`recover_groups`: 1 for the same groups under any names,
        about 0 for a cut by chance.
    """
    from sklearn.metrics import adjusted_rand_score

    matrix, label = _checked(weights, groups)
    return float(adjusted_rand_score(label, recover_groups(matrix, len(np.unique(label)))))


def _checked(weights: ArrayLike, groups: ArrayLike | None) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    matrix = np.asarray(weights, dtype=np.float64)
    label = np.zeros(len(matrix), dtype=np.int64) if groups is None else np.asarray(groups)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not np.isfinite(matrix).all():
        raise ConfigError(f"collaboration weights must be a finite square matrix, not one of shape {matrix.shape}")
    if label.shape != (len(matrix),):
        raise ConfigError(f"{len(matrix)} clients need one group each, not groups of shape {label.shape}")
    return matrix, label
