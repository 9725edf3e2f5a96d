"""The row optimisers against ``torch.optim``, by the displacement from the start."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from coterie.algorithms import registry
from coterie.algorithms.base import ClientContext
from coterie.algorithms.local_training import Optimiser, refuse_unstable
from coterie.errors import ConfigError
from coterie.randomness import stream
from coterie.rows import Rows
from tests.support import classification, play, simulate, small_model

ROWS, SIZE = 3, 11

SGD = [
    {"kind": "sgd", "lr": lr, "momentum": momentum, "weight_decay": decay}
    for lr in (0.01, 0.2)
    for momentum in (0.0, 0.5, 0.9)
    for decay in (0.0, 0.01, 0.3)
]
ADAM = [{"kind": "adam", "lr": lr, "weight_decay": decay} for lr in (1e-3, 0.05) for decay in (0.0, 0.01, 0.3)]


def named(settings: dict[str, Any]) -> str:
    return "-".join(str(value) for value in settings.values())


def context(round_number: int = 1) -> ClientContext:
    """Optimisers ask for nothing but the round."""
    return cast(ClientContext, SimpleNamespace(round=round_number))


def start(dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(stream(3, "optimiser start").normal(size=(ROWS, SIZE))).to(dtype)


def gradient(w: Tensor, step: int) -> Tensor:
    """Of a loss with curvature within [0.5, 1.5] and minimum near -10, different in every row and at every step."""
    rows, columns = torch.arange(w.shape[0], dtype=w.dtype), torch.arange(w.shape[1], dtype=w.dtype)
    phase = 0.7 * rows.unsqueeze(1) + 0.3 * columns + 0.1 * step
    return w + 0.5 * torch.sin(w + phase) + 10.0 + torch.cos(phase)


def ours(optimiser: Optimiser, w: Tensor, steps: int, round_number: int = 1) -> Tensor:
    work: Rows = {"w": w, **optimiser.init(context(round_number), w)}
    for step in range(steps):
        work = work | optimiser.update(work, "w", gradient(work["w"], step))
    return work["w"]


def torchs(settings: dict[str, Any], w: Tensor, steps: int) -> Tensor:
    """Each row by an optimiser of its own."""
    ends = []
    for row in range(len(w)):
        parameter = nn.Parameter(w.clone())  # the whole matrix, so that the gradient knows its row; one row is used
        one = dict(settings)
        kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[one.pop("kind")]
        optimiser = kind([parameter], **one, foreach=False)
        for step in range(steps):
            parameter.grad = gradient(parameter.detach(), step)
            optimiser.step()
        ends.append(parameter.detach()[row])
    return torch.stack(ends)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("steps", [1, 7, 60])
@pytest.mark.parametrize("settings", SGD + ADAM, ids=named)
def test_the_displacement_is_that_of_torch_optim(settings: dict[str, Any], steps: int, dtype: torch.dtype) -> None:
    # Both round each step's result, of size up to max |w|, a few times in a step: say 4 units in the last place. With
    # curvature in [0.5, 1.5] plus decay, a step of sgd contracts the difference, and momentum carries it on by at most
    # 1 / (1 - momentum). Adam moves at most lr a step, 3 in all, so that its gradients stay above 10 - 1.5 - 6: the
    # ratio of its moments, and with it the step, has a relative error of a few units in the last place.
    w = start(dtype)
    got, wanted = ours(Optimiser(**settings), w, steps) - w, torchs(settings, w, steps) - w
    size = float(w.abs().max() + wanted.abs().max())
    carried = 1 / (1 - settings.get("momentum", 0.0))
    tolerance = 4 * torch.finfo(dtype).eps * size * steps * carried
    assert float(wanted.abs().min()) > 100 * tolerance  # the displacement is not lost in the tolerance
    assert float((got - wanted).abs().max()) <= tolerance


@pytest.mark.parametrize("settings", [SGD[0], SGD[8], ADAM[0]], ids=named)
def test_the_learning_rate_decays_by_round(settings: dict[str, Any]) -> None:
    w = start(torch.float64)
    got = ours(Optimiser(**settings, lr_decay=0.5), w, 9, round_number=4)
    slower = settings | {"lr": settings["lr"] / 8}
    torch.testing.assert_close(got, torchs(slower, w, 9), rtol=0, atol=1e-13)


@pytest.mark.parametrize("settings", [SGD[0], SGD[8], ADAM[2]], ids=named)
def test_rows_are_independent_and_inputs_are_left_alone(settings: dict[str, Any]) -> None:
    optimiser, w = Optimiser(**settings), start(torch.float64)
    work = {"w": w, **optimiser.init(context(), w)}
    work |= optimiser.update(work, "w", gradient(w, 0))
    before = {name: value.clone() for name, value in work.items()}
    slope = gradient(work["w"], 1)
    again = optimiser.update(work, "w", slope)
    for name, value in before.items():
        assert torch.equal(work[name], value), name
    changed = slope.clone()
    changed[1] = 1e6
    other = optimiser.update(work, "w", changed)
    for name, value in again.items():
        assert len(value) == ROWS
        assert torch.equal(value[[0, 2]], other[name][[0, 2]]), name
        if name != "adam count":
            assert not torch.equal(value[1], other[name][1]), name


@pytest.mark.parametrize("settings", [SGD[0], SGD[8], ADAM[2]], ids=named)
def test_two_matrices_are_optimised_apart(settings: dict[str, Any]) -> None:
    optimiser, w = Optimiser(**settings), start(torch.float64)
    v = w[:, :4] * -0.5
    work = {"w": w, "v": v, **optimiser.init(context(), w, "w_"), **optimiser.init(context(), v, "v_")}
    names = set(work)
    for step in range(5):
        new = optimiser.update(work, "w", gradient(work["w"], step), "w_")
        if step % 2 == 0:  # the second takes fewer steps
            new |= optimiser.update(work, "v", gradient(work["v"], step // 2), "v_")
        work = work | new
    assert set(work) == names
    assert torch.equal(work["w"], ours(optimiser, w, 5))
    assert torch.equal(work["v"], ours(optimiser, v, 3))


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize(
    "settings",
    [
        {"lr": 0.3, "momentum": 0.5, "weight_decay": 0.01},
        {"optimiser": "adam", "lr": 0.01, "weight_decay": 0.01},
    ],
    ids=["sgd", "adam"],
)
def test_local_training_is_torch_training(engine: str, settings: dict[str, Any]) -> None:
    """Whole batches, three epochs, two rounds: optimiser states begin anew each round."""
    samples = classification(3)
    options = settings | {"batch_size": 0, "local_epochs": 3}
    simulation = simulate("local", samples, small_model(), task="multiclass", engine=engine, settings=options)
    play(simulation, 2)
    for client in range(3):
        module = small_model().double()
        mine = samples.splits["train"][client]
        for _ in range(2):
            plain = {key: value for key, value in settings.items() if key != "optimiser"}
            optimiser: torch.optim.Optimizer
            if settings.get("optimiser") == "adam":
                optimiser = torch.optim.Adam(module.parameters(), **plain)
            else:
                optimiser = torch.optim.SGD(module.parameters(), **plain)
            for _ in range(3):
                optimiser.zero_grad()
                nn.functional.cross_entropy(module(samples.x[mine]), samples.y[mine]).backward()
                optimiser.step()
        wanted = nn.utils.parameters_to_vector(module.parameters()).detach()
        torch.testing.assert_close(simulation.clients.rows["w"][client], wanted, rtol=0, atol=1e-12)


def test_momentum_with_adam_is_refused() -> None:
    with pytest.raises(ConfigError, match="momentum"):
        registry.make("fedavg", {"optimiser": "adam", "momentum": 0.5})


def test_a_proximal_weight_beyond_stability_is_refused() -> None:
    # w ← w − lr prox (w − centre) multiplies the distance by 1 − lr prox, which grows exactly beyond 2.
    refuse_unstable(0.1, 20.0)
    refuse_unstable(0.1, 1e6, "adam")
    refuse_unstable(0.0, 1e6)
    with pytest.raises(ConfigError, match="mu"):
        refuse_unstable(0.1, 20.1, name="mu")
