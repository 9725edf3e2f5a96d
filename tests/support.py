"""Small federations with known mathematics, for oracles and conformance."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from coterie import randomness
from coterie.algorithms import registry
from coterie.algorithms.base import Algorithm
from coterie.compute.batched import BatchedEngine
from coterie.compute.engine import Call, Engine
from coterie.compute.loop import LoopEngine
from coterie.compute.samples import Samples
from coterie.data.partitions import Ragged, Shares
from coterie.models import build
from coterie.models.problem import Problem
from coterie.simulation.simulation import Simulation

DEVICE = torch.device(os.environ.get("COTERIE_TEST_DEVICE", "cpu"))  # the promises are the same on every device

ENGINES: dict[str, Callable[..., Engine]] = {"loop": LoopEngine, "batched": BatchedEngine}


def samples_of(
    train: Sequence[tuple[Tensor, Tensor]],
    *,
    validation: Sequence[tuple[Tensor, Tensor]] | None = None,
    test: Sequence[tuple[Tensor, Tensor]] | None = None,
    task: str = "regression",
    classes: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Samples:
    """Put each client's own samples into one store; test samples default to the training ones."""
    pieces, index, at = [], {}, 0
    none = [(x[:0], y[:0]) for x, y in train]
    for split, parts in (("train", train), ("validation", validation or none), ("test", test or train)):
        numbers = []
        for x, y in parts:
            pieces.append((x, y))
            numbers.append(torch.arange(at, at + len(y)))
            at += len(y)
        index[split] = Ragged.of(numbers)
    x = torch.cat([x for x, _ in pieces]).to(DEVICE, dtype)
    y = torch.cat([y for _, y in pieces]).to(DEVICE)
    y = y.to(dtype) if task == "regression" else y.long()
    counts = torch.zeros(len(train), classes, dtype=dtype)
    for client, (_, labels) in enumerate(train):
        if classes:
            counts[client] = torch.bincount(labels.long(), minlength=classes).to(dtype)
    splits: dict[Any, Ragged] = {
        split: Ragged(ragged.flat.to(DEVICE), ragged.offsets.to(DEVICE)) for split, ragged in index.items()
    }
    one = torch.ones((), dtype=dtype, device=DEVICE)
    return Samples(x, y, one, torch.zeros_like(one), splits, counts.to(DEVICE), None, dtype)


def linear_regression(features: int) -> nn.Module:
    """A model without bias whose row is the coefficient vector, started at zero: loss (1/2N)|X w - y|²."""
    module = nn.Linear(features, 1, bias=False)
    nn.init.zeros_(module.weight)
    return module


def simulate(
    algorithm: Algorithm | str,
    samples: Samples,
    module: nn.Module,
    *,
    task: str = "regression",
    engine: str = "batched",
    settings: dict[str, Any] | None = None,
    seed: int = 3,
    dtype: torch.dtype = torch.float64,
    lost: Callable[[Tensor, Call], Tensor] | None = None,
    local: Sequence[str] = (),
    **options: Any,
) -> Simulation:
    """Build a simulation on given samples and a given (initialised) module."""
    if isinstance(algorithm, str):
        algorithm = registry.make(algorithm, settings or {})
    problem = Problem.of(module, task, dtype=dtype, device=DEVICE)
    return Simulation(algorithm, ENGINES[engine](problem, samples, seed, **options), lost=lost, local=local)


def everyone(simulation: Simulation) -> Tensor:
    return torch.arange(simulation.engine.samples.clients, device=DEVICE)


def play(simulation: Simulation, rounds: int, cohort: Callable[[int], Tensor] | None = None, first: int = 1) -> None:
    """Play rounds, all clients in each unless ``cohort`` says otherwise."""
    for number in range(first, first + rounds):
        simulation.play_round(everyone(simulation) if cohort is None else cohort(number), number)


def classification(
    clients: int = 5, features: int = 6, classes: int = 3, seed: int = 7, sizes: Sequence[int] | None = None
) -> Samples:
    """Clients of different sizes whose labels come from a linear rule that differs a little from one to the next."""
    draw = randomness.stream(seed, "test classification")
    rule = draw.normal(size=(features, classes))

    def some(count: int, own: Any) -> tuple[Tensor, Tensor]:
        x = draw.normal(size=(count, features))
        return torch.from_numpy(x), torch.from_numpy((x @ own).argmax(1))

    train, validation, test = [], [], []
    for client in range(clients):
        own = rule + 0.5 * draw.normal(size=rule.shape)
        count = sizes[client] if sizes is not None else 5 + 4 * client
        train.append(some(count, own))
        validation.append(some(3 + client % 2, own))
        test.append(some(6, own))
    return samples_of(train, validation=validation, test=test, task="multiclass", classes=classes)


def small_model(features: int = 6, classes: int = 3, hidden: str = "5", seed: int = 11) -> nn.Module:
    """An MLP with a body and a head."""
    with randomness.torch_stream(seed, "test model"):
        return build("mlp", (features,), classes, hidden=hidden)


def shares_of(train: list[Tensor]) -> Shares:
    """Shares of given training samples, with nothing to validate or test on."""
    none = [index[:0] for index in train]
    return Shares(Ragged.of(train), Ragged.of(none), Ragged.of(none), None, False, None, "test")
