"""Metrics of each client, from the outputs for all clients' samples laid end to end.

``offsets`` says where each client's samples begin, and where the last client's end. Accuracy, RMSE and means are
computed for all clients at once; balanced accuracy and macro F1 by scikit-learn and AUROC from SciPy's ranks, client by
client. A metric that is undefined for a client (it has no sample; AUROC and AUPRC with one class) is NaN there, and
never a warning. An output that is NaN is a wrong answer to accuracy, balanced accuracy and macro F1, and makes the
other metrics NaN.

Multi-class outputs are scores ``[samples, classes]`` before any softmax; binary outputs are log-odds ``[samples]`` or
``[samples, 1]``, positive for class 1.
"""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coterie.errors import ModelError, UnknownName
from coterie.tasks import TASKS

BINS = 15
"""Bins of confidence, of equal width, in the expected calibration error."""


@dataclass(frozen=True)
class Metric:
    """A metric by name.

    Parameters
    ----------
    name
        Its name.
    summary
        What it is, in one line.
    higher_is_better
        Whether more is better.
    tasks
        The tasks it fits.
    compute
        From outputs, targets and offsets to one float64 number a client.
    most
        The largest value that it can have; the smallest is 0.
    """

    name: str
    summary: str
    higher_is_better: bool
    tasks: frozenset[str]
    compute: Callable[[Tensor, Tensor, Tensor], Tensor]
    most: float = 1.0


def segment_mean(values: Tensor, offsets: Tensor) -> Tensor:
    """Mean over each client's samples, for instance of their losses.

    Parameters
    ----------
    values
        One number a sample, ``[samples]``, or several.
    offsets
        Where each client's samples begin and the last one's end, ``[clients + 1]``.

    Returns
    -------
    Tensor
        Float64 means, one a client, NaN for a client without samples. A client's mean does not depend on the
        others' values, not even where those are infinite.
    """
    return torch.segment_reduce(values.double(), "mean", offsets=offsets.to(values.device, torch.int64))


def predictions(outputs: Tensor) -> Tensor:
    """Give the predicted class of each sample, -1 where an output is NaN."""
    scores = _squeezed(outputs)
    if scores.dim() == 1:
        return (scores > 0).long().masked_fill(scores.isnan(), -1)
    return scores.argmax(1).masked_fill(scores.isnan().any(1), -1)


def _squeezed(outputs: Tensor) -> Tensor:
    return outputs.squeeze(1) if outputs.dim() == 2 and outputs.shape[1] == 1 else outputs


def _accuracy(outputs: Tensor, targets: Tensor, offsets: Tensor) -> Tensor:
    return segment_mean(predictions(outputs) == _squeezed(targets), offsets)


def _probabilities(outputs: Tensor) -> Tensor:
    """Give the probability of each class ``[samples, classes]``, of two classes where outputs are log-odds."""
    scores = _squeezed(outputs).double()
    if scores.dim() == 1:
        return torch.stack([torch.sigmoid(-scores), torch.sigmoid(scores)], 1)
    return scores.softmax(1)


def confidences(outputs: Tensor) -> Tensor:
    """Give the probability of the class that is predicted for each sample, NaN where an output is NaN."""
    return _probabilities(outputs).amax(1)


def answers(outputs: Tensor, targets: Tensor) -> Tensor:
    """Give the confidence of each sample as float32, with a minus sign if what was predicted is wrong."""
    confidence = confidences(outputs).float()
    return torch.where(predictions(outputs) == _squeezed(targets), confidence, -confidence)


def bin_of(confidence: Tensor, bins: int = BINS) -> Tensor:
    """Give the bin of each confidence: the k-th of so many reaches from above k/bins up to (k+1)/bins."""
    # 1/3 of 15 bins is 5, whichever way the division was rounded.
    return ((confidence * bins - 1e-9).ceil().nan_to_num(1.0) - 1).clamp(0, bins - 1).long()


def _ece(outputs: Tensor, targets: Tensor, offsets: Tensor) -> Tensor:
    # Within a bin of n_b of a client's n samples, n_b/n |accuracy - confidence| is |sum of (right - confidence)| / n.
    confidence = confidences(outputs)
    gap = (predictions(outputs) == _squeezed(targets)).double() - confidence
    in_bins = gap[:, None] * torch.nn.functional.one_hot(bin_of(confidence), BINS)
    return segment_mean(in_bins, offsets).abs().sum(1)


def _brier(outputs: Tensor, targets: Tensor, offsets: Tensor) -> Tensor:
    chances = _probabilities(outputs)
    told = torch.nn.functional.one_hot(_squeezed(targets).long(), chances.shape[1])
    squares = (chances - told).square().sum(1)
    # Two classes miss by the same: as people do, only one of them is counted.
    return segment_mean(squares / 2 if chances.shape[1] == 2 else squares, offsets)


def _mae(outputs: Tensor, targets: Tensor, offsets: Tensor) -> Tensor:
    errors = (_squeezed(outputs).double() - _squeezed(targets).double()).abs()
    return segment_mean(errors if errors.dim() == 1 else errors.flatten(1).mean(1), offsets)


def _rmse(outputs: Tensor, targets: Tensor, offsets: Tensor) -> Tensor:
    squares = (_squeezed(outputs).double() - _squeezed(targets).double()).square()
    return segment_mean(squares if squares.dim() == 1 else squares.flatten(1).mean(1), offsets).sqrt()


def _by_client(
    one: Callable[[NDArray[Any], NDArray[Any]], float], outputs: Tensor, targets: Tensor, offsets: Tensor
) -> Tensor:
    found, wanted, bounds = outputs.cpu().numpy(), targets.cpu().numpy(), offsets.tolist()
    out = np.full(len(bounds) - 1, np.nan)
    # scikit-learn warns where a client holds few classes, which is what a personalised federation is made of.
    with warnings.catch_warnings(action="ignore"):
        for client, (begin, end) in enumerate(itertools.pairwise(bounds)):
            if end > begin:
                out[client] = one(found[begin:end], wanted[begin:end])
    return torch.from_numpy(out).to(outputs.device)


# scikit-learn and scipy.stats take longer to import than most of the package, so only their users do.


def _balanced_accuracy(outputs: Tensor, targets: Tensor, offsets: Tensor) -> Tensor:
    from sklearn import metrics as sk

    def one(found: NDArray[Any], wanted: NDArray[Any]) -> float:
        return float(sk.balanced_accuracy_score(wanted, found))

    return _by_client(one, predictions(outputs), _squeezed(targets).long(), offsets)


def _macro_f1(outputs: Tensor, targets: Tensor, offsets: Tensor) -> Tensor:
    from sklearn import metrics as sk

    def one(found: NDArray[Any], wanted: NDArray[Any]) -> float:
        classes = np.union1d(found, wanted)
        return float(sk.f1_score(wanted, found, labels=classes[classes >= 0], average="macro", zero_division=0))

    return _by_client(one, predictions(outputs), _squeezed(targets).long(), offsets)


def _auroc(outputs: Tensor, targets: Tensor, offsets: Tensor) -> Tensor:
    from scipy import stats

    def one(found: NDArray[Any], wanted: NDArray[Any], classes: NDArray[Any]) -> float:
        # The Mann-Whitney form of the area, all classes in one ranking: a curve for each class takes a hundred times
        # as long, and with many small clients nothing but overhead.
        score = found[:, None] if found.ndim == 1 else found[:, classes]
        positive = wanted[:, None] == (classes[-1:] if found.ndim == 1 else classes)
        ups = positive.sum(0)
        ranks = np.where(positive, stats.rankdata(score, axis=0), 0.0).sum(0)
        return float(np.mean((ranks - ups * (ups + 1) / 2) / (ups * (len(wanted) - ups))))

    return _by_curve(one, outputs, targets, offsets)


def _auprc(outputs: Tensor, targets: Tensor, offsets: Tensor) -> Tensor:
    def one(found: NDArray[Any], wanted: NDArray[Any], classes: NDArray[Any]) -> float:
        if found.ndim == 1:
            return _average_precision(found, wanted == classes[-1])
        return float(np.mean([_average_precision(found[:, each], wanted == each) for each in classes]))

    return _by_curve(one, outputs, targets, offsets)


def _by_curve(
    area: Callable[[NDArray[Any], NDArray[Any], NDArray[Any]], float], outputs: Tensor, targets: Tensor, offsets: Tensor
) -> Tensor:
    """Take an area of each client's scores, labels and the classes among them; of one class there is no curve."""
    scores = _squeezed(outputs).double()

    def one(found: NDArray[Any], wanted: NDArray[Any]) -> float:
        classes = np.unique(wanted)
        return float("nan") if len(classes) < 2 or np.isnan(found).any() else area(found, wanted, classes)

    return _by_client(one, scores.softmax(1) if scores.dim() == 2 else scores, _squeezed(targets).long(), offsets)


def _average_precision(scores: NDArray[Any], positive: NDArray[np.bool_]) -> float:
    """Take the mean, over positive samples, of the precision among all that score at least as high."""
    ups, everyone = np.sort(scores[positive]), np.sort(scores)
    ahead = len(ups) - np.searchsorted(ups, ups)
    return float(np.mean(ahead / (len(everyone) - np.searchsorted(everyone, ups))))


_CLASSES, _NUMBERS = frozenset({"multiclass", "binary"}), frozenset({"regression"})
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("accuracy", "fraction of samples whose class is predicted", True, _CLASSES, _accuracy),
        Metric("balanced_accuracy", "mean recall over the classes the client has", True, _CLASSES, _balanced_accuracy),
        Metric("macro_f1", "mean F1 over the classes the client has or is told", True, _CLASSES, _macro_f1),
        Metric("auroc", "area under the ROC curve, mean of one class against the rest", True, _CLASSES, _auroc),
        Metric("auprc", "average precision, mean of one class against the rest", True, _CLASSES, _auprc),
        Metric("ece", f"expected calibration error over {BINS} bins of equal width", False, _CLASSES, _ece),
        Metric("brier", "Brier score: mean squared error of the probabilities", False, _CLASSES, _brier, 2.0),
        Metric("rmse", "root of the mean squared error", False, _NUMBERS, _rmse, math.inf),
        Metric("mae", "mean absolute error", False, _NUMBERS, _mae, math.inf),
    )
}
"""The metrics by name."""


def names(task: str | None = None) -> tuple[str, ...]:
    """Give the names of the metrics, or of those that fit a task; the first is the usual one for it."""
    if task is not None and task not in TASKS:
        raise UnknownName("task", task, TASKS)
    return tuple(name for name, metric in METRICS.items() if task is None or task in metric.tasks)


def get(name: str) -> Metric:
    if name not in METRICS:
        raise UnknownName("metric", name, METRICS)
    return METRICS[name]


def usual(name: str) -> str:
    """Give the usual metric of the task that a metric is for."""
    return TASKS[min(get(name).tasks)].metric


def per_client(metric: str, outputs: Tensor, targets: Tensor, offsets: Tensor) -> Tensor:
    """Compute a metric for each client.

    Parameters
    ----------
    metric
        The metric's name.
    outputs
        The model's outputs for all clients' samples, end to end: ``[samples, classes]`` or ``[samples]``.
    targets
        What they should be: class numbers ``[samples]``, or for ``rmse`` and ``mae`` numbers of the outputs' shape.
    offsets
        Where each client's samples begin and the last one's end, ``[clients + 1]``.

    Returns
    -------
    Tensor
        A float64 vector ``[clients]`` on the outputs' device, NaN where the metric is undefined.

    Raises
    ------
    ModelError
        If the outputs, targets and offsets do not belong together.

    Examples
    --------
    >>> outputs = torch.tensor([[2.0, 1.0], [0.0, 3.0], [1.0, 0.0]])
    >>> per_client("accuracy", outputs, torch.tensor([0, 1, 1]), torch.tensor([0, 2, 3]))
    tensor([1., 0.], dtype=torch.float64)
    """
    chosen = get(metric)
    found, wanted = _squeezed(outputs), _squeezed(targets)
    # Class metrics compare one number a sample, errors any number of them; broadcasting would hide a mistake.
    expected = found.shape if "regression" in chosen.tasks else found.shape[:1]
    if wanted.shape != expected or found.dim() not in (1, 2):
        raise ModelError(
            f"metric {metric!r} cannot compare outputs of shape {tuple(outputs.shape)} with targets of shape "
            f"{tuple(targets.shape)}"
        )
    if (
        offsets.numel() < 1
        or int(offsets[0]) != 0
        or int(offsets[-1]) != len(found)
        or bool((offsets.diff() < 0).any())
    ):
        raise ModelError(f"metric {metric!r}: offsets must rise from 0 to the {len(found)} samples there are")
    return chosen.compute(outputs, targets, offsets)
