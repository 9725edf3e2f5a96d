"""SplitGP: a personal part with an early exit, and a shared part behind it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

from coterie.algorithms import registry
from coterie.algorithms.splitgp import SplitGP
from coterie.compute.engine import Call
from coterie.errors import ConfigError, ModelError
from coterie.models import Network, build
from coterie.models.problem import Problem
from coterie.randomness import torch_stream
from coterie.simulation.simulation import Simulation
from tests.support import ENGINES, classification, everyone, play, samples_of, simulate

FEATURES, CLASSES = 6, 3
HIDDEN = (5, 4)  # the client holds the first hidden layer, the server the second and the head
LOWER = HIDDEN[0] * (FEATURES + 1)
AUXILIARY = CLASSES * (HIDDEN[0] + 1)
SERVER = HIDDEN[1] * (HIDDEN[0] + 1) + CLASSES * (HIDDEN[1] + 1)
SETTINGS = {"lr": 0.1, "local_epochs": 2, "batch_size": 4}
SIZES = [5, 9, 13, 8]


def model() -> nn.Module:
    with torch_stream(11, "splitgp model"):
        return build("mlp", (FEATURES,), CLASSES, hidden="5-4")


def make(engine: str = "batched", lost: Any = None, **settings: Any) -> Simulation:
    samples = classification(len(SIZES), FEATURES, CLASSES, sizes=SIZES)
    # Not through the registry, which takes finite numbers alone.
    method = SplitGP(**(SETTINGS | settings))
    return simulate(method, samples, model(), task="multiclass", engine=engine, lost=lost)


class TwoExits(nn.Module):
    """The split model as an ordinary one: both exits' outputs side by side, parameters client's part first."""

    def __init__(self) -> None:
        super().__init__()
        self.lower = nn.Linear(FEATURES, HIDDEN[0])
        self.auxiliary = nn.Linear(HIDDEN[0], CLASSES)
        self.upper = nn.Linear(*HIDDEN)
        self.head = nn.Linear(HIDDEN[1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        z = self.lower(x).relu()
        return torch.cat([self.auxiliary(z), self.head(self.upper(z).relu())], -1)

    def set(self, row: Tensor) -> TwoExits:
        self.double()
        nn.utils.vector_to_parameters(row.clone(), self.parameters())
        return self

    def row(self) -> Tensor:
        return nn.utils.parameters_to_vector(self.parameters()).detach().clone()


def two_exit_loss(gamma: float) -> Callable[[Tensor, Tensor], Tensor]:
    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        early, late = outputs[:, :CLASSES], outputs[:, CLASSES:]
        per_exit = [F.cross_entropy(logits, y, reduction="none") for logits in (early, late)]
        return gamma * per_exit[0] + (1 - gamma) * per_exit[1]

    return loss


def whole(simulation: Simulation) -> Tensor:
    return torch.cat([simulation.server["client"], simulation.server["server"]])


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0])
def test_lam_0_is_fedavg_of_the_client_part_too(engine: str, gamma: float) -> None:
    split = make(engine, gamma=gamma, lam=0.0)
    problem = Problem.of(TwoExits().set(whole(split)), "multiclass", loss=two_exit_loss(gamma), dtype=torch.float64)
    average = Simulation(
        registry.make("fedavg", SETTINGS), ENGINES["loop"](problem, split.engine.samples, split.engine.seed)
    )
    for number, cohort in enumerate([[0, 1, 3], [2, 3], [0, 1, 2, 3]], start=1):
        for simulation in (split, average):
            simulation.play_round(torch.tensor(cohort), number)
        torch.testing.assert_close(whole(split), average.server["w"], rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("lam", [0.2, 1.0])
def test_rounds_equal_an_independent_implementation(engine: str, lam: float) -> None:
    """Full batches, plain modules and torch.optim; one client of round 2 does not answer."""
    gamma, lr, epochs = 0.4, 0.2, 2

    def lost(clients: Tensor, call: Call) -> Tensor:
        return (clients == 0) & (call.round == 2)

    simulation = make(engine, lost, gamma=gamma, lam=lam, lr=lr, local_epochs=epochs, batch_size=0)
    mean, shared = simulation.server["client"].clone(), simulation.server["server"].clone()
    own = [mean.clone() for _ in SIZES]
    samples = simulation.engine.samples
    for number, (asked, answered) in enumerate([([0, 1, 2],) * 2, ([0, 1, 3], [1, 3]), ([0, 2, 3],) * 2], start=1):
        rows = []
        for client in answered:
            begin = torch.cat([lam * own[client] + (1 - lam) * mean, shared])
            module = TwoExits().set(begin)
            optimiser = torch.optim.SGD(module.parameters(), lr=lr)
            mine = samples.splits["train"][client]
            for _ in range(epochs):
                optimiser.zero_grad()
                two_exit_loss(gamma)(module(samples.x[mine]), samples.y[mine]).mean().backward()
                optimiser.step()
            own[client] = module.row()[: LOWER + AUXILIARY]
            rows.append(module.row())
        total = sum(SIZES[client] for client in answered)
        joined = sum(SIZES[client] / total * row for client, row in zip(answered, rows, strict=True))
        assert isinstance(joined, Tensor)
        mean, shared = joined[: LOWER + AUXILIARY], joined[LOWER + AUXILIARY :]
        simulation.play_round(torch.tensor(asked), number)
        torch.testing.assert_close(simulation.server, {"client": mean, "server": shared}, rtol=0, atol=1e-12)
        torch.testing.assert_close(simulation.clients.rows["client"], torch.stack(own), rtol=0, atol=1e-12)
        personal = simulation.personal(everyone(simulation), number)
        mixed = torch.stack([lam * part + (1 - lam) * mean for part in own])
        torch.testing.assert_close(personal["client"], mixed, rtol=0, atol=1e-12)
        torch.testing.assert_close(personal["server"], shared.expand(len(SIZES), -1), rtol=0, atol=1e-12)


def test_lam_1_and_gamma_1_is_local_training_of_the_early_exit() -> None:
    split = make(gamma=1.0, lam=1.0)
    client = split.server["client"]

    class EarlyExit(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(FEATURES, HIDDEN[0]), nn.ReLU(), nn.Linear(HIDDEN[0], CLASSES))

    module = EarlyExit().double()
    nn.utils.vector_to_parameters(client.clone(), module.parameters())
    local = simulate("local", split.engine.samples, module, task="multiclass", settings=SETTINGS)
    server = split.server["server"].clone()
    for simulation in (split, local):
        play(simulation, 3)
    torch.testing.assert_close(split.clients.rows["client"], local.clients.rows["w"], rtol=0, atol=1e-12)
    torch.testing.assert_close(split.server["server"], server, rtol=1e-14, atol=0)


def test_gamma_0_and_lam_0_is_fedavg_of_the_model_itself() -> None:
    split = make(gamma=0.0, lam=0.0)
    auxiliary = split.server["client"][LOWER:].clone()
    average = simulate("fedavg", split.engine.samples, model(), task="multiclass", settings=SETTINGS)
    for simulation in (split, average):
        play(simulation, 3)
    got = torch.cat([split.server["client"][:LOWER], split.server["server"]])
    torch.testing.assert_close(got, average.server["w"], rtol=0, atol=1e-12)
    torch.testing.assert_close(split.server["client"][LOWER:], auxiliary, rtol=1e-14, atol=0)


def test_the_server_part_is_averaged_fully_whatever_lam() -> None:
    for lam in (0.0, 1.0):
        simulation = make(lam=lam)
        play(simulation, 2)
        personal = simulation.personal(everyone(simulation), 2)
        assert torch.equal(personal["server"], simulation.server["server"].expand(len(SIZES), -1))
        same = (personal["client"] - simulation.server["client"]).abs().max(1).values < 1e-15
        assert bool((same == (lam == 0)).all())


def both_exits(simulation: Simulation, rows: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Both exits of each client's model on its test samples, by the ordinary two-exit module."""
    early, late = [], []
    samples = simulation.engine.samples
    for client in range(len(SIZES)):
        module = TwoExits().set(torch.cat([rows["client"][client], rows["server"][client]]))
        with torch.no_grad():
            outputs = module(samples.x[samples.splits["test"][client]])
        early.append(outputs[:, :CLASSES])
        late.append(outputs[:, CLASSES:])
    return torch.cat(early), torch.cat(late)


def gated(threshold: float, sharpen: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    simulation = make(threshold=threshold, local_epochs=6)
    play(simulation, 4)
    simulation.clients.rows["client"][:, LOWER:] *= sharpen
    simulation.server["client"][LOWER:] *= sharpen
    rows = simulation.personal(everyone(simulation), 4)
    got = simulation.engine.predict(simulation.algorithm.predict, rows, everyone(simulation), "test")
    return got, *both_exits(simulation, rows)


@pytest.mark.parametrize("sharpen", [1.0, 1e7])
def test_threshold_0_is_the_server_alone(sharpen: float) -> None:
    # Even where the client's softmax is saturated, so that its computed entropy is exactly 0.
    got, early, late = gated(0.0, sharpen)
    if sharpen > 1:
        assert bool((torch.special.entr(early.softmax(1)).sum(1) == 0).any())
    torch.testing.assert_close(got, late, rtol=0, atol=1e-9)


@pytest.mark.parametrize("threshold", [math.inf, math.log(CLASSES) + 1e-9])
def test_an_infinite_threshold_is_the_client_alone(threshold: float) -> None:
    # Entropy is at most log(classes), so that any number above it is infinite enough.
    got, early, _ = gated(threshold)
    torch.testing.assert_close(got, early, rtol=0, atol=1e-12)


def test_between_them_the_entropy_of_the_clients_exit_decides_for_each_sample() -> None:
    got, early, late = gated(0.3, sharpen=8.0)
    p = np.exp(early.numpy()) / np.exp(early.numpy()).sum(1, keepdims=True)
    entropy = -(p * np.log(p)).sum(1)
    assert 0.1 < (entropy > 0.3).mean() < 0.9  # both happen
    wanted = np.where((entropy > 0.3)[:, None], late.numpy(), early.numpy())
    np.testing.assert_allclose(got.numpy(), wanted, rtol=0, atol=1e-12)
    assert float((early - late).abs().min(1).values.max()) > 1e-3  # and it matters which


def test_the_global_model_is_made_of_the_means_and_is_gated_too() -> None:
    simulation = make(threshold=0.3)
    play(simulation, 2)
    rows = simulation.algorithm.global_model(simulation.server)
    assert rows is not None and simulation.algorithm.derived_global
    predict, everybody = simulation.algorithm.predict, everyone(simulation)
    got = simulation.engine.predict(predict, rows, everybody, "test", shared=True)
    each = {name: value.expand(len(SIZES), -1) for name, value in rows.items()}
    torch.testing.assert_close(got, simulation.engine.predict(predict, each, everybody, "test"), rtol=0, atol=1e-13)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_convolutional_model_is_split_inside_its_body(engine: str) -> None:
    images = [(torch.linspace(-1, 1, 64 * n).view(n, 1, 8, 8).double().sin(), torch.arange(n) % 2) for n in (3, 4)]
    samples = samples_of(images, task="multiclass", classes=2)
    with torch_stream(2, "conv"):
        module = build("cnn_small", (1, 8, 8), 2)
    n = sum(value.numel() for value in module.parameters())
    settings = SETTINGS | {"threshold": 0.0}
    simulation = simulate("splitgp", samples, module, task="multiclass", engine=engine, settings=settings)
    activations = 16 * 8 * 8  # 16 maps of the image's size: the split is after the first convolution
    assert simulation.server["client"].shape == (16 * 10 + 2 * (activations + 1),)
    play(simulation, 1)
    assert simulation.traffic.up == simulation.traffic.down == 2 * 8 * (n + 2 * (activations + 1))
    # The server's exit of the personal model is the model with the client's layers and the server's in one.
    rows = simulation.personal(everyone(simulation), 1)
    got = simulation.engine.predict(simulation.algorithm.predict, rows, everyone(simulation), "test")
    joined = torch.cat([rows["client"][:, : 16 * 10], rows["server"]], 1)
    plain = simulation.engine.predict(lambda net, w, x: net.outputs(w["w"], x), {"w": joined}, torch.arange(2), "test")
    torch.testing.assert_close(got, plain, rtol=0, atol=1e-12)


def test_dropout_behind_the_split_keeps_the_whole_models_masks() -> None:
    # gamma = 0 and lam = 0 is FedAvg of the model, dropout included, since both draw from the same streams.
    def dropping() -> nn.Module:
        with torch_stream(11, "dropping"):
            layers = [nn.Linear(FEATURES, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5)]
            return Network(nn.Sequential(*layers), nn.Linear(8, CLASSES), split=3)

    samples = classification(len(SIZES), FEATURES, CLASSES, sizes=SIZES)
    settings = SETTINGS | {"gamma": 0.0, "lam": 0.0}
    split = simulate("splitgp", samples, dropping(), task="multiclass", settings=settings)
    average = simulate("fedavg", samples, dropping(), task="multiclass", settings=SETTINGS)
    for simulation in (split, average):
        play(simulation, 2)
    got = torch.cat([split.server["client"][: 8 * (FEATURES + 1)], split.server["server"]])
    torch.testing.assert_close(got, average.server["w"], rtol=0, atol=1e-12)


def test_settings_survive_a_configuration_file() -> None:
    for threshold in (0.0, 1.5):
        made = registry.make("splitgp", {"threshold": threshold})
        assert registry.make("splitgp", yaml.safe_load(yaml.safe_dump(made.settings()))) == made
    for wrong in ({"threshold": -0.1}, {"threshold": math.nan}, {"threshold": math.inf}, {"gamma": 1.1}, {"lam": -0.1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            registry.make("splitgp", wrong)


class NotCut(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.head = body, nn.Linear(HIDDEN[0], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


def test_models_that_cannot_be_split_are_refused() -> None:
    samples = classification(2, FEATURES, CLASSES)
    body = nn.Linear(FEATURES, HIDDEN[0])
    for module, complaint in (
        (NotCut(nn.Sequential(body)), "where it is split"),
        (Network(nn.Sequential(body), nn.Linear(HIDDEN[0], 1), split=1), "output for each class"),
    ):
        with pytest.raises(ModelError, match=complaint):
            simulate("splitgp", samples, module, task="multiclass")
    whole_body = NotCut(body)
    whole_body.split = 1  # type: ignore[assignment]
    with pytest.raises(ModelError, match="cannot be cut"):
        simulate("splitgp", samples, whole_body, task="multiclass")
