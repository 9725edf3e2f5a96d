"""The three tasks from a file to the records: each number found anew with scikit-learn on the stored models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
import torch
from PIL import Image
from sklearn import metrics as sk
from torch import nn

import coterie
from coterie import models, randomness
from coterie.config import from_mapping
from coterie.results import Result
from coterie.runs.builder import make_population
from tests.runs.test_resume import last_state

CLIENTS, ROWS = 4, 40
FEATURES = ["age", "pressure", "dose"]
Floats = npt.NDArray[np.float64]


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table with a client column, and a label for each task that a linear rule of the client's own gives."""
    draw = randomness.stream(5, "test table")
    frame = pd.DataFrame(draw.normal(size=(CLIENTS * ROWS, 3)) * [10, 20, 1] + [50, 120, 0], columns=FEATURES)
    frame["hospital"] = np.repeat(["west", "north", "south", "east"], ROWS)
    scaled = (frame[FEATURES] - [50, 120, 0]) / [10, 20, 1]
    rule = draw.normal(size=(3, 3))
    noise = 0.3 * draw.normal(size=(CLIENTS * ROWS, 3))
    scores = scaled.to_numpy() @ rule + noise
    frame["kind"] = np.array(["mild", "plain", "severe"])[scores.argmax(1)]
    frame["outcome"] = (scores[:, 0] > 0).astype(int)
    frame["cost"] = scores[:, 1]
    path = tmp_path_factory.mktemp("table") / "patients.csv"
    frame.to_csv(path, index=False)
    return path


def run(path: Path, table: Path, label: str, task: str, **more: Any) -> Result:
    drop = "+".join(sorted({"kind", "outcome", "cost"} - {label}))
    settings: dict[str, Any] = {
        "data": f"table:{table},label={label},client=hospital,task={task},drop={drop}",
        "partition": "natural",
        "clients": CLIENTS,
        "rounds": 3,
        "test_fraction": 0.4,
        "model": "linear",
        "dtype": "float64",
        "out": path,
        "progress": False,
    }
    return coterie.run("local", **settings | more)


def outputs(result: Result, table: Path, label: str, width: int) -> list[tuple[Floats, npt.NDArray[Any]]]:
    """Each client's test rows through its stored model, from the file on by NumPy."""
    frame = pd.read_csv(table)
    x = frame[FEATURES].to_numpy(dtype=np.float32).astype(np.float64)
    rows = last_state(result.path).clients["w"].numpy()
    shares = make_population(from_mapping(result.config)).shares
    hospitals = sorted(frame["hospital"].unique())
    found = []
    for client in range(CLIENTS):
        index = shares.test[client].numpy()
        assert set(frame["hospital"].iloc[index]) == {hospitals[client]}
        own = x[shares.train[client].numpy()]  # what is scaled by: the client's training rows alone
        scaled = (x - own.mean(0)) / own.std(0)
        weight, bias = rows[client][: 3 * width].reshape(width, 3), rows[client][3 * width :]
        found.append((scaled[index] @ weight.T + bias, frame[label].to_numpy()[index]))
    return found


def recorded(result: Result, metric: str) -> Floats:
    frame = result.metrics.query(f"model == 'personal' and split == 'test' and metric == '{metric}' and round == 3")
    assert frame["client"].tolist() == list(range(CLIENTS))
    return frame["value"].to_numpy()


def check(result: Result, wanted: dict[str, list[float]]) -> None:
    for metric, values in wanted.items():
        assert recorded(result, metric) == pytest.approx(values, abs=1e-6), metric
        assert len(set(values)) > 1, f"{metric}: clients must differ for this to mean anything"


def softmax(scores: Floats) -> Floats:
    grown = np.exp(scores - scores.max(1, keepdims=True))
    return grown / grown.sum(1, keepdims=True)


CLASSIFYING = ["accuracy", "balanced_accuracy", "macro_f1", "auroc"]


def test_multiclass(table: Path, tmp_path: Path) -> None:
    result = run(tmp_path / "run", table, "kind", "multiclass", metrics=CLASSIFYING, settings={"lr": 0.02})
    names = ["mild", "plain", "severe"]
    wanted: dict[str, list[float]] = {name: [] for name in ("loss", *CLASSIFYING)}
    for scores, labels in outputs(result, table, "kind", 3):
        truth, told = np.array([names.index(label) for label in labels]), scores.argmax(1)
        assert set(truth) == {0, 1, 2}
        wanted["loss"].append(sk.log_loss(truth, softmax(scores)))
        wanted["accuracy"].append(sk.accuracy_score(truth, told))
        wanted["balanced_accuracy"].append(sk.balanced_accuracy_score(truth, told))
        wanted["macro_f1"].append(sk.f1_score(truth, told, average="macro"))
        wanted["auroc"].append(sk.roc_auc_score(truth, softmax(scores), multi_class="ovr"))
    check(result, wanted)
    assert result.summary["metric"] == "accuracy" and result.summary["higher_is_better"] is True
    assert result.summary["personal"]["final"]["mean"] == pytest.approx(np.mean(wanted["accuracy"]), abs=1e-12)


@pytest.mark.parametrize("first", CLASSIFYING)
def test_binary_with_any_metric_first(first: str, table: Path, tmp_path: Path) -> None:
    order = [first, *(name for name in CLASSIFYING if name != first)]
    result = run(tmp_path / "run", table, "outcome", "binary", metrics=order, settings={"lr": 0.01})
    wanted: dict[str, list[float]] = {name: [] for name in ("loss", *CLASSIFYING)}
    for scores, truth in outputs(result, table, "outcome", 1):
        odds, told = scores[:, 0], (scores[:, 0] > 0).astype(int)
        wanted["loss"].append(sk.log_loss(truth, 1 / (1 + np.exp(-odds))))
        wanted["accuracy"].append(sk.accuracy_score(truth, told))
        wanted["balanced_accuracy"].append(sk.balanced_accuracy_score(truth, told))
        wanted["macro_f1"].append(sk.f1_score(truth, told, average="macro"))
        wanted["auroc"].append(sk.roc_auc_score(truth, odds))
    check(result, wanted)
    assert result.summary["metric"] == first
    assert result.summary["personal"]["final"]["mean"] == pytest.approx(np.mean(wanted[first]), abs=1e-12)
    assert result.summary["personal"]["final"]["worst"] == pytest.approx(min(wanted[first]), abs=1e-12)


def test_regression(table: Path, tmp_path: Path) -> None:
    result = run(tmp_path / "run", table, "cost", "regression")
    pairs = outputs(result, table, "cost", 1)
    errors = [float(np.sqrt(sk.mean_squared_error(truth, scores[:, 0]))) for scores, truth in pairs]
    check(result, {"rmse": errors, "loss": [error**2 / 2 for error in errors]})
    assert result.summary["metric"] == "rmse" and result.summary["higher_is_better"] is False
    final = result.summary["personal"]["final"]
    assert final["worst"] == pytest.approx(max(errors), abs=1e-6)
    # Three rounds of training must have made use of the features: the labels' own spread is the error of the mean.
    assert final["mean"] < np.mean([truth.std() for _, truth in pairs])
    by_round = result.metrics.query("model == 'personal' and split == 'test' and metric == 'rmse'")
    means = by_round.groupby("round")["value"].mean()
    assert result.summary["personal"]["best_oracle"] == {"mean": pytest.approx(means.min()), "round": means.idxmin()}


LOSSES = """
import torch

def absolute(outputs, targets):
    return (outputs.squeeze(-1) - targets).abs()

def hinge(outputs, targets):
    return torch.relu(1 - outputs.squeeze(-1) * (2 * targets.to(outputs.dtype) - 1))
"""


@pytest.mark.parametrize(
    ("label", "task", "loss", "by_hand"),
    [
        ("cost", "regression", "absolute", lambda scores, truth: sk.mean_absolute_error(truth, scores[:, 0])),
        ("outcome", "binary", "hinge", lambda scores, truth: sk.hinge_loss(2 * truth - 1, scores[:, 0])),
    ],
)
def test_a_loss_of_the_users_own(
    label: str,
    task: str,
    loss: str,
    by_hand: Callable[[Floats, npt.NDArray[Any]], float],
    table: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "coterie_own_losses.py").write_text(LOSSES)
    monkeypatch.syspath_prepend(str(tmp_path))
    more: dict[str, Any] = {"settings": {"lr": 0.05, "local_epochs": 20}}
    result = run(tmp_path / "run", table, label, task, loss=f"import:coterie_own_losses:{loss}", **more)
    usual = run(tmp_path / "usual", table, label, task, **more)
    pairs, others = outputs(result, table, label, 1), outputs(usual, table, label, 1)
    check(result, {"loss": [by_hand(scores, truth) for scores, truth in pairs]})
    assert not np.allclose(pairs[0][0], others[0][0]), "the loss must have been trained on, and not only recorded"


@pytest.mark.parametrize(("task", "loss"), [("binary", "binary"), ("regression", "squared_error")])
def test_losses_by_name_are_the_tasks_own(task: str, loss: str, table: Path, tmp_path: Path) -> None:
    label = {"binary": "outcome", "regression": "cost"}[task]
    named, usual = (
        run(tmp_path / name, table, label, task, loss=given, rounds=1) for name, given in (("a", loss), ("b", None))
    )
    pd.testing.assert_frame_equal(named.metrics, usual.metrics, check_exact=True)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_an_mlp_on_a_table(engine: str, table: Path, tmp_path: Path) -> None:
    result = run(tmp_path / "run", table, "kind", "multiclass", model="mlp:hidden=7", engine=engine)
    frame = pd.read_csv(table)
    x = frame[FEATURES].to_numpy(dtype=np.float32).astype(np.float64)
    shares = make_population(from_mapping(result.config)).shares
    rows = last_state(result.path).clients["w"]
    wanted = []
    for client in range(CLIENTS):
        module = models.build("mlp:hidden=7", (3,), 3).double()
        nn.utils.vector_to_parameters(rows[client], module.parameters())
        index = shares.test[client]
        own = x[shares.train[client].numpy()]
        inputs = torch.from_numpy((x[index.numpy()] - own.mean(0)) / own.std(0))
        told = module(inputs).argmax(1).numpy()
        truth = frame["kind"].to_numpy()[index]
        wanted.append(sk.accuracy_score(truth, np.array(["mild", "plain", "severe"])[told]))
    assert recorded(result, "accuracy") == pytest.approx(wanted, abs=1e-12)


@pytest.mark.filterwarnings("ignore:auroc is not defined")
def test_a_folder_of_images_with_a_convolution(tmp_path: Path) -> None:
    draw = randomness.stream(3, "test images")
    for name, low in (("dark", 0), ("light", 128)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for number in range(20):
            pixels = draw.integers(low, low + 128, size=(12, 12), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{number}.png")
    result = coterie.run(
        "fedavg",
        data=f"folder:{tmp_path / 'images'},task=binary",
        partition="iid",
        clients=4,
        rounds=4,
        model="cnn_small",
        metrics=["auroc", "accuracy"],
        settings={"lr": 0.1, "batch_size": 4},
        out=tmp_path / "run",
        progress=False,
    )
    # Every light pixel is lighter than every dark one, so a model that has learnt anything ranks all samples right.
    assert result.summary["metric"] == "auroc" and result.summary["global"]["final"]["mean"] == 1.0
