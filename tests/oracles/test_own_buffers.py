"""Models that change buffers of their own in training: by hand in plain PyTorch, and both engines beside each other."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coterie import models, randomness
from coterie.algorithms import registry
from coterie.algorithms.running_statistics import STATISTICS
from coterie.compute.class_weights import ClassWeights
from coterie.errors import ModelError
from coterie.models.problem import Problem
from coterie.simulation.scoring import Scorer
from coterie.simulation.simulation import Simulation
from tests.conformance_table import TABLE
from tests.oracles.test_running_statistics import Normed, assert_equal_rounds, batches_of, share_mean
from tests.support import DEVICE, ENGINES, classification, everyone
from tests.test_conformance import cohort_of, lose_some

SIZES = (6, 10, 14, 19, 23)
METHODS = "apfl ditto fedacs fedamp fedavg fedfomo fedpg fedrep flame per_fedavg pfedme scaffold sfedpg splitgp"
STEP = {"lr": 0.1, "local_epochs": 2, "batch_size": 4}


class Centred(nn.Module):
    """Takes off the mean of its batch, and in evaluation a mean over past batches, which it counts; both in place."""

    mean: Tensor
    seen: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return (x - self.mean) * self.gain
        own = x.mean(0)
        with torch.no_grad():
            self.mean.mul_(0.8).add_(0.2 * own)
            self.seen += 1
        return (x - own) * self.gain


class Bounded(nn.Module):
    """Divides by the largest number it has met, which it puts in the place of the one before."""

    largest: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("largest", torch.ones(()))
        self.register_buffer("unused", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.largest = torch.maximum(self.largest, x.detach().abs().amax())
        return x / self.largest


class Tracked(nn.Module):
    """An MLP with both, and a BatchNorm layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 5), Centred(5), nn.Tanh(), nn.Linear(5, 4), nn.BatchNorm1d(4), Bounded())
        self.head = nn.Linear(4, 3)
        self.split = 3

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


NAMES = ("body.1.mean", "body.1.seen", "body.5.largest")


def built() -> Tracked:
    with randomness.torch_stream(11, "test model"):
        return Tracked().to(DEVICE)


def made(name: str, settings: dict[str, Any], buffers: str = "", **more: Any) -> Simulation:
    engine, local, lost = more.pop("engine", "batched"), more.pop("local", ()), more.pop("lost", None)
    sample = torch.ones(2, 6, dtype=torch.float64)
    problem = Problem.of(built(), dtype=torch.float64, device=DEVICE, buffers=buffers, sample=sample)
    computes = ENGINES[engine](problem, classification(5, sizes=SIZES), 3, **more)
    return Simulation(registry.make(name, settings), computes, local=local, lost=lost)


def test_they_are_found_and_lie_in_rows() -> None:
    simulation = made("fedavg", STEP)
    problem = simulation.engine.problem
    assert problem.statistics.names == (
        *(f"body.4.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")),
        *NAMES,
    )
    assert simulation.engine.choices["kernel"] == "vmap" and not simulation.engine.choices["record"]
    begun = {name: value.clone() for name, value in problem.module.named_buffers()}
    simulation.play_round(everyone(simulation), 1)
    assert all(torch.equal(value, begun[name]) for name, value in problem.module.named_buffers())  # rows alone move


@pytest.mark.parametrize(
    ("name", "more"),
    [pytest.param(name, {}, id=name) for name in METHODS.split()]
    + [
        pytest.param(name, more, id=f"{name}-{more}")
        for more in ({"buffers": "body.1=local,*.largest=frozen"}, {"local": ("body.1",)}, {"buffers": "frozen"})
        for name in ("fedavg", "ditto", "fedrep", "sfedpg")
    ],
)
def test_engines_agree(name: str, more: dict[str, Any]) -> None:
    loop, batched = (made(name, TABLE[name].settings, engine=each, lost=lose_some, **more) for each in ENGINES)
    assert_equal_rounds(loop, batched, TABLE[name].discrete, rounds=2)
    if more.get("buffers") == "frozen":
        assert STATISTICS not in loop.clients.rows
        return
    own = loop.engine.problem.statistics.views(loop.clients.rows[STATISTICS])
    assert bool((own["body.1.mean"][0] != own["body.1.mean"][1]).any())
    assert ("body.5.largest" in own) == ("buffers" not in more)


@pytest.mark.parametrize("options", [{"kernel": "module"}, {"chunk": 2}, {"record": True}])
def test_every_way_of_the_batched_engine(options: dict[str, Any]) -> None:
    loop, batched = made("fedavg", STEP, engine="loop"), made("fedavg", STEP, **options)
    assert_equal_rounds(loop, batched, discrete=False, rounds=2)


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("policy", ["averaged", "local", "frozen"])
def test_fedavg_in_plain_pytorch(engine: str, policy: str) -> None:
    """The module in training mode trains, and in evaluation mode evaluates, with nothing of ours around it."""
    rest = "body.4=frozen"  # BatchNorm has its own tests
    simulation = made("fedavg", STEP, engine=engine, buffers=f"body.1={policy},body.5={policy},{rest}")
    samples, problem = simulation.engine.samples, simulation.engine.problem
    module = built().double()

    def mode(training: bool) -> None:
        module.train(training)
        module.body[4].eval()
        if policy == "frozen":
            module.body[1].eval()
            module.body[5].eval()

    shared = copy.deepcopy(module.state_dict())
    own = [copy.deepcopy(module.state_dict()) for _ in SIZES]
    kept, still = set(NAMES) if policy == "local" else set(), {name for name in shared if "body.4.running" in name}
    for number in (1, 2, 3):
        clients = cohort_of(number).tolist()
        for client in clients:
            begins = shared | {name: own[client][name] for name in kept}
            module.load_state_dict(begins | {"body.1.seen": begins["body.1.seen"].round().long()})
            optimiser = torch.optim.SGD(module.parameters(), lr=0.1)
            index = samples.splits["train"][client]
            mode(True)
            for places in batches_of(simulation, client, number, 4, 2):
                x, y = samples.x[index[places]], samples.y[index[places]]
                optimiser.zero_grad()
                F.cross_entropy(module(x), y).backward()
                optimiser.step()
            own[client] = copy.deepcopy(module.state_dict())
        mean = share_mean([own[client] for client in clients], clients)
        shared |= {name: mean[name] for name in shared.keys() - kept if name not in still}
        simulation.play_round(cohort_of(number), number)
    personal = simulation.personal(everyone(simulation), 3)
    for client in range(5):
        found = problem.layout.views(personal["w"][client])
        found |= problem.statistics.views(personal[STATISTICS][client]) if policy != "frozen" else {}
        for name, value in found.items():
            torch.testing.assert_close(value, own[client][name].double(), rtol=0, atol=1e-10)
    scores = Scorer(simulation, everyone(simulation), everyone(simulation)[:0], ("test",)).scores(3)
    losses = {score.model: score.values for score in scores if score.metric == "loss"}
    for client in range(5):
        index = samples.splits["test"][client]
        for model, state in {"personal": own[client], "global": shared | {n: own[client][n] for n in kept}}.items():
            module.load_state_dict(state | {"body.1.seen": state["body.1.seen"].round().long()})
            mode(False)
            loss = F.cross_entropy(module(samples.x[index]), samples.y[index])
            torch.testing.assert_close(losses[model][client].cpu(), loss.detach().double().cpu(), rtol=0, atol=1e-10)


class Outside(nn.Module):
    """Changes a buffer of a layer in it, that layer itself changing none."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(6, 3), Bounded()

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer(x)
        if self.training:
            self.scale.unused.add_(out.detach().mean())
        return out + self.scale.unused.sum()


def test_a_buffer_that_another_layer_changes() -> None:
    ends = []
    for engine in ENGINES.values():
        with randomness.torch_stream(11, "test model"):
            module = Outside().to(DEVICE)
        problem = Problem.of(module, dtype=torch.float64, device=DEVICE, sample=torch.ones(2, 6, dtype=torch.float64))
        assert problem.statistics.names == ("scale.unused",)
        simulation = Simulation(registry.make("fedavg", STEP), engine(problem, classification(5, sizes=SIZES), 3))
        simulation.play_round(everyone(simulation), 1)
        ends.append(simulation.server)
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=0, atol=1e-10)


class Always(nn.Module):
    """Changes its buffer in evaluation too."""

    def __init__(self, shape: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.register_buffer("seen", torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.mean()
        return self.layer(x)


class Growing(Always):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = torch.cat([self.seen, x.mean(1)])
        return self.layer(x)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Always(), "buffer 'seen' changes in forward where the model is only evaluated; change it in training alone"),
        (Growing((0,)), "buffer 'seen' changes in forward, and is no row: it must keep its shape and its type"),
    ],
)
def test_what_is_no_row_is_refused(module: nn.Module, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        models.check(module, torch.arange(12.0).view(4, 3))


def test_a_model_that_keeps_to_it_passes() -> None:
    module = built()
    before = copy.deepcopy(module.state_dict())
    models.check(module, torch.arange(24.0, device=DEVICE).view(4, 6))
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


@pytest.mark.parametrize("kind", [Normed, Tracked])
def test_class_weights_are_the_losss_alone(kind: type[nn.Module]) -> None:
    """What a layer takes its batch's mean over counts each sample once, whatever the loss makes of its class."""
    ends = []
    for engine in ENGINES.values():
        with randomness.torch_stream(11, "test model"):
            module = kind().to(DEVICE)
        problem = Problem.of(module, dtype=torch.float64, device=DEVICE, sample=torch.ones(2, 6, dtype=torch.float64))
        samples = classification(5, sizes=SIZES)
        values = torch.tensor([0.5, 1.0, 4.0], dtype=torch.float64, device=DEVICE).expand(5, -1)
        object.__setattr__(samples, "class_weights", ClassWeights.of(values, samples))
        simulation = Simulation(registry.make("fedavg", STEP), engine(problem, samples, 3))
        simulation.play_round(everyone(simulation), 1)
        ends.append(simulation.server | simulation.clients.rows)
    for name, value in ends[0].items():
        torch.testing.assert_close(ends[1][name], value, rtol=0, atol=1e-10)
