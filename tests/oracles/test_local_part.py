"""Parameters that stay with their client: FedAvg with a local head is FedPer, replayed and solved by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from coterie import randomness
from coterie.algorithms.base import Replies
from coterie.compute.samples import Samples
from coterie.errors import ConfigError, ModelError
from coterie.models.problem import Problem
from coterie.rows import Columns
from coterie.simulation.exchange import Request
from tests.oracles.regression import Array
from tests.support import classification, everyone, play, samples_of, simulate, small_model

SIZES = (6, 9, 14)


def federation(features: int, seed: int = 8) -> tuple[Samples, list[tuple[Array, Array]]]:
    draw = randomness.stream(seed, "test local part")
    parts = [(draw.normal(size=(size, features)), draw.normal(size=size)) for size in SIZES]
    return samples_of([(torch.from_numpy(x), torch.from_numpy(y)) for x, y in parts]), parts


class TwoLayers(nn.Module):
    """``head(body(x))``, both linear and without bias."""

    def __init__(self, body: Array, head: Array) -> None:
        super().__init__()
        self.body = nn.Linear(*body.shape[::-1], bias=False)
        self.head = nn.Linear(len(head), 1, bias=False)
        self.body.weight.data, self.head.weight.data = torch.from_numpy(body), torch.from_numpy(head)[None]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.body(x))
        return out


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize(("momentum", "decay"), [(0.0, 0.0), (0.6, 0.1)])
def test_fedper_by_hand(engine: str, momentum: float, decay: float) -> None:
    """Arivazhagan et al., 2019: SGD on body and head at once, the mean of the bodies, and each its own head."""
    samples, parts = federation(4)
    draw = randomness.stream(9, "test two layers")
    body, heads = draw.normal(size=(2, 4)), np.tile(draw.normal(size=2), (3, 1))
    settings = {"lr": 0.05, "local_epochs": 3, "batch_size": 0, "momentum": momentum, "weight_decay": decay}
    simulation = simulate(
        "fedavg", samples, TwoLayers(body, heads[0]), settings=settings, engine=engine, local=("head",)
    )
    for number in (1, 2):
        play(simulation, 1, first=number)
        bodies = []
        for client, (x, y) in enumerate(parts):
            b, h = body.copy(), heads[client].copy()
            moving_b, moving_h = np.zeros_like(b), np.zeros_like(h)
            for _ in range(3):
                residual = (x @ b.T @ h - y) / len(y)
                towards_b, towards_h = np.outer(h, residual @ x) + decay * b, b @ x.T @ residual + decay * h
                moving_b, moving_h = momentum * moving_b + towards_b, momentum * moving_h + towards_h
                b, h = b - 0.05 * moving_b, h - 0.05 * moving_h
            bodies.append(b)
            heads[client] = h
        body = np.average(bodies, axis=0, weights=SIZES)
        np.testing.assert_allclose(simulation.server["w"].cpu(), body.ravel(), atol=1e-12)
        np.testing.assert_allclose(simulation.clients.rows["local_part"].cpu(), heads, atol=1e-12)
        personal = simulation.personal(everyone(simulation), number)["w"].cpu()
        wanted = [np.concatenate([b.ravel(), h]) for b, h in zip(bodies, heads, strict=True)]
        np.testing.assert_allclose(personal, np.stack(wanted), atol=1e-12)
        # The global model, where it is applied: the common body under the client's own head.
        shared, one = simulation.on_clients({"w": simulation.server["w"]}, everyone(simulation))
        assert not one
        wanted = [np.concatenate([body.ravel(), h]) for h in heads]
        np.testing.assert_allclose(shared["w"].cpu(), np.stack(wanted), atol=1e-12)
        x, y = parts[1]
        outputs = simulation.engine.predict(simulation.algorithm.predict, shared, everyone(simulation), "train")
        mine = outputs[SIZES[0] : SIZES[0] + SIZES[1]].squeeze(-1).cpu()
        np.testing.assert_allclose(mine, x @ body.T @ heads[1], atol=1e-12)


class Sum(nn.Module):
    """``common · x[:2] + own · x[2:]``."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.own = nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.common(x[..., :2]) + self.own(x[..., 2:])
        return out


@pytest.mark.parametrize("algorithm", ["fedavg", "fedsgd"])
def test_the_fixed_point_solves_the_joint_least_squares(algorithm: str) -> None:
    """With one full step a round, rest is where ``Σ p_i ∂f_i/∂common = 0`` and each ``∂f_i/∂own_i = 0``."""
    samples, parts = federation(4)
    steps: dict[str, Any] = {"fedavg": {"local_epochs": 1, "batch_size": 0}, "fedsgd": {}}[algorithm]
    simulation = simulate(algorithm, samples, Sum(), settings={"lr": 0.3} | steps, local=("own.*",))
    play(simulation, 700)
    # All samples weigh the same in Σ p_i f_i: one block of columns for what is common, and one for each client's own.
    design = np.zeros((sum(SIZES), 2 + 2 * len(SIZES)))
    at = 0
    for client, (x, _) in enumerate(parts):
        design[at : at + len(x), :2] = x[:, :2]
        design[at : at + len(x), 2 + 2 * client : 4 + 2 * client] = x[:, 2:]
        at += len(x)
    wanted = np.linalg.lstsq(design, np.concatenate([y for _, y in parts]), rcond=None)[0]
    np.testing.assert_allclose(simulation.server["w"].cpu(), wanted[:2], atol=1e-10)
    np.testing.assert_allclose(simulation.clients.rows["local_part"].cpu().flatten(), wanted[2:], atol=1e-10)


STEPS = [{}, {"momentum": 0.5, "weight_decay": 0.1}, {"optimiser": "adam", "lr": 0.01}]


@pytest.mark.parametrize("more", STEPS)
def test_alone_it_makes_no_difference_what_is_shared(more: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"lr": 0.1, "local_epochs": 2, "batch_size": 4} | more
    everything, local = (
        simulate(name, classification(3), small_model(), task="multiclass", settings=settings, local=patterns)
        for name, patterns in (("local", ()), ("local", ("head.weight", "body.*.bias")))
    )
    play(everything, 3)
    play(local, 3)
    one, two = (each.personal(everyone(each), 3)["w"] for each in (everything, local))
    torch.testing.assert_close(one, two, rtol=0, atol=1e-12)


def test_distances_see_what_is_shared_alone() -> None:
    """FedAMP weighs by ``κ exp(−|w_i − w_j|²/σ)``, and ``w`` are the shared columns of the last models."""
    settings = {"lr": 0.1, "local_epochs": 2, "batch_size": 4, "sigma": 0.5, "kappa": 0.3, "guard": False}
    simulation = simulate(
        "fedamp", classification(4), small_model(), task="multiclass", settings=settings, local=("head",)
    )
    play(simulation, 1)
    w = simulation.server["w"].cpu().numpy()
    assert w.shape == (4, 6 * 5 + 5)
    apart = np.square(w[:, None] - w[None]).sum(-1)
    wanted = 0.3 * np.exp(-apart / 0.5)
    np.fill_diagonal(wanted, 0)
    np.fill_diagonal(wanted, 1 - wanted.sum(1))
    info = simulation.play_round(everyone(simulation), 2)
    np.testing.assert_allclose(info["weights"].values.cpu(), wanted, atol=1e-12)  # type: ignore[union-attr]


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 4), nn.GroupNorm(2, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 3))


@pytest.mark.parametrize(
    ("patterns", "wanted"),
    [
        (("norm",), ("1.weight", "1.bias", "3.weight", "3.bias")),
        (("3",), ("3.weight", "3.bias")),
        (("[04].weight",), ("0.weight", "4.weight")),
        (("*.bias", "3"), ("0.bias", "1.bias", "3.weight", "3.bias", "4.bias")),
    ],
)
def test_patterns_choose_parameters(patterns: tuple[str, ...], wanted: tuple[str, ...]) -> None:
    problem = Problem.of(normed(), dtype=torch.float64)
    assert problem.matching(patterns) == wanted
    simulation = simulate("fedavg", classification(3), normed(), task="multiclass", local=patterns)
    assert simulation.part is not None and not set(simulation.part.layout.names) & set(wanted)


class Shared(nn.Module):
    """A matrix in two layers, and a layer in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second, self.head = (
            nn.Linear(6, 4),
            nn.BatchNorm1d(4),
            nn.Sequential(nn.Linear(4, 4)),
            nn.Linear(4, 4),
        )
        self.second.append(self.norm)
        self.head.weight = self.second[0].weight

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.second(self.norm(self.first(x))))
        return out


@pytest.mark.parametrize(
    ("pattern", "wanted", "statistics"),
    [
        ("head", {"second.0.weight", "head.bias"}, False),
        ("head.weight", {"second.0.weight"}, False),
        ("second.1", {"norm.weight", "norm.bias"}, True),
        ("second", {"second.0.weight", "second.0.bias", "norm.weight", "norm.bias"}, True),
        ("norm", {"norm.weight", "norm.bias"}, True),
    ],
)
def test_what_layers_share_stays_by_each_of_its_names(pattern: str, wanted: set[str], statistics: bool) -> None:
    samples = classification(3, classes=4)
    simulation = simulate("fedavg", samples, Shared(), task="multiclass", local=(pattern,), settings={"batch_size": 0})
    part, norms = simulation.part, simulation.norms
    assert part is not None and norms is not None
    assert part.names == wanted and norms.sends_all != statistics
    crossed: list[int] = []
    deliver = simulation.exchange.deliver

    def recorded(request: Request) -> Replies:
        replies = deliver(request)
        crossed.extend(value.shape[-1] for rows in (request.rows, replies.rows) for value in rows.values())
        return replies

    simulation.exchange.deliver = recorded  # type: ignore[method-assign]
    play(simulation, 1)
    assert set(crossed) == {part.layout.size} | (set() if statistics else {2 * 4 + 1})


def test_a_policy_means_a_layer_by_each_of_its_names() -> None:
    for buffers in ("norm=local", "second=local", "second.1=local"):
        assert Problem.of(Shared(), buffers=buffers).policies == {"norm": "local"}


@pytest.mark.parametrize("pattern", ["norm", "1"])
def test_a_layer_without_parameters_keeps_its_statistics_by_another_option(pattern: str) -> None:
    problem = Problem.of(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, affine=False)))
    with pytest.raises(ConfigError, match=f"local has '{pattern}', .* which stay with --buffers '1=local'"):
        problem.matching((pattern,))


def test_what_cannot_stay_is_refused() -> None:
    def begin(name: str, *patterns: str) -> None:
        simulate(name, classification(3), small_model(), task="multiclass", local=patterns)

    with pytest.raises(ConfigError, match=r"local has 'tail', which matches no parameter of the model: it has body\."):
        begin("fedavg", "head", "tail")
    with pytest.raises(ModelError, match="every parameter of the model stays with its client"):
        begin("fedavg", "*")
    for name in ("fedrep", "fedrod"):
        with pytest.raises(ModelError, match="leave head out of local"):
            begin(name, "head")


def test_parts_of_a_model_know_what_stays() -> None:
    """The head of a model whose biases stay has its weights in the shared row, and its bias in the local one."""
    simulation = simulate("fedavg", classification(3), small_model(), task="multiclass", local=("*.bias",))
    part, net = simulation.part, simulation.engine.net
    assert part is not None
    head, shared, local = part.within(net, ("head",))
    assert (shared, local) == (Columns(((30, 45),)), Columns(((5, 8),)))
    row = torch.arange(53.0).unsqueeze(0)
    assert torch.equal(part.join(part.shared.take(row), part.local.take(row)), row)
    assert torch.equal(head.join(shared.take(part.shared.take(row)), local.take(part.local.take(row))), row[:, 35:])
