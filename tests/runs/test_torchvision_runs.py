"""torchvision's ResNet-18, unmodified, in every method, on every engine, and in a federation.

Where torchvision is not installed, the same layers stand for it.

The suite plays a few methods; ``COTERIE_ALL_METHODS=1`` plays all of them, which takes many minutes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie import models, randomness
from coterie.compute.batched import BatchedEngine
from coterie.data import Dataset
from coterie.federation.agreement import Schema
from coterie.federation.node import Node
from coterie.federation.plan import Plan
from coterie.federation.resident import Means
from coterie.federation.server import serve
from coterie.models.problem import Problem
from coterie.rows import take_rows
from tests.conformance_table import TABLE
from tests.documents import only
from tests.federation.grid import Local, LocalGrid, compare, make_agreement
from tests.support import DEVICE, everyone, play, samples_of, simulate
from tests.torchvision_models import PLAIN, torchvision

ALL = bool(os.environ.get("COTERIE_ALL_METHODS"))
NAMED = ("fedavg", "fedacs", "fedamp", "flame", "fedpg", "ditto", "apfl", "scaffold")
METHODS = sorted(TABLE, key=lambda name: name not in NAMED)
PLAYED = METHODS if ALL else ["fedacs"]
# Products with a subspace depend in their last bit on where operands lie: test_equals_simulation.py has those two.
FEDERATED = [name for name in METHODS if "lp_proj" not in name] if ALL else ["fedacs"]
IN_PARTS = ("fedrep", "fedrod", "splitgp")
SIZES = (6, 8)
SHORT = {"lr": 0.02, "batch_size": 4, "local_epochs": 1}
SIDE = 34  # the smallest whose last images are two by two: each mean and variance is of several values
WHERE = "coterie_resnet" if torchvision() is None else "torchvision.models"


@pytest.fixture(autouse=True)
def resnet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    (tmp_path / "coterie_resnet.py").write_text(PLAIN)
    in_parts = only("file: resnet_in_parts.py", "docs/add_your_model.md").replace("torchvision.models", WHERE)
    (tmp_path / "coterie_parted.py").write_text(in_parts)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("coterie_resnet", "coterie_parted"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def model_of(algorithm: str) -> str:
    return "import:coterie_parted:ResNet18" if algorithm in IN_PARTS else f"import:{WHERE}:resnet18:num_classes=3"


def settings_of(algorithm: str) -> dict[str, Any]:
    own = TABLE[algorithm].settings
    return own | {name: value for name, value in SHORT.items() if name in own}


def images(sizes: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    draw = randomness.stream(1, "images")
    parts = []
    for size in sizes:
        y = draw.integers(3, size=size)
        x = draw.normal(size=(size, 3, SIDE, SIDE)).astype("float32") + y[:, None, None, None].astype("float32")
        parts.append((torch.from_numpy(x), torch.from_numpy(y)))
    return parts


@pytest.mark.parametrize("algorithm", PLAYED)
def test_engines_agree(algorithm: str) -> None:
    ends = []
    for engine, more in [("loop", {}), ("batched", {}), ("batched", {"kernel": "vmap"})][
        : 3 if ALL and algorithm in NAMED else 2
    ]:
        with randomness.torch_stream(11, "test model"):
            module = models.build(model_of(algorithm), (3, SIDE, SIDE), 3)
        parts, options = images((8, 4, 4)), {"task": "multiclass", "classes": 3}
        samples = samples_of(parts, validation=images((4, 4, 4)), **options)
        settings = settings_of(algorithm)
        simulation = simulate(algorithm, samples, module, task="multiclass", settings=settings, engine=engine, **more)
        play(simulation, 2, lambda number: torch.tensor([[0, 2], [1, 2]][number - 1], device=DEVICE))
        if isinstance(simulation.engine, BatchedEngine):
            assert simulation.engine.choices["kernel"] == more.get("kernel", "stacked")
        personal = simulation.personal(everyone(simulation), 2)
        rows = {
            f"clients {name}": take_rows(value, everyone(simulation)) for name, value in simulation.clients.rows.items()
        }
        ends.append(simulation.server | rows | {f"personal {name}": value for name, value in personal.items()})
    for other in ends[1:]:
        assert ends[0].keys() == other.keys()
        for name, value in ends[0].items():
            torch.testing.assert_close(other[name], value, rtol=1e-10, atol=1e-10, equal_nan=True)


@pytest.mark.parametrize("algorithm", FEDERATED)
def test_a_federation_is_a_simulation(algorithm: str, tmp_path: Path) -> None:
    model = model_of(algorithm)
    schema = Schema(task="multiclass", input_shape=(3, SIDE, SIDE), classes=tuple("012"))
    agreement = make_agreement(len(SIZES), model=model, data=schema)
    datasets = [Dataset("own", x, y, len(x), "multiclass", tuple("012"), (0.0,), (1.0,)) for x, y in images(SIZES)]
    nodes = {
        100 - client: Node(agreement, client, held, tmp_path / f"node-{client}", means=Means(allow=(model,)))
        for client, held in enumerate(datasets)
    }
    local, settings = Local(agreement, LocalGrid(nodes), tmp_path, datasets), settings_of(algorithm)
    plan = Plan(algorithm=algorithm, rounds=2, settings=settings)
    serve(local.agreement, local.grid, plan, tmp_path / "run")
    compare(local, algorithm, 2, tmp_path / "run", tmp_path / "simulation", settings=settings)


def test_it_is_torchvisions() -> None:
    module = models.build(model_of("fedavg"), (3, SIDE, SIDE), 3)
    # 4,800 channels behind twenty layers, each with a mean, a variance and a count of batches.
    assert Problem.of(module).statistics.size == 2 * 4800 + 20
    published = 11_689_512  # with 1000 classes
    assert sum(value.numel() for value in module.parameters()) == published - 513 * (1000 - 3)
    if torchvision() is not None:
        names = ("import:coterie_resnet:resnet18:num_classes=3", model_of("fedavg"))
        ours, theirs = (models.build(name, (3, SIDE, SIDE), 3) for name in names)
        ours.load_state_dict(theirs.state_dict())  # refused unless names and shapes are the same
        x = torch.cat([x for x, _ in images((4,))]).double()
        for training in (True, False):
            outputs = [net.double().train(training)(x) for net in (ours, theirs)]
            torch.testing.assert_close(*outputs, rtol=0, atol=1e-10)
