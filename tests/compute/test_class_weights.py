"""Class weights: training takes the steps of PyTorch's own weighted losses, with scikit-learn's own weights."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor, nn

from coterie.algorithms.base import Batch, ClientContext, Fold, FullPass, Message, Task
from coterie.compute.batched import BatchedEngine
from coterie.compute.class_weights import ClassWeights, balanced
from coterie.compute.engine import Call
from coterie.compute.samples import Samples
from coterie.config import from_mapping
from coterie.errors import ConfigError
from coterie.models.problem import Problem
from coterie.rows import Rows
from coterie.runs.model_builder import make_engine
from coterie.runs.population import make_population
from tests.support import DEVICE, ENGINES, classification, play, simulate, small_model

WEIGHTS = torch.tensor([[1.0, 4.0, 0.25], [3.0, 1.0, 2.0], [0.5, 0.5, 5.0], [1.0, 1.0, 1.0], [2.0, 7.0, 1.0]])


def weighted(samples: Samples, values: Tensor = WEIGHTS) -> Samples:
    return replace(samples, class_weights=ClassWeights.of(values.to(DEVICE, torch.float64), samples))


def mine(samples: Samples, client: int, split: Literal["train", "validation"] = "train") -> tuple[Tensor, Tensor]:
    index = samples.splits[split][client]
    return samples.x[index], samples.y[index]


def test_balanced_is_scikit_learns() -> None:
    y = np.array([0] * 7 + [2] * 2 + [3])
    found = balanced(torch.tensor([[7, 0, 2, 1], [0, 0, 0, 0], [5, 5, 5, 5]]))
    wanted = compute_class_weight("balanced", classes=np.unique(y), y=y)
    np.testing.assert_allclose(found[0, [0, 2, 3]].numpy(), wanted, rtol=1e-12)
    assert found[0, 1] == 1 and found[1:].tolist() == [[1.0] * 4] * 2


@pytest.mark.parametrize("engine", ENGINES)
def test_a_step_on_all_samples_is_that_of_pytorchs_weighted_mean(engine: str) -> None:
    samples, module = classification(), small_model().double().to(DEVICE)
    settings = {"lr": 0.3, "batch_size": 0, "local_epochs": 2}
    found = simulate(
        "local", weighted(samples), copy.deepcopy(module), task="multiclass", engine=engine, settings=settings
    )
    play(found, 1)
    for client in range(5):
        own = copy.deepcopy(module)
        x, y = mine(samples, client)
        optimiser = torch.optim.SGD(own.parameters(), lr=0.3)
        for _ in range(2):
            optimiser.zero_grad()
            nn.CrossEntropyLoss(weight=WEIGHTS[client].double().to(DEVICE))(own(x), y).backward()
            optimiser.step()
        wanted = torch.cat([value.detach().flatten() for value in own.parameters()])
        torch.testing.assert_close(found.clients.rows["w"][client], wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_weight_of_a_sample_alone_in_its_batch_cancels(engine: str) -> None:
    settings = {"lr": 0.1, "batch_size": 1, "local_epochs": 1}
    rows = []
    for samples in (classification(), weighted(classification())):
        found = simulate("local", samples, small_model(), task="multiclass", engine=engine, settings=settings)
        play(found, 2)
        rows.append(found.clients.rows["w"])
    torch.testing.assert_close(*rows, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["fedavg", "fedpg", "fedrod", "splitgp", "fedfomo", "fedrep", "sfedpg"])
def test_engines_agree_and_weights_tell(name: str) -> None:
    ends = []
    for engine, samples in (
        ("loop", weighted(classification())),
        ("batched", weighted(classification())),
        ("loop", classification()),
    ):
        module = small_model(hidden="5-4" if name == "splitgp" else "5")
        found = simulate(name, samples, module, task="multiclass", engine=engine)
        play(found, 2)
        state = {**found.server, **found.clients.rows}
        ends.append(torch.cat([value[:].double().flatten() for value in state.values()]))
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-7, atol=1e-9)
    assert (ends[0] - ends[2]).abs().max() > 1e-4


@pytest.mark.parametrize("options", [{}, {"compile_steps": False, "chunk": 2}])
def test_recorded_steps_take_the_same_weights(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rows = []
    for record in (False, True):
        found = simulate("fedavg_ft", weighted(classification()), small_model(), task="multiclass", **options)
        assert isinstance(found.engine, BatchedEngine)
        monkeypatch.setattr(found.engine, "record", record)  # on a CPU its steps are called one by one
        play(found, 2)
        rows.append(found.server["w"])
    torch.testing.assert_close(*rows, rtol=1e-9, atol=1e-9)


@dataclass(frozen=True)
class WholeLoss(Task):
    """Sums the loss over a pass, a few samples at a time."""

    split: Literal["train", "validation"]

    def start(self, context: ClientContext, state: Rows, message: Rows) -> Rows:
        return {"w": message["w"], "loss": torch.zeros_like(message["w"][:, 0])}

    def folds(self) -> tuple[Fold, ...]:
        def step(work: Rows, batch: Batch) -> Rows:
            return work | {"loss": work["loss"] + batch.share * batch.loss(work["w"])}

        return (Fold(FullPass(self.split, 3), step),)

    def finish(self, context: ClientContext, work: Rows) -> tuple[Rows, Rows]:
        return {}, {"loss": work["loss"]}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_pass_in_pieces_is_the_weighted_mean_of_the_whole(engine: str, split: Literal["train", "validation"]) -> None:
    samples, module = classification(), small_model().double().to(DEVICE)
    problem = Problem.of(copy.deepcopy(module), "multiclass", dtype=torch.float64, device=DEVICE)
    clients = torch.arange(5, device=DEVICE)
    message = Message(shared={"w": problem.start}).rows(5)
    made = ENGINES[engine](problem, weighted(samples), 3)
    with torch.no_grad():
        _, found = made.run(WholeLoss(split), clients, {}, message, Call(1))
        for client in range(5):
            x, y = mine(samples, client, split)
            wanted = nn.CrossEntropyLoss(weight=WEIGHTS[client].double().to(DEVICE))(module(x), y)
            torch.testing.assert_close(found["loss"][client], wanted, rtol=1e-10, atol=1e-10)


# ------------------------------------------------------------------------------------------------------- from a table

LABELS = {"east": "yes no no no", "north": "no yes yes no no", "west": "no no no yes maybe no"}


def engine_of(folder: Path, labels: dict[str, str], **what: Any) -> Any:
    frame = pd.DataFrame(
        [(name, label) for name, text in labels.items() for label in text.split() * 5], columns=["clinic", "ill"]
    )
    frame["age"] = np.arange(len(frame)) % 7.0
    frame.to_csv(folder / "t.csv", index=False)
    text = f"table:{folder / 't.csv'},label=ill,client=clinic,norm=none"
    given = {"algorithm": "fedavg", "data": text, "model": "linear", "class_weights": "balanced", **what}
    config = from_mapping(given)
    population = make_population(config)
    return make_engine(config, population, torch.device("cpu")), population


def by_hand(labels: list[str]) -> dict[str, float]:
    names = np.unique(labels)
    return dict(zip(names, compute_class_weight("balanced", classes=names, y=labels), strict=True))


def weights_of(engine: Any, population: Any) -> list[dict[str, float]]:
    return [
        dict(zip(population.dataset.classes, row, strict=True)) for row in engine.samples.class_weights.values.tolist()
    ]


@pytest.mark.parametrize(
    ("what", "whose"),
    [({}, "all"), ({"scope": "local"}, "own"), ({"algorithm": "local"}, "own"), ({"scope": "pooled"}, "file")],
)
def test_counts_are_those_of_the_scope(what: dict[str, Any], whose: str, tmp_path: Path) -> None:
    engine, population = engine_of(tmp_path, LABELS, **what)
    labels = np.array(population.dataset.classes)[population.dataset.y.numpy()]
    for client, found in enumerate(weights_of(engine, population)):
        train = population.shares.train
        used = {"all": train.flat, "own": train[client], "file": torch.arange(len(labels))}[whose]
        wanted = {"maybe": 1.0} | by_hand(labels[used.numpy()].tolist())
        assert found == pytest.approx(wanted, rel=1e-6)


def test_nothing_of_another_client_reaches_local(tmp_path: Path) -> None:
    others = LABELS | {"east": "yes yes yes no"}
    before, after = (weights_of(*engine_of(tmp_path, labels, algorithm="local")) for labels in (LABELS, others))
    assert before[1:] == after[1:] and before[0] != after[0]


def test_weights_may_be_given(tmp_path: Path) -> None:
    for given in ("yes=3,no=0.5", {"yes": 3, "no": 0.5}, '{"yes": 3, "no": 0.5}'):
        assert weights_of(*engine_of(tmp_path, LABELS, class_weights=given)) == [{"maybe": 1, "no": 0.5, "yes": 3}] * 3
    config = from_mapping({"algorithm": "fedavg", "class_weights": {"a,b": 2, "c=d": 1.5}})
    assert from_mapping(config.plain()).class_weights == config.class_weights == '{"a,b": 2, "c=d": 1.5}'


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        (
            {"class_weights": "yes=-1"},
            "class_weights is 'yes=-1', but must be balanced, or positive weights as in no=1,yes=3",
        ),
        ({"class_weights": "equal"}, "class_weights is 'equal', but must be balanced"),
        ({"class_weights": "yes=nan"}, "but must be balanced"),
        ({"class_weights": {}}, "but must be balanced"),
        ({"class_weights": "never=2"}, "class_weights names 'never', but the classes of .* are maybe, no, yes"),
        (
            {"privacy": "clip=1.0,noise=1.0"},
            "which privacy does not protect: give the weights as numbers",
        ),
    ],
)
def test_mistakes(what: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=sentence) as refused:
        engine_of(tmp_path, LABELS, **what)
    assert "\n" not in str(refused.value)


def test_numbers_have_no_classes(tmp_path: Path) -> None:
    pd.DataFrame({"a": range(9), "y": np.arange(9) / 2}).to_csv(tmp_path / "t.csv", index=False)
    text = f"table:{tmp_path / 't.csv'},label=y,task=regression"
    config = from_mapping(
        {
            "algorithm": "local",
            "data": text,
            "model": "linear",
            "clients": 1,
            "partition": "iid",
            "class_weights": "balanced",
        }
    )
    with pytest.raises(ConfigError, match="has numbers to predict, not classes"):
        make_engine(config, make_population(config), torch.device("cpu"))


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_two_classes_with_one_output_are_weighed_too(engine: str, tmp_path: Path) -> None:
    two = {name: text.replace("maybe", "yes") for name, text in LABELS.items()}
    made, population = engine_of(tmp_path, two, class_weights="yes=5", engine=engine, dtype="float64")
    problem, samples = made.problem, made.samples
    assert population.dataset.num_outputs == 2
    single = nn.Linear(1, 1).double()
    binary = Problem.of(single, "binary", dtype=torch.float64)
    made = ENGINES[engine](binary, samples, 3)
    message = Message(shared={"w": binary.start}).rows(3)
    with torch.no_grad():
        _, found = made.run(WholeLoss("train"), torch.arange(3), {}, message, Call(1))
        for client in range(3):
            x, y = mine(samples, client)
            weight = torch.where(y == 1, 5.0, 1.0).double()
            loss = nn.BCEWithLogitsLoss(weight=weight, reduction="sum")(single(x)[:, 0], y.double()) / weight.sum()
            torch.testing.assert_close(found["loss"][client], loss, rtol=1e-10, atol=1e-10)
    assert problem.layout.size == 4
