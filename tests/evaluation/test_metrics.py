"""Metrics of each client, against hand-computed values and scikit-learn on one client at a time."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from coterie.errors import ModelError, UnknownName
from coterie.evaluation import metrics
from coterie.evaluation.metrics import per_client, predictions, segment_mean

NAN = math.nan


def one_hot(labels: list[int], classes: int = 3) -> torch.Tensor:
    return torch.eye(classes, dtype=torch.float64)[torch.tensor(labels)]


def approx(values: list[float]) -> object:
    return pytest.approx(values, rel=1e-12, abs=1e-14, nan_ok=True)


# Client 0: told 0 0 1 2 for 0 1 1 2; client 1: nothing; client 2: all right, one class; client 3: told 2 2 for 0 1.
TOLD, TRUE = one_hot([0, 0, 1, 2, 1, 1, 2, 2]), torch.tensor([0, 1, 1, 2, 1, 1, 0, 1])
OFFSETS = torch.tensor([0, 4, 4, 6, 8])


@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("accuracy", [3 / 4, NAN, 1.0, 0.0]),
        # recalls of client 0: class 0 1/1, class 1 1/2, class 2 1/1
        ("balanced_accuracy", [(1 + 1 / 2 + 1) / 3, NAN, 1.0, 0.0]),
        # F1 of client 0: class 0 precision 1/2 recall 1 -> 2/3; class 1 precision 1 recall 1/2 -> 2/3; class 2 -> 1
        ("macro_f1", [(2 / 3 + 2 / 3 + 1) / 3, NAN, 1.0, 0.0]),
        # one class against the rest, ties count a half: class 0 has 1 positive told 1 and 3 negatives told 1, 0, 0:
        # (1/2 + 2)/3 = 5/6; class 1: positives told 0, 1, negatives 0, 0: (2 * 1/2 + 2)/4 = 3/4; class 2: 1.
        # Client 2 has one class. Client 3 is told the same for both samples: 1/2 each.
        ("auroc", [(5 / 6 + 3 / 4 + 1) / 3, NAN, NAN, 1 / 2]),
    ],
)
def test_multiclass_by_hand(metric, expected):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = per_client(metric, TOLD, TRUE, OFFSETS)
    assert not caught
    assert found.dtype == torch.float64
    assert found.tolist() == approx(expected)


def odds(*chances: float) -> torch.Tensor:
    """Log-odds of class 1."""
    return torch.tensor([math.log(chance / (1 - chance)) for chance in chances], dtype=torch.float64)


def test_calibration_by_hand():
    # Client 0 is told class 1 with 0.9, 0.9, 0.6 and class 0 with 0.7; the second and the last are wrong. Its bins of
    # width 1/15: 0.9 twice (accuracy 1/2), 0.6 (1) and 0.7 (0). Client 1 has no sample, client 2 is surely right.
    outputs, targets = odds(0.9, 0.9, 0.6, 0.3, 0.99), torch.tensor([1, 0, 1, 1, 1])
    offsets = torch.tensor([0, 4, 4, 5])
    ece = 2 / 4 * abs(1 / 2 - 0.9) + 1 / 4 * abs(1 - 0.6) + 1 / 4 * abs(0 - 0.7)
    assert per_client("ece", outputs, targets, offsets).tolist() == approx([ece, NAN, 1 - 0.99])
    brier = (0.1**2 + 0.9**2 + 0.4**2 + 0.7**2) / 4
    assert per_client("brier", outputs, targets, offsets).tolist() == approx([brier, NAN, 0.01**2])
    # The same chances as scores of two classes are the same, and of three classes all count.
    two = torch.stack([torch.zeros_like(outputs), outputs], 1)
    for name in ("ece", "brier"):
        assert per_client(name, two, targets, offsets).tolist() == approx(
            per_client(name, outputs, targets, offsets).tolist()
        )
    three = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    assert per_client("brier", three, torch.tensor([1]), torch.tensor([0, 1])).tolist() == approx([0.25 + 0.49 + 0.04])


def test_bins_hold_their_upper_ends():
    assert metrics.bin_of(torch.tensor([0.0, 0.25, 0.26, 0.5, 1.0]), 4).tolist() == [0, 0, 1, 1, 3]


def test_a_nan_output_has_no_calibration():
    outputs = torch.tensor([NAN, 1.0, 2.0])
    for name in ("ece", "brier"):
        found = per_client(name, outputs, torch.tensor([1, 1, 1]), torch.tensor([0, 2, 3]))
        assert math.isnan(found[0]) and math.isfinite(found[1])


def test_mae_by_hand():
    outputs, targets = torch.tensor([[1.0], [5.0], [2.0]]), torch.tensor([4.0, 1.0, 2.0])
    assert per_client("mae", outputs, targets, torch.tensor([0, 2, 2, 3])).tolist() == approx([(3 + 4) / 2, NAN, 0.0])
    several = per_client("mae", torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]]), torch.tensor([0, 1]))
    assert several.tolist() == approx([(3 + 4) / 2])


@pytest.mark.parametrize("shape", [(-1,), (-1, 1)])
@pytest.mark.parametrize(
    ("metric", "expected"),
    [
        ("accuracy", [2 / 4, 1.0]),
        ("balanced_accuracy", [(1 / 2 + 1 / 2) / 2, 1.0]),
        ("macro_f1", [(1 / 2 + 1 / 2) / 2, 1.0]),
        # positives at 0.5, -1; negatives at 2, -3: of four pairs (0.5 > -3) and (-1 > -3) are in order
        ("auroc", [2 / 4, NAN]),
        # down from the top: a negative, a positive (1 of 2 so far), a positive (2 of 3)
        ("auprc", [(1 / 2 + 2 / 3) / 2, NAN]),
    ],
)
def test_binary_by_hand(metric, expected, shape):
    outputs = torch.tensor([0.5, -1.0, 2.0, -3.0, -0.1]).reshape(shape)
    targets = torch.tensor([1, 1, 0, 0, 0]).reshape(shape)
    assert per_client(metric, outputs, targets, torch.tensor([0, 4, 5])).tolist() == approx(expected)


def test_float_targets_of_a_binary_loss_are_fine():
    found = per_client("accuracy", torch.tensor([1.0, -1.0]), torch.tensor([1.0, 1.0]), torch.tensor([0, 2]))
    assert found.tolist() == [0.5]


def test_rmse_by_hand():
    outputs, targets = torch.tensor([[1.0], [5.0], [2.0]]), torch.tensor([4.0, 1.0, 2.0])
    found = per_client("rmse", outputs, targets, torch.tensor([0, 2, 2, 3]))
    assert found.tolist() == approx([math.sqrt((9 + 16) / 2), NAN, 0.0])
    several = per_client("rmse", torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]]), torch.tensor([0, 1]))
    assert several.tolist() == approx([math.sqrt((9 + 16) / 2)])


def test_nan_output_is_wrong_and_stays_with_its_client():
    outputs = TOLD.clone()
    outputs[6] = NAN
    assert predictions(outputs).tolist() == [0, 0, 1, 2, 1, 1, -1, 2]
    for metric in ("accuracy", "balanced_accuracy", "macro_f1"):
        before, after = per_client(metric, TOLD, TRUE, OFFSETS), per_client(metric, outputs, TRUE, OFFSETS)
        assert after[:3].tolist() == approx(before[:3].tolist())
        assert after[3] == 0
    assert math.isnan(per_client("auroc", outputs, TRUE, OFFSETS)[3])
    assert predictions(torch.tensor([NAN, 0.0, 1.0])).tolist() == [-1, 0, 1]


def test_a_nan_prediction_is_no_class_of_its_own():
    # told -, 1 for 0, 1: F1 of class 0 is 0, of class 1 is 1; the missing answer adds no third class
    outputs = torch.tensor([[NAN, 0.0], [0.0, 1.0]])
    assert per_client("macro_f1", outputs, torch.tensor([0, 1]), torch.tensor([0, 2])).tolist() == [0.5]


def test_infinite_loss_of_one_client_stays_there():
    losses = torch.tensor([1.0, 3.0, math.inf, NAN, 0.5])
    means = segment_mean(losses, torch.tensor([0, 2, 3, 4, 5, 5]))
    assert means.tolist() == approx([2.0, math.inf, NAN, 0.5, NAN])


@st.composite
def federations(draw):
    sizes = draw(st.lists(st.integers(0, 7), min_size=1, max_size=5))
    classes = draw(st.integers(2, 4))
    total = sum(sizes)
    labels = draw(st.lists(st.integers(0, classes - 1), min_size=total, max_size=total))
    numbers = st.floats(-5, 5, width=16)
    outputs = draw(st.lists(st.lists(numbers, min_size=classes, max_size=classes), min_size=total, max_size=total))
    return (
        torch.tensor(outputs, dtype=torch.float64).reshape(total, classes),
        torch.tensor(labels, dtype=torch.int64),
        torch.tensor([0, *np.cumsum(sizes)]),
    )


@given(federations())
@settings(max_examples=40, deadline=None)
def test_against_scikit_learn_and_without_warnings(federation):
    outputs, targets, offsets = federation
    found = {name: per_client(name, outputs, targets, offsets) for name in metrics.names("multiclass")}
    for client in range(len(offsets) - 1):
        here = slice(int(offsets[client]), int(offsets[client + 1]))
        y, told, score = targets[here].numpy(), outputs[here].argmax(1).numpy(), outputs[here].softmax(1).numpy()
        values = {name: float(value[client]) for name, value in found.items()}
        if not len(y):
            assert all(math.isnan(value) for value in values.values())
            continue
        recalls = [np.mean(told[y == label] == label) for label in np.unique(y)]
        with warnings.catch_warnings(action="ignore"):
            f1 = sk.f1_score(y, told, average="macro", zero_division=0)
        assert values["accuracy"] == pytest.approx(np.mean(y == told), rel=1e-12)
        assert values["balanced_accuracy"] == pytest.approx(np.mean(recalls), rel=1e-12)
        assert values["macro_f1"] == pytest.approx(f1, rel=1e-12)
        if len(np.unique(y)) < 2:
            assert math.isnan(values["auroc"]) and math.isnan(values["auprc"])
        else:
            areas = []
            for label in np.unique(y):
                up, down = score[y == label, label], score[y != label, label]
                areas.append(np.mean((up[:, None] > down) + 0.5 * (up[:, None] == down)))
            curves = [sk.roc_auc_score(y == label, score[:, label]) for label in np.unique(y)]
            assert values["auroc"] == pytest.approx(np.mean(areas), rel=1e-12)
            assert values["auroc"] == pytest.approx(np.mean(curves), rel=1e-12)
            precisions = [sk.average_precision_score(y == label, score[:, label]) for label in np.unique(y)]
            assert values["auprc"] == pytest.approx(np.mean(precisions), rel=1e-12)
        brier = sk.brier_score_loss(y, score, labels=np.arange(score.shape[1]))
        assert values["brier"] == pytest.approx(brier, rel=1e-12, abs=1e-14)
        edges, confidence = np.linspace(0, 1, 16), score.max(1)
        ece = 0.0
        for low, high in itertools.pairwise(edges):
            here_too = (confidence > low + 1e-12) & (confidence <= high + 1e-12)
            if here_too.any():
                ece += here_too.mean() * abs((y == told)[here_too].mean() - confidence[here_too].mean())
        assert values["ece"] == pytest.approx(ece, rel=1e-9, abs=1e-12)


@given(federations(), st.integers(0, 10))
@settings(max_examples=25, deadline=None)
def test_a_client_depends_on_its_own_samples_alone(federation, seed):
    outputs, targets, offsets = federation
    changed = outputs.clone()
    begin, end = int(offsets[-2]), int(offsets[-1])
    changed[begin:end] = torch.from_numpy(np.random.default_rng(seed).normal(size=changed[begin:end].shape))
    for name in metrics.names("multiclass"):
        first, second = (per_client(name, values, targets, offsets)[:-1] for values in (outputs, changed))
        assert torch.equal(first.nan_to_num(-1), second.nan_to_num(-1))


def test_registry():
    assert metrics.names("multiclass")[0] == metrics.names("binary")[0] == "accuracy"
    assert metrics.names("regression") == ("rmse", "mae")
    classifying = {"accuracy", "balanced_accuracy", "macro_f1", "auroc", "auprc", "ece", "brier"}
    assert set(metrics.names()) == {*classifying, "rmse", "mae"}
    less = {name for name in metrics.names() if not metrics.get(name).higher_is_better}
    assert less == {"ece", "brier", "rmse", "mae"}
    with pytest.raises(UnknownName, match="did you mean 'accuracy'"):
        per_client("acuracy", TOLD, TRUE, OFFSETS)
    with pytest.raises(UnknownName, match="task"):
        metrics.names("ranking")


@pytest.mark.parametrize(
    ("metric", "outputs", "targets", "offsets"),
    [
        ("accuracy", torch.zeros(3, 2), torch.zeros(4), [0, 3]),
        ("accuracy", torch.zeros(3, 2), torch.zeros(3, 2), [0, 3]),
        ("accuracy", torch.zeros(3, 2, 2), torch.zeros(3), [0, 3]),
        ("rmse", torch.zeros(3, 2), torch.zeros(3), [0, 3]),
        ("rmse", torch.zeros(3), torch.zeros(3, 3), [0, 3]),
        ("accuracy", torch.zeros(3, 2), torch.zeros(3), [0, 2]),
        ("accuracy", torch.zeros(3, 2), torch.zeros(3), [1, 3]),
        ("accuracy", torch.zeros(3, 2), torch.zeros(3), [0, 4, 2, 3]),
        ("accuracy", torch.zeros(3, 2), torch.zeros(3), []),
    ],
)
def test_what_does_not_belong_together(metric, outputs, targets, offsets):
    with pytest.raises(ModelError, match=metric):
        per_client(metric, outputs, targets, torch.tensor(offsets, dtype=torch.int64))
