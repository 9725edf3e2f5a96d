"""Models with BatchNorm in whole runs: stopped and resumed, exported, refused, and on the nodes of a federation."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from coterie import randomness
from coterie.algorithms.running_statistics import STATISTICS
from coterie.config import from_mapping
from coterie.errors import ConfigError
from coterie.federation.plan import Plan
from coterie.federation.resident import Means
from coterie.federation.server import serve
from coterie.federation.wire import unpack
from coterie.results import Result
from coterie.results.export import export
from coterie.runs import launch
from coterie.runs.builder import make_population
from tests.federation.grid import compare, make_federation, node_rows
from tests.programs import load_program
from tests.small_runs import Killed, assert_same_end, finish, last_state, stop

MODELS = """
from typing import Any, NamedTuple

import torch
from torch import nn


class Answer(NamedTuple):
    loss: Any
    logits: torch.Tensor


def Images(outputs):
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 8), nn.BatchNorm1d(8)
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(8, outputs))


class Parted(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.body, self.head, self.split = Images(8), nn.Linear(8, outputs), 3

    def forward(self, x):
        return self.head(self.body(x))


class Centred(nn.Module):
    def __init__(self, width, persistent=True):
        super().__init__()
        self.register_buffer("mean", torch.zeros(width), persistent)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent)

    def forward(self, x):
        if not self.training:
            return x - self.mean
        own = x.mean(0)
        with torch.no_grad():
            self.mean.mul_(0.8).add_(0.2 * own)
            self.seen += 1
        return x - own


def Tracked(outputs, persistent=True):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 5), Centred(5, persistent), nn.Tanh(), nn.Linear(5, outputs))


class Answering(nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.net = Tracked(outputs, persistent=False)

    def forward(self, x):
        return Answer(None, self.net(x))
"""
TRACKED = {"model": "import:coterie_normed:Tracked"}
SMALL = {"lr": 0.1, "local_epochs": 1, "batch_size": 7}


@pytest.fixture(autouse=True)
def _own_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    (tmp_path / "coterie_normed.py").write_text(MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "coterie_normed", raising=False)  # another test's
    draw = randomness.stream(1, "images")
    clients = np.repeat(np.arange(4), [20, 25, 31, 38])
    x, y = draw.normal(size=(len(clients), 1, 8, 8)).astype("float32"), draw.integers(3, size=len(clients))
    np.savez(tmp_path / "images.npz", x=x + y[:, None, None, None], y=y, client=clients)


def config_of(tmp_path: Path, algorithm: str = "fedavg", **more: Any) -> Any:
    values = {
        "algorithm": algorithm,
        "settings": SMALL,
        "data": f"npz:{tmp_path / 'images.npz'}",
        "partition": "natural",
        "clients": 4,
        "rounds": 3,
        "participation": 0.75,
        "model": "import:coterie_normed:Images",
        "threads": 1,
    }
    return from_mapping(values | more)


@pytest.mark.parametrize(
    ("engine", "more"),
    [
        ("loop", {}),
        ("batched", {}),
        ("batched", {"buffers": "1=local"}),
        ("batched", {"local": "norm"}),
        ("batched", TRACKED),
        ("loop", TRACKED | {"buffers": "2=local"}),
    ],
    ids=str,
)
def test_stopped_and_resumed_ends_the_same(engine: str, more: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(tmp_path, "ditto", rounds=5, checkpoint_every=2, engine=engine, **more)
    finish(launch.begin(config, tmp_path / "whole"))
    stop(launch.begin(config, tmp_path / "cut"), "in a round", 3)
    stop(launch.resume(tmp_path / "cut"), "in evaluation", 5, Killed)
    finish(launch.resume(tmp_path / "cut"))
    assert_same_end(tmp_path / "whole", tmp_path / "cut")
    kept = last_state(tmp_path / "cut").clients
    assert {STATISTICS, f"{STATISTICS} v"} <= kept.keys() and bool((kept[STATISTICS][0] != kept[STATISTICS][1]).any())


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("fedavg", {}),
        ("fedavg", {"buffers": "local"}),
        ("apfl", {"local": "norm"}),
        ("splitgp", {"model": "import:coterie_normed:Parted"}),
        ("ditto", TRACKED),
        ("fedavg", {"model": "import:coterie_normed:Answering"}),
    ],
    ids=str,
)
def test_an_exported_model_measures_what_was_recorded(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    run, client = finish(launch.begin(config_of(tmp_path, name, **more), tmp_path / "run")), 2
    population = make_population(from_mapping(run.config))
    mine = population.shares.test[client]
    for kind in ("personal", "global"):
        folder = export(run.path, tmp_path / kind, clients=client, best=kind).folder
        code = load_program(folder / "predict.py", "exported")
        found = code.load(client, folder).probabilities(population.dataset.x[mine])
        loss = -torch.as_tensor(found).double()[torch.arange(len(mine)), population.dataset.y[mine]].log().mean()
        recorded = run.metrics.query(f"round == 3 and model == '{kind}' and split == 'test' and metric == 'loss'")
        assert float(loss) == pytest.approx(recorded.set_index("client")["value"][client], rel=1e-4)
        (file,) = folder.glob("*.safetensors")
        held = load_file(file)
        (counts,) = {int(value) for tensor, value in held.items() if tensor.endswith(("num_batches_tracked", "seen"))}
        assert counts > 0 and all(bool((held[each] != 1).all()) for each in held if each.endswith("running_var"))


@pytest.mark.parametrize("more", [{"buffers": "local"}, {"buffers": "1=local"}, {"local": "norm"}], ids=str)
def test_a_global_model_with_statistics_that_stay_is_another_one_on_each_client(
    more: dict[str, Any], tmp_path: Path
) -> None:
    run = finish(launch.begin(config_of(tmp_path, matrix=True, **more), tmp_path / "run"))
    made = export(run.path, tmp_path / "global", best="global")
    assert [each["client"] for each in made.about["clients"]] == [0, 1, 2, 3]
    means = [load_file(made.folder / each["file"])["1.running_mean"] for each in made.about["clients"]]
    assert not torch.equal(means[0], means[1])
    last = run.metrics.query("round == 3 and split == 'test' and metric == 'loss' and model == 'global'")
    recorded = last.set_index("client")["value"]
    for each in made.about["clients"]:
        assert each["test"]["loss"] == recorded[each["client"]]


def test_batches_of_one_sample_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    sizes = [len(part) for part in make_population(config_of(tmp_path)).shares.train]
    size = next(each for each in range(2, 9) if any(count % each == 1 for count in sizes))
    client = next(number for number, count in enumerate(sizes) if count % size == 1)
    words = (
        rf"client {client} has {sizes[client]} training samples, so that one of its batches of {size} holds a single "
        r"one, and layer '5' \(BatchNorm\) cannot normalise one value by itself: with batch_size=(\d+) no client has"
    )
    with pytest.raises(ConfigError, match=words) as refused:
        launch.begin(config_of(tmp_path, settings=SMALL | {"batch_size": size}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    better = re.search(words, str(refused.value))
    assert better is not None and not any(count % int(better[1]) == 1 for count in sizes)


def test_frozen_layers_need_no_second_sample(tmp_path: Path) -> None:
    config = config_of(tmp_path, settings=SMALL | {"batch_size": 1}, buffers="5=frozen", rounds=1)
    finish(launch.begin(config, tmp_path / "run"))
    assert Result(tmp_path / "run").finished


def test_steps_are_not_compiled(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"BatchNorm layers, .* cannot be compiled"):
        launch.begin(config_of(tmp_path, compile=True), tmp_path / "run")


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("fedavg", {}),
        ("fedacs", {"buffers": "1=local"}),
        ("fedpg", {"buffers": "local"}),
        ("ditto", {"local": "norm"}),
        ("fedrep", {"model": "import:coterie_normed:Parted"}),
        ("sfedpg", {}),
        ("fedacs", TRACKED),
        ("fedavg", TRACKED | {"buffers": "2.mean=local"}),
    ],
)
def test_a_federation_is_a_simulation(algorithm: str, more: dict[str, Any], tmp_path: Path) -> None:
    given = {"model": "import:coterie_normed:Images", **more}
    local = make_federation(tmp_path, means=Means(allow=(given["model"],)), **given)
    settings = {} if "fedpg" in algorithm else {"batch_size": 10, "local_epochs": 1}
    serve(local.agreement, local.grid, Plan(algorithm=algorithm, rounds=2, settings=settings), tmp_path / "run")
    compare(local, algorithm, 2, tmp_path / "run", tmp_path / "simulation", settings=settings)
    if {"buffers", "local"} & more.keys():
        with pytest.raises(ConfigError, match=r"the global models of .* are made of what the nodes keep"):
            export(tmp_path / "run", tmp_path / "model", best="global")
    own = torch.cat([node_rows(local, client, local.folder / "run")[STATISTICS] for client in range(3)])
    tracked = more.get("model") == TRACKED["model"]
    assert own.shape == (3, 5 + 1 if tracked else 2 * (4 + 8) + 2) and bool((own[0] != own[1]).any())
    sent = [unpack(message, 2**30).tensors for each in local.grid.sent for message in each.values()]
    held = [(name, value) for tensors in sent for name, value in tensors.items() if name.endswith(STATISTICS)]
    assert not any("trial" in name for name, _ in held)
    widths = {value.shape[-1] for _, value in held}
    if tracked:
        assert widths == ({1} if "buffers" in more else {6})
        return
    assert widths - {0} == (
        {17} if more.get("buffers") == "1=local" else set() if {"buffers", "local"} & more.keys() else {26}
    )
    (file,) = (local.node_folder(0) / "models").glob("*/model.safetensors")
    kept = load_file(file)
    assert {name for name in kept if name.endswith("running_var")} and STATISTICS not in kept
