"""FedRep: a shared body under heads that stay where they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from coterie.algorithms.base import Replies
from coterie.compute.engine import Call
from coterie.errors import ModelError
from coterie.models import Network, build
from coterie.randomness import stream, torch_stream
from coterie.simulation.exchange import Request
from coterie.simulation.simulation import Simulation
from tests.support import everyone, linear_regression, play, samples_of, simulate

FEATURES, WIDTH = 4, 2
SIZES = (3, 8, 5, 6)
BODY = WIDTH * FEATURES + WIDTH  # floats of the body: weight and bias
HEAD = WIDTH + 1  # floats of the head: weight and bias
FULL = {"batch_size": 0, "lr": 0.1}


def data() -> list[tuple[Tensor, Tensor]]:
    draw = stream(4, "fedrep data")
    return [
        (torch.from_numpy(draw.normal(size=(n, FEATURES))), torch.from_numpy(draw.normal(size=n) + 0.5 * i))
        for i, n in enumerate(SIZES)
    ]


def model() -> Network:
    with torch_stream(8, "fedrep model"):
        return Network(nn.Sequential(nn.Linear(FEATURES, WIDTH)), nn.Linear(WIDTH, 1), split=1)


def make(engine: str = "batched", lost: Any = None, **settings: Any) -> Simulation:
    return simulate("fedrep", samples_of(data()), model(), engine=engine, settings=FULL | settings, lost=lost)


def watch(simulation: Simulation) -> list[dict[str, Tensor]]:
    """Collect everything that crosses the wire, both ways."""
    seen: list[dict[str, Tensor]] = []
    deliver = simulation.exchange.deliver

    def recorded(request: Request) -> Replies:
        replies = deliver(request)
        seen.extend([request.message.rows(len(replies)), replies.rows])
        return replies

    simulation.exchange.deliver = recorded  # type: ignore[method-assign]
    return seen


class Reference:
    """The method in NumPy, with gradients by hand, for full batches and f_i = (1/2N) Σ (h·(B x + c) + b − y)²."""

    def __init__(self, clients: list[tuple[Tensor, Tensor]], row: NDArray[np.float64]) -> None:
        self.data = [(x.numpy(), y.numpy()) for x, y in clients]
        self.body = row[:BODY].copy()
        self.heads = [row[BODY:].copy() for _ in clients]

    @staticmethod
    def gradients(body: Any, head: Any, x: Any, y: Any) -> tuple[Any, Any]:
        b, c = body[: WIDTH * FEATURES].reshape(WIDTH, FEATURES), body[WIDTH * FEATURES :]
        z = x @ b.T + c
        residual = (z @ head[:WIDTH] + head[WIDTH] - y) / len(y)
        to_head = np.append(z.T @ residual, residual.sum())
        to_b = np.outer(head[:WIDTH], x.T @ residual)
        return np.append(to_b.ravel(), head[:WIDTH] * residual.sum()), to_head

    def round(self, cohort: list[int], head_steps: int, body_steps: int, lr: float) -> None:
        bodies = []
        for i in cohort:
            body = self.body.copy()
            for _ in range(head_steps):
                self.heads[i] = self.heads[i] - lr * self.gradients(body, self.heads[i], *self.data[i])[1]
            for _ in range(body_steps):
                body = body - lr * self.gradients(body, self.heads[i], *self.data[i])[0]
            bodies.append(body)
        self.body = np.mean(bodies, 0)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_rounds_equal_an_independent_implementation(engine: str) -> None:
    # Client 1 is asked in round 2 and does not answer. The mean is uniform although sizes differ.
    def lost(clients: Tensor, call: Call) -> Tensor:
        return (clients == 1) & (call.round == 2)

    simulation = make(engine, lost, head_epochs=3, local_epochs=2)
    reference = Reference(data(), simulation.engine.problem.start.numpy())
    for number, (asked, answered) in enumerate([([0, 1, 3], [0, 1, 3]), ([1, 2], [2]), ([0, 1, 2, 3],) * 2], start=1):
        simulation.play_round(torch.tensor(asked), number)
        reference.round(answered, 3, 2, 0.1)
        np.testing.assert_allclose(simulation.server["body"].numpy(), reference.body, rtol=0, atol=1e-13)
        np.testing.assert_allclose(
            simulation.clients.rows["head"].numpy(), np.stack(reference.heads), rtol=0, atol=1e-13
        )


def test_heads_never_leave_the_client() -> None:
    # With lr = 0 a head stays the mark it is set to, and any number derived from it by copying would be that mark.
    simulation = make(lr=0.0, head_epochs=2, local_epochs=2)
    marks = 1e6 + torch.arange(len(SIZES), dtype=torch.float64)
    simulation.clients.rows["head"] = marks.unsqueeze(1).expand(-1, HEAD).clone()
    seen = watch(simulation)
    play(simulation, 2)
    simulation.personal(everyone(simulation), 2)
    assert torch.equal(simulation.clients.rows["head"], marks.unsqueeze(1).expand(-1, HEAD))
    assert len(seen) == 4
    for rows in [*seen, simulation.server]:
        assert not any(torch.isin(value, marks).any() for value in rows.values())


def test_messages_carry_the_body_alone() -> None:
    simulation = make(head_epochs=1)
    seen = watch(simulation)
    play(simulation, 2)
    for rows in seen:
        assert {name: tuple(value.shape) for name, value in rows.items()} == {"body": (len(SIZES), BODY)}
    assert set(simulation.server) == {"body"} and simulation.server["body"].shape == (BODY,)


def test_the_head_is_weight_and_bias_of_the_last_layer() -> None:
    simulation = make(head_epochs=1, local_epochs=0)
    before = simulation.clients.rows["head"].clone()
    body = simulation.server["body"].clone()
    play(simulation, 1)
    moved = simulation.clients.rows["head"] != before
    assert moved.shape == (len(SIZES), HEAD) and bool(moved.all())
    # Frozen while the head trains, to the last bit on the clients; the mean of equal rows only to rounding.
    torch.testing.assert_close(simulation.server["body"], body, rtol=1e-15, atol=1e-15)


def test_the_head_is_frozen_while_the_body_trains() -> None:
    simulation = make(head_epochs=0, local_epochs=3)
    before = simulation.clients.rows["head"].clone()
    body = simulation.server["body"].clone()
    play(simulation, 2)
    assert torch.equal(simulation.clients.rows["head"], before)
    assert bool((simulation.server["body"] != body).all())


def test_head_epochs_approach_least_squares_on_the_features() -> None:
    # Gradient descent multiplies the distance to the solution by at most max |1 − lr λ| over the Hessian's eigenvalues.
    lr, epochs = 1.5, 200
    simulation = make(head_epochs=epochs, local_epochs=0, lr=lr)
    before = simulation.clients.rows["head"][1].clone()
    simulation.play_round(torch.tensor([1]), 1)
    x, y = data()[1]
    body = simulation.server["body"]
    z = x @ body[: WIDTH * FEATURES].view(WIDTH, FEATURES).T + body[WIDTH * FEATURES :]
    design = torch.cat([z, torch.ones(len(y), 1, dtype=torch.float64)], 1)
    best = torch.linalg.lstsq(design, y.unsqueeze(1)).solution.squeeze(1)
    factor = (1 - lr * torch.linalg.eigvalsh(design.T @ design / len(y))).abs().max() ** epochs
    assert factor < 0.01
    left = (simulation.clients.rows["head"][1] - best).norm()
    assert left <= factor * (before - best).norm() + 1e-12


def test_the_personal_model_is_the_current_body_with_the_clients_last_head() -> None:
    simulation = make(head_epochs=2)
    play(simulation, 1)
    heads = simulation.clients.rows["head"].clone()
    simulation.play_round(torch.tensor([0, 2]), 2)
    rows = simulation.personal(everyone(simulation), 2)["w"]
    assert torch.equal(rows[:, :BODY], simulation.server["body"].expand(len(SIZES), -1))
    assert torch.equal(rows[[1, 3], BODY:], heads[[1, 3]])
    assert bool((rows[[0, 2], BODY:] != heads[[0, 2]]).any(1).all())


def test_there_is_no_global_model_since_heads_stay() -> None:
    simulation = make()
    assert not simulation.algorithm.has_global
    assert simulation.algorithm.global_model(simulation.server) is None


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_dropout_masks_are_those_of_the_whole_model(engine: str) -> None:
    # Training the whole model's head alone, by hand, on the same minibatch and stream key as the task was given.
    with torch_stream(8, "fedrep model"):
        body = nn.Sequential(nn.Linear(FEATURES, 6), nn.ReLU(), nn.Dropout(0.5))
        module = Network(body, nn.Linear(6, 1), split=3)
    settings = FULL | {"head_epochs": 1, "local_epochs": 0}
    simulation = simulate("fedrep", samples_of(data()), module, engine=engine, settings=settings)
    start = simulation.engine.problem.start
    batches = []
    task = simulation.tasks["train"]
    losses = type(task).losses
    try:
        type(task).losses = lambda self, work, batch: batches.append(batch) or losses(self, work, batch)
        simulation.play_round(torch.tensor([2]), 1)
    finally:
        type(task).losses = losses
    (batch,) = batches
    gradient = batch.grad(start.unsqueeze(0))[0]
    head = simulation.engine.net.columns("head")
    wanted = head.take(start - 0.1 * gradient)
    torch.testing.assert_close(simulation.clients.rows["head"][2], wanted, rtol=0, atol=1e-14)


class Detour(nn.Module):
    """Has a body and a head, but does something else between them."""

    def __init__(self) -> None:
        super().__init__()
        with torch_stream(8, "detour"):
            self.body, self.head = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out


@pytest.mark.parametrize(
    ("module", "complaint"),
    [
        (Detour(), r"head\(body\(x\)\)"),
        (linear_regression(FEATURES), r"no part 'body' .* call the last layer head and the rest body"),
        (build("linear", (FEATURES,), 1), "has no parameters"),
    ],
    ids=["detour", "no-parts", "empty-body"],
)
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_models_that_cannot_be_taken_apart_are_refused(module: nn.Module, complaint: str, engine: str) -> None:
    with pytest.raises(ModelError, match=complaint):
        simulate("fedrep", samples_of(data()), module, engine=engine)


class Scaled(nn.Module):
    """A body that divides by its largest feature, through which no gradient goes; a trace does not see that."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(FEATURES, 3), nn.Linear(3, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.one(x)
        with torch.no_grad():
            largest = x.abs().amax(1, keepdim=True)
        out: Tensor = self.two(x / largest)
        return out


def test_the_body_is_computed_as_the_whole_model_was_seen_to_be() -> None:
    ends = []
    for engine in ("loop", "batched"):
        with torch_stream(8, "fedrep model"):
            module = Network(nn.Sequential(Scaled()), nn.Linear(WIDTH, 1), split=1)
        simulation = simulate("fedrep", samples_of(data()), module, engine=engine, settings={"lr": 0.1})
        play(simulation, 2)
        ends.append(simulation.clients.rows | simulation.server)
    for rows in ends[0]:
        torch.testing.assert_close(ends[1][rows], ends[0][rows], rtol=1e-10, atol=1e-12)
