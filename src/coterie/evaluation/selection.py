"""Choosing between models: personal or global for each client, and the best round of a run.

What is chosen on validation data may be reported. What is chosen on test data is an upper bound; papers report it, so
it is available, and its name says ``oracle``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from coterie.errors import ConfigError


@dataclass(frozen=True)
class HybridChoice:
    """The hybrid model: for each client the better of its personal and the global model.

    Parameters
    ----------
    personal
        Booleans ``[clients]``: where the personal model was chosen.
    accuracy
        Test accuracy of the chosen model, ``[clients]``.
    """

    personal: Tensor
    accuracy: Tensor

    @property
    def mean(self) -> float:
        """Unweighted mean accuracy over clients."""
        return float(self.accuracy.double().mean())


def hybrid_oracle(personal: Tensor, global_: Tensor) -> HybridChoice:
    """Choose on the test data themselves, as FLAME's code does.

    Parameters
    ----------
    personal
        Test accuracy of each client's personal model.
    global_
        Test accuracy of the global model on each client's test data.

    Returns
    -------
    HybridChoice
        The larger of the two for every client; the personal model where they are equal.
    """
    _same_shape(personal, global_)
    better = personal >= global_
    return HybridChoice(better, torch.where(better, personal, global_))


def hybrid_validation(
    personal: Tensor,
    global_: Tensor,
    *,
    personal_validation: Tensor,
    global_validation: Tensor,
    personal_loss: Tensor,
    global_loss: Tensor,
) -> HybridChoice:
    """Choose on validation data, the client's own and never trained on.

    Parameters
    ----------
    personal
        Test accuracy of each client's personal model; it plays no part in the choice.
    global_
        Test accuracy of the global model on each client's test data; nor does this.
    personal_validation
        Validation accuracy of each client's personal model.
    global_validation
        Validation accuracy of the global model.
    personal_loss
        Validation loss of each client's personal model, which decides where accuracies are equal.
    global_loss
        Validation loss of the global model.

    Returns
    -------
    HybridChoice
        The choice and its test accuracy. Where accuracy and loss are equal, and where a client has no validation data
        (NaN), it is the personal model.
    """
    _same_shape(personal, global_, personal_validation, global_validation, personal_loss, global_loss)
    tied = personal_validation == global_validation
    to_global = (global_validation > personal_validation) | (tied & (global_loss < personal_loss))
    return HybridChoice(~to_global, torch.where(to_global, global_, personal))


def best_round(scores: Tensor, *, higher_is_better: bool = True) -> int:
    """Find the best of the evaluated rounds by the unweighted mean over clients.

    Given validation scores this is ``best``; given test scores it is ``best_oracle`` (the BMTA of FedAMP's tables is
    the mean at that round).

    Parameters
    ----------
    scores
        ``[rounds]``, or ``[rounds, clients]``, where NaN is a client without a score.
    higher_is_better
        Whether more is better.

    Returns
    -------
    int
        The place of the round among those evaluated, the first of equals; a round that has no finite mean is never it.

    Raises
    ------
    ConfigError
        If no round has a score, for instance because no validation data were held out.
    """
    means = scores.double()
    means = means.nanmean(1) if means.dim() == 2 else means
    worst = float("-inf") if higher_is_better else float("inf")
    usable = means.isfinite()
    if not bool(usable.any()):
        raise ConfigError(
            "no evaluated round has a score to choose by: hold out validation data with --validation above 0, or read "
            "the oracle's choice on test data"
        )
    means = torch.where(usable, means, worst)
    # argmax does not promise the first of equals on every device.
    best = means == (means.max() if higher_is_better else means.min())
    return int(best.nonzero()[0, 0])


def _same_shape(*values: Tensor) -> None:
    shapes = {tuple(value.shape) for value in values}
    if len(shapes) != 1 or len(next(iter(shapes))) != 1:
        raise ConfigError(f"hybrid selection needs one number a client from each model, not shapes {sorted(shapes)}")
