"""Measures of the accuracy matrix: ``A[i, k]`` is personal model ``i`` on client ``k``'s test data.

- L-acc of client ``i`` is ``A[i, i]``: how well its model fits its own data;
- G-acc is the mean of row ``i``: how well it does on everybody's;
- S-acc(c) is the mean over ``i`` itself and a fixed random set of ``round(c (m - 1))`` other clients, so that
  S-acc(0) is L-acc and S-acc(1) is G-acc, exactly.

Each entry is an accuracy on all test samples of one client, and clients count the same, whether they have many or few.
The sets grow with ``c``: those of a smaller ``c`` lie in those of a larger one, so a curve over ``c`` is about ``c``
and not about the draw.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from coterie.errors import ConfigError
from coterie.randomness import stream


@dataclass(frozen=True)
class Spread:
    """A number for each client, and its mean and standard deviation over clients as the tables print them.

    Parameters
    ----------
    values
        One float64 number a client.
    """

    values: Tensor

    @property
    def mean(self) -> float:
        """Unweighted mean over clients."""
        return float(self.values.mean())

    @property
    def std(self) -> float:
        """Standard deviation over clients: they are all there are, so it is the population's (ddof 0)."""
        return float(self.values.std(correction=0))


@dataclass(frozen=True)
class MatrixSummary:
    """The measures of one accuracy matrix, as FedPG's tables print them.

    Parameters
    ----------
    local
        L-acc.
    synthetic
        S-acc for each ``c`` asked for.
    everyone
        G-acc.
    global_model
        The global model on each client's test data, where there is one.
    """

    local: Spread
    synthetic: dict[float, Spread]
    everyone: Spread
    global_model: Spread | None


def s_acc_clients(clients: int, fraction: float, seed: int) -> Tensor:
    """Draw the clients on whose test data each personal model is tested for S-acc.

    Parameters
    ----------
    clients
        How many clients there are.
    fraction
        The fraction ``c`` of the other clients, between 0 and 1.
    seed
        The experiment's seed.

    Returns
    -------
    Tensor
        Booleans ``[clients, clients]``: row ``i`` marks ``i`` and the others that were drawn for it.

    Raises
    ------
    ConfigError
        If the fraction is out of range.
    """
    if not 0 <= fraction <= 1:
        raise ConfigError(f"the fraction of S-acc must be between 0 and 1, not {fraction}")
    count = round(fraction * (clients - 1))
    chosen = np.eye(clients, dtype=bool)
    for client in range(clients):
        others = np.delete(np.arange(clients), client)
        chosen[client, stream(seed, "s-acc", client=client).permutation(others)[:count]] = True
    return torch.from_numpy(chosen)


def _mean_over(matrix: Tensor, chosen: Tensor) -> Tensor:
    # One sum in one memory order for all three, so that S-acc(0) = L-acc and S-acc(1) = G-acc to the last bit.
    return torch.where(chosen, matrix.double(), 0.0).contiguous().sum(1) / chosen.sum(1)


def s_acc(matrix: Tensor, fraction: float, seed: int) -> Tensor:
    """Mean accuracy of each personal model on its own and some others' test data.

    Parameters
    ----------
    matrix
        The accuracy matrix ``[clients, clients]``.
    fraction
        The fraction ``c`` of the other clients, between 0 and 1.
    seed
        The experiment's seed.

    Returns
    -------
    Tensor
        A float64 vector ``[clients]``.

    Raises
    ------
    ConfigError
        If the matrix is not square, or the fraction is out of range.
    """
    if matrix.dim() != 2 or matrix.shape[0] != matrix.shape[1]:
        raise ConfigError(f"an accuracy matrix has a row and a column for each client, not shape {tuple(matrix.shape)}")
    return _mean_over(matrix, s_acc_clients(matrix.shape[0], fraction, seed).to(matrix.device))


def l_acc(matrix: Tensor) -> Tensor:
    """Accuracy of each personal model on its own client's test data.

    Parameters
    ----------
    matrix
        The accuracy matrix ``[clients, clients]``.

    Returns
    -------
    Tensor
        A float64 vector ``[clients]``.
    """
    return _mean_over(matrix, torch.eye(len(matrix), dtype=torch.bool, device=matrix.device))


def g_acc(matrix: Tensor) -> Tensor:
    """Mean accuracy of each personal model on all clients' test data.

    Parameters
    ----------
    matrix
        The accuracy matrix ``[clients, clients]``.

    Returns
    -------
    Tensor
        A float64 vector ``[clients]``.
    """
    return _mean_over(matrix, torch.ones_like(matrix, dtype=torch.bool))


def summarise_matrix(
    matrix: Tensor, seed: int, fractions: tuple[float, ...] = (0.5,), global_accuracy: Tensor | None = None
) -> MatrixSummary:
    """Compute every measure of an accuracy matrix.

    Parameters
    ----------
    matrix
        The accuracy matrix ``[clients, clients]``.
    seed
        The experiment's seed.
    fractions
        The fractions ``c`` of S-acc.
    global_accuracy
        The global model's accuracy on each client's test data, where there is a global model.

    Returns
    -------
    MatrixSummary
        L-acc, S-acc, G-acc and the global model's row.
    """
    return MatrixSummary(
        Spread(l_acc(matrix)),
        {fraction: Spread(s_acc(matrix, fraction, seed)) for fraction in fractions},
        Spread(g_acc(matrix)),
        None if global_accuracy is None else Spread(global_accuracy.double()),
    )
