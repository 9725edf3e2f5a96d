"""Objects in place of text: data, model, loss and method that a program hands over."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, TensorDataset

import coterie
from coterie import randomness
from coterie.algorithms import registry
from coterie.algorithms.fedavg import FedAvg
from coterie.algorithms.fedprox import FedProx
from coterie.data import Dataset
from coterie.data.objects import hand_over
from coterie.errors import ConfigError, CoterieError, DataError, Interrupted, ModelError, PartitionError
from coterie.results import Result
from coterie.results.export import export
from coterie.results.report.writer import write as write_report
from coterie.studies.comparison import compare, make_plan
from coterie.user_code import objects
from coterie.user_code.digests import digest_of

QUIET: dict[str, Any] = {"progress": False, "rounds": 2}


def arrays(count: int = 40, seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.from_numpy(np.random.default_rng(seed).normal(size=(count, 4)).astype(np.float32))
    return x, (x[:, 0] > 0).long()


def per_client() -> dict[str, tuple[Tensor, Tensor]]:
    return {"north": arrays(40, 1), "east": arrays(30, 2), "south": arrays(20, 3)}


def table() -> pd.DataFrame:
    draw = np.random.default_rng(0)
    ages = draw.normal(50, 10, 90)
    return pd.DataFrame(
        {"age": ages, "ward": draw.choice(["a", "b"], 90), "site": np.repeat(["n", "s", "w"], 30), "ill": ages > 50}
    )


def network() -> nn.Module:
    with randomness.torch_stream(3, "a test's model"):
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def scaled_loss(scale: float) -> Any:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return scale * F.cross_entropy(outputs, targets, reduction="none")

    return loss


class Halved(FedAvg):
    """FedAvg under another name."""

    name = "halved"
    title = "Halved"
    citation = "none"


# ---------------------------------------------------------------------------------------------------------------- data


def test_arrays_of_each_client_are_its_samples_and_its_name(tmp_path: Path) -> None:
    result = coterie.run("fedavg", data=per_client(), model="linear", out=tmp_path / "a", **QUIET)
    assert result.shares["name"].tolist() == ["north", "east", "south"]  # in the order in which they were given
    assert result.shares[["train", "validation", "test"]].sum(axis=1).tolist() == [40, 30, 20]


def test_a_table_is_what_it_would_be_in_a_file(tmp_path: Path) -> None:
    frame = table()
    frame.to_csv(tmp_path / "t.csv", index=False)
    text = f"table:{tmp_path / 't.csv'},label=ill,client=site,task=binary"
    said: dict[str, Any] = {"label": "ill", "task": "binary"}
    first = coterie.run("ditto", data=text, model="linear", out=tmp_path / "a", **QUIET)
    ways: dict[str, Any] = {
        "column": {"data": frame, "client": "site"},
        "owners": {"data": frame.drop(columns="site"), "owners": frame["site"].tolist()},
        "each": {"data": {name: part.drop(columns="site") for name, part in frame.groupby("site")}},
    }
    for name, way in ways.items():
        found = coterie.run("ditto", model="linear", out=tmp_path / name, **said, **way, **QUIET)
        assert found.metrics.equals(first.metrics), name
        assert found.shares.equals(first.shares), name


class Squares(TorchDataset[tuple[Tensor, int]]):
    """Grey pictures of which half are bright."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        return torch.full((1, 4, 4), 10 * number, dtype=torch.uint8), number % 2


def test_datasets_of_pytorch() -> None:
    held, _ = hand_over(Squares(), owners=["b", "a"] * 6)
    found = held.value
    assert found.x.dtype == torch.uint8 and found.x[3, 0, 0, 0] == 30 and found.y.tolist() == [0, 1] * 6
    assert found.owner_names == ("a", "b") and found.owner.tolist() == [1, 0] * 6
    by_client = hand_over([TensorDataset(*arrays(5)), TensorDataset(*arrays(7))])[0].value
    assert by_client.owner.tolist() == [0] * 5 + [1] * 7 and by_client.x.shape == (12, 4)


def test_integers_stay_integers_and_short_sequences_are_filled_up() -> None:
    tokens = hand_over((np.array([[1, 2], [3, 4]], dtype=np.int32), [0, 1]))[0].value
    assert tokens.x.dtype == torch.int64 and tokens.x.tolist() == [[1, 2], [3, 4]]
    ragged = hand_over({"a": ([[5, 6, 7], [8]], [0, 1]), "b": ([[9, 9]], [1])}, padding=2)[0].value
    assert ragged.x.tolist() == [[5, 6, 7], [8, 2, 2], [9, 9, 2]] and ragged.x.dtype == torch.int64
    cut = hand_over(([[5, 6, 7], [8]], [0, 1]), length=2)[0].value
    assert cut.x.tolist() == [[5, 6], [8, 0]]


def test_samples_to_test_on_stay_apart(tmp_path: Path) -> None:
    test = {name: arrays(6, 10 + number) for number, name in enumerate(per_client())}
    result = coterie.run("fedavg", data=per_client(), test=test, model="linear", out=tmp_path / "a", **QUIET)
    assert result.shares["test"].tolist() == [6, 6, 6]
    assert result.shares[["train", "validation"]].sum(axis=1).tolist() == [40, 30, 20]
    with pytest.raises(PartitionError, match="stand apart"):
        coterie.run("fedavg", data=per_client(), test=test, partition="iid", clients=3, out=tmp_path / "b", **QUIET)
    with pytest.raises(PartitionError, match="client east has no test samples"):
        coterie.run("fedavg", data=per_client(), test={"north": test["north"], "south": test["south"]}, **QUIET)
    frame = table()
    held, _ = hand_over(frame, test=frame[:9], label="ill", client="site")
    assert held.value.test_apart and held.value.train_count == 90 and len(held.value) == 99


@pytest.mark.parametrize(
    ("data", "said", "error", "sentence"),
    [
        (3, {}, ConfigError, "data is a int, but data must be a DataFrame, a Dataset of PyTorch"),
        (table(), {}, ConfigError, "label does not name the column to predict"),
        (table(), {"label": "died"}, DataError, "the table has no column 'died': it has age, ward, site, ill"),
        (table(), {"label": "ill", "owners": ["a"]}, DataError, "there are 90 rows, but 1 owners"),
        (per_client(), {"owners": ["a"]}, ConfigError, "owners say it twice"),
        (per_client(), {"label": "y"}, ConfigError, "label is 'y', but data is not a table"),
        (per_client(), {"test": arrays(4)}, ConfigError, "nobody says whose its samples are"),
        (per_client(), {"test": {"nobody": arrays(4)}}, DataError, "client 'nobody' has samples to test on, but none"),
        (per_client(), {"speed": 1}, ConfigError, "data has no option 'speed'"),
        ({"a": (np.zeros((3, 2)), [0, 1])}, {}, DataError, "there are 3 inputs, but labels of shape (2,)"),
        ({"a": arrays(3), "b": (np.zeros((3, 5)), [0, 1, 1])}, {}, DataError, "[4] and [5]: all must have one shape"),
        (({"a": 1}, [0]), {}, ConfigError, "data must be a DataFrame"),
        ((np.array([["x"], ["y"]]), [0, 1]), {}, DataError, "not numbers"),
        (([[1, 2], ["x"]], [0, 1]), {}, DataError, "must be whole numbers"),
    ],
)
def test_what_cannot_be_data_is_said(data: Any, said: dict[str, Any], error: type[CoterieError], sentence: str) -> None:
    with pytest.raises(error, match=re.escape(sentence)) as told:
        hand_over(data, **said)
    assert "\n" not in str(told.value)


def test_a_stream_of_samples_is_refused() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(())

    with pytest.raises(ConfigError, match="is an IterableDataset"):
        hand_over(Stream())


def test_what_is_said_of_data_that_are_text_belongs_there() -> None:
    with pytest.raises(ConfigError, match="label is given, but data is 'digits', a text"):
        coterie.run("fedavg", label="y")


# --------------------------------------------------------------------------------------------------------------- model


def test_a_module_is_the_start_and_is_left_as_it_was(tmp_path: Path) -> None:
    module = network()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    text = "import:tests.runs.test_handed_over:network"
    ways = [coterie.run("fedavg", data=per_client(), model=each, out=tmp_path / str(number), **QUIET)
            for number, each in enumerate((module, network, text))]  # fmt: skip
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert ways[0].metrics.equals(ways[1].metrics) and ways[0].metrics.equals(ways[2].metrics)


def test_what_makes_a_model_is_given_what_it_asks_for() -> None:
    from coterie.models import build
    from coterie.models.handed_over import hand_over as hand_over_model

    def by_name(outputs: int, width: int = 3) -> nn.Module:
        return nn.Linear(width, outputs)

    def in_order(shape: tuple[int, ...], classes: int) -> nn.Module:
        return nn.Linear(shape[0], classes)

    def too_much(depth: int) -> nn.Module:
        return nn.Linear(depth, 1)

    def nothing() -> int:
        return 3

    for maker, width in ((by_name, 3), (in_order, 5)):
        made = build(hand_over_model(maker).text, (5,), 2)
        assert isinstance(made, nn.Linear) and (made.in_features, made.out_features) == (width, 2)
    with pytest.raises(ModelError, match="'object:too_much' needs depth, but is called with nothing"):
        build(hand_over_model(too_much).text, (5,), 2)
    with pytest.raises(ModelError, match=r"made a int, not an nn\.Module"):
        build(hand_over_model(nothing).text, (5,), 2)


# ---------------------------------------------------------------------------------------------------------------- loss


@pytest.mark.parametrize("engine", ["batched", "loop"])
def test_a_loss_of_the_users(engine: str, tmp_path: Path) -> None:
    """Twice the loss at half the rate is the same descent: powers of two are exact."""
    runs = [
        coterie.run("fedavg", data=per_client(), model=network(), loss=scaled_loss(scale), lr=lr, engine=engine,
                    out=tmp_path / str(scale), **QUIET)
        for scale, lr in ((1.0, 0.25), (2.0, 0.125))
    ]  # fmt: skip
    values = [run.metrics.query("metric == 'loss'")["value"].to_numpy() for run in runs]
    np.testing.assert_array_equal(2 * values[0], values[1])
    own = coterie.run(
        "fedavg", data=per_client(), model=network(), lr=0.25, engine=engine, out=tmp_path / "own", **QUIET
    )
    assert own.metrics.equals(runs[0].metrics)


@pytest.mark.parametrize(
    ("loss", "sentence"),
    [
        (nn.CrossEntropyLoss(), "gives one number, but must give one for each of 4 samples: leave the mean out"),
        (lambda outputs, targets: outputs, "gives a result of shape (4, 2), but must give one for each of 4 samples"),
        (lambda outputs, targets: 3.0, "gives a float, but must give one for each of 4 samples: a tensor"),
        (
            lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none") + outputs.mean(),
            "gives a sample another loss when other samples are there",
        ),
        (lambda outputs: outputs, "fails on outputs of shape (4, 2)"),
        (7, "loss is a int, but must be a name, or a function"),
    ],
)
def test_a_loss_that_is_not_one_of_each_sample(loss: Any, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(CoterieError, match=re.escape(sentence)):
        coterie.run("fedavg", data=per_client(), model=network(), loss=loss, out=tmp_path / "a", **QUIET)
    assert not (tmp_path / "a").exists()


# -------------------------------------------------------------------------------------------------------------- method


def test_a_class_or_an_object_is_a_method(tmp_path: Path) -> None:
    said: dict[str, Any] = {"data": per_client(), "model": network(), **QUIET}
    named = coterie.run("fedavg", lr=0.3, out=tmp_path / "a", **said)
    for number, method in enumerate((FedAvg(lr=0.3), Halved(lr=0.3))):
        found = coterie.run(method, out=tmp_path / str(number), **said)
        assert found.metrics.equals(named.metrics) and found.config["settings"]["lr"] == 0.3
    by_class = coterie.run(Halved, lr=0.3, out=tmp_path / "class", **said)
    assert by_class.metrics.equals(named.metrics) and by_class.config["algorithm"] == "halved"
    with pytest.raises(ConfigError, match=r"lr is 0\.1, but algorithm is an object with settings of its own"):
        coterie.run(FedAvg(), lr=0.1, out=tmp_path / "b", **said)
    with pytest.raises(ConfigError, match="must be a name, or a class or object of an Algorithm"):
        coterie.run(dict, out=tmp_path / "b", **said)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------- going on, and looking back


def stopped(path: Path, **said: Any) -> None:
    """Begin a run and stop it after its first round."""
    from coterie.api import run_config
    from coterie.config import from_mapping
    from coterie.runs.handed_over import as_text

    def stop(number: int, mean: float | None) -> None:
        raise KeyboardInterrupt

    values, held = as_text({"algorithm": "fedavg", "rounds": 4, "checkpoint_every": 1, **said})
    with contextlib.suppress(Interrupted):
        run_config(from_mapping(values), out=path, progress=stop)
    del held
    assert not Result(path).finished


def test_a_run_goes_on_with_the_same_objects_and_no_others(tmp_path: Path) -> None:
    said: dict[str, Any] = {"algorithm": Halved, "model": network(), "loss": scaled_loss(2.0)}
    data: dict[str, Any] = {"data": table(), "label": "ill", "client": "site", "drop": ["ward"]}
    said["model"] = nn.Sequential(nn.Linear(1, 2))
    whole = coterie.run(**said, **data, rounds=4, out=tmp_path / "whole", progress=False)
    stopped(tmp_path / "a", **said, **data)
    path = tmp_path / "a"
    other = table()
    other.loc[5, "age"] += 1e-3
    changed = nn.Sequential(nn.Linear(1, 2))
    for wrong, sentence in (
        ({}, "data is 'object:DataFrame', an object of the Python program that began the run, which is not here"),
        ({"data": other}, "data is not what the run in"),
        ({"data": table(), "model": changed}, "model is not what the run in"),
        ({"data": table(), "loss": scaled_loss(2.5)}, "loss is not what the run in"),
        ({"data": table(), "algorithm": FedProx}, "algorithm is not what the run in"),
        ({"speed": 3}, "there is no object of a run called 'speed'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            coterie.resume(path, progress=False, **wrong)
    again = coterie.resume(path, data=table(), loss=scaled_loss(2.0), progress=False)
    assert again.metrics.equals(whole.metrics)


def test_the_run_is_looked_at_without_its_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    coterie.run(Halved, data=per_client(), model=network(), loss=scaled_loss(1.0), out=tmp_path / "a", **QUIET)
    for memory in (registry._registered, registry._handed_over):
        monkeypatch.delitem(memory, "halved")  # as in another process
    monkeypatch.setattr(objects, "_kept", {})
    monkeypatch.setattr(objects, "_held", {})
    result = coterie.load(tmp_path / "a")
    assert "Halved" in str(result.table()) and result.shares["name"].tolist() == ["north", "east", "south"]
    with pytest.raises(ConfigError, match="of which the run's folder has no code that could be taken home"):
        export(tmp_path / "a", tmp_path / "model")
    write_report([tmp_path / "a"], tmp_path / "report.html", progress=False)
    assert "Halved" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_method_that_is_not_here_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(tmp_path / "a", algorithm=Halved, data=per_client(), model="linear")
    for memory in (registry._registered, registry._handed_over):
        monkeypatch.delitem(memory, "halved")
    with pytest.raises(ConfigError, match="algorithm is 'halved', a class of the Python program that began the run"):
        coterie.resume(tmp_path / "a", progress=False)

    class Halved2(FedAvg):
        """Another one of the same name."""

        name = "halved"
        title = "Halved"
        citation = "none"
        mistake: float = 1.0

    with pytest.raises(ConfigError, match="algorithm is not what the run in"):
        coterie.resume(tmp_path / "a", algorithm=Halved2, data=per_client(), progress=False)


def test_a_comparison_over_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan(
        {
            "methods": ["local", Halved, {"algorithm": FedProx(mu=0.5), "name": "near"}],
            "data": table(),
            "label": "ill",
            "client": "site",
            "model": nn.Sequential(nn.Linear(3, 2)),
            "rounds": 2,
            "seeds": [1, 2],
        }
    )
    # However many processes it would pay for: what objects are made of is in this one alone.
    monkeypatch.setattr("coterie.studies.comparison.runner.workers_that_pay", lambda runs: len(runs))
    compare(plan, tmp_path / "c", jobs=None, progress=False)
    assert {run.method for run in plan.runs} == {"local", "halved", "near"} and len(plan.runs) == 6
    assert "Halved" in (tmp_path / "c" / "table.md").read_text(encoding="utf-8")
    with pytest.raises(ConfigError, match="jobs is 2, but the plan has objects"):
        compare(plan, tmp_path / "c", jobs=2, progress=False)


# ------------------------------------------------------------------------------------------------------------- digests


def test_constants_of_a_data_set_count_and_statistics_follow() -> None:
    x, y = arrays(6)
    plain = Dataset("mine", x, y, 6, "multiclass", ("a", "b"), (0.0,), (1.0,))
    same, scaled = (hand_over(each)[0] for each in (replace(plain, name="other"), replace(plain, mean=(0.5,))))
    assert hand_over(plain)[0].digest == same.digest != scaled.digest


SCRIPT = """
import sys
import torch
from torch import nn
from coterie.algorithms.fedavg import FedAvg
from coterie.user_code.digests import digest_of

class Own(FedAvg):
    name = "own"
    title = "Own"
    citation = "none"
    speed: float = 0.5
    def check_clients(self, count):
        return count in {"a", "b", 3} and {"x": 1}

def loss(outputs, targets, kinds=frozenset(("p", "q", "r"))):
    return [kind for kind in kinds if kind in {"s", "t"}], torch.relu, sys

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        nn.init.ones_(self.layer.weight), nn.init.ones_(self.layer.bias)
    def forward(self, x):
        return self.layer(x)

print(digest_of(Own), digest_of(loss), digest_of(Net), digest_of(Net()), digest_of(lambda o, t: loss(o, t)))
"""


def test_digests_are_the_same_in_another_process() -> None:
    words = [sys.executable, "-c", SCRIPT]
    first, second = (
        subprocess.run(
            words, env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True
        ).stdout
        for seed in ("1", "2")
    )
    assert first == second and len(set(first.split())) == 5


def test_digests_say_what_was_written_and_not_where() -> None:
    def one(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets) ** 2

    first = one

    def one(outputs: Tensor, targets: Tensor) -> Tensor:  # type: ignore[no-redef]
        return (outputs - targets) ** 2

    def other(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets) ** 3

    assert digest_of(first) == digest_of(one) != digest_of(other)
    assert digest_of(scaled_loss(1.0)) == digest_of(scaled_loss(1.0)) != digest_of(scaled_loss(2.0))
    assert digest_of(nn.CrossEntropyLoss()) != digest_of(nn.CrossEntropyLoss(reduction="none"))
    module, twin = network(), network()
    assert digest_of(module) == digest_of(twin)
    with torch.no_grad():
        next(twin.parameters())[0, 0] += 1e-6
    assert digest_of(module) != digest_of(twin)

    def itself(depth: int) -> int:
        return itself(depth - 1) if depth else 0

    assert digest_of(itself) == digest_of(itself)
