"""Per-FedAvg: the gradient of the loss after an inner step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from coterie.algorithms.base import Batch, Minibatches
from coterie.algorithms.local_training import Optimiser
from coterie.algorithms.per_fedavg import MetaTraining
from coterie.compute.nets.row_net import ModuleNet
from coterie.randomness import stream
from coterie.simulation.simulation import Simulation
from tests.oracles.quadratics import Array, Quadratics
from tests.support import classification, everyone, linear_regression, play, simulate, small_model

A, B = 0.15, 0.2  # the inner and the outer step


def of(problem: Quadratics, engine: str = "batched", **settings: Any) -> Simulation:
    own = {"inner_lr": A, "lr": B, "local_epochs": 2, "batch_size": 0} | settings
    return simulate("per_fedavg", problem.samples(), linear_regression(6), settings=own, engine=engine)


def meta_gradient(problem: Quadratics, w: Array, variant: str) -> Array:
    """Of f(w − a ∇f(w)), a row for each client: (I − a A) ∇f(w̃), or without the Hessian."""
    gradient = problem.gradient(w - A * problem.gradient(w))
    if variant == "fo":
        return gradient
    return gradient - A * np.einsum("iab,ib->ia", problem.curvatures, gradient)


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_steps_are_exact_on_quadratics(engine: str, variant: str) -> None:
    problem = Quadratics.drawn(1, 4)
    simulation = of(problem, engine, variant=variant)
    play(simulation, 3)
    w, p = np.zeros(6), problem.sizes / problem.sizes.sum()
    for _ in range(3):
        own = np.tile(w, (4, 1))
        for _ in range(2):
            own = own - B * meta_gradient(problem, own, variant)
        w = p @ own
    np.testing.assert_allclose(simulation.server["w"].numpy(), w, rtol=0, atol=1e-10)


def test_hf_descends_the_maml_objective_to_its_optimum() -> None:
    # The gradient is (I − aA) A (I − aA) (w − c), summed over clients; FO lacks the first factor and ends elsewhere.
    problem = Quadratics.drawn(2, 2, unequal=False)
    ends = {}
    for variant in ("fo", "hf"):
        simulation = of(problem, variant=variant, local_epochs=1, lr=0.8)
        play(simulation, 70)
        ends[variant] = simulation.server["w"].numpy()
        np.testing.assert_allclose(meta_gradient(problem, ends[variant], variant).sum(0), 0, rtol=0, atol=1e-9)
    shrink = np.eye(6) - A * problem.curvatures
    weight = shrink @ problem.curvatures @ shrink
    optimum = np.linalg.solve(weight.sum(0), np.einsum("iab,ib->a", weight, problem.centres))
    np.testing.assert_allclose(ends["hf"], optimum, rtol=0, atol=1e-9)
    assert np.abs(ends["fo"] - optimum).max() > 1e-2


def test_each_derivative_is_taken_on_its_own_batch() -> None:
    draw = stream(3, "batches")
    xs, ys = draw.normal(size=(3, 5, 4)), draw.normal(size=(3, 5))
    module = linear_regression(4).double()

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.squeeze(-1) - targets).square() / 2

    batches = [
        Batch(
            ModuleNet(module),
            loss,
            torch.from_numpy(x).unsqueeze(0),
            torch.from_numpy(y).unsqueeze(0),
            torch.full((1, 5), 0.2, dtype=torch.float64),
            torch.ones(1, dtype=torch.float64),
        )
        for x, y in zip(xs, ys, strict=True)
    ]
    w = draw.normal(size=4)
    work = {"w": torch.from_numpy(w).unsqueeze(0), "lr": torch.tensor([[B]], dtype=torch.float64)}

    def gradient(at: Array, batch: int) -> Array:
        return xs[batch].T @ (xs[batch] @ at - ys[batch]) / 5

    outer = gradient(w - A * gradient(w, 0), 1)
    hessian = xs[2].T @ xs[2] / 5
    for delta, expected in ((0.0, outer), (1e-3, outer - A * hessian @ outer)):
        task = MetaTraining(Optimiser(lr=B), Minibatches(5), inner_lr=A, delta=delta)
        found = task.step(work, *batches)["w"][0].numpy()
        np.testing.assert_allclose(found, w - B * expected, rtol=0, atol=1e-11)


def test_hf_approaches_the_gradient_that_autograd_gives_on_a_network() -> None:
    samples, module = classification(sizes=[12, 12, 12, 12, 12]), small_model()
    ends = {}
    for variant in ("fo", "hf"):
        settings = {"variant": variant, "inner_lr": 0.5, "lr": 1.0, "local_epochs": 1, "batch_size": 0, "delta": 1e-4}
        simulation = simulate("per_fedavg", samples, module, task="multiclass", settings=settings)
        start = simulation.server["w"]
        simulation.play_round(torch.tensor([2]), 1)
        ends[variant] = start - simulation.server["w"]
    index = samples.splits["train"][2]
    x, y = samples.x[index], samples.y[index]
    names = list(simulation.engine.net.layout.names)

    def loss(flat: torch.Tensor) -> torch.Tensor:
        views = simulation.engine.net.layout.views(flat.unsqueeze(0))
        outputs = torch.func.functional_call(module.double(), {name: views[name][0] for name in names}, (x,))
        return torch.nn.functional.cross_entropy(outputs, y)

    w = start.clone().requires_grad_()
    (inner,) = torch.autograd.grad(loss(w), w, create_graph=True)
    (expected,) = torch.autograd.grad(loss(w - 0.5 * inner), w)
    error = {variant: float((found - expected).norm() / expected.norm()) for variant, found in ends.items()}
    assert error["hf"] < 1e-6  # the finite difference errs by order delta²
    assert error["fo"] > 1e-2


@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_no_inner_step_is_fedavg_with_the_outer_step(variant: str) -> None:
    local = {"lr": 0.3, "local_epochs": 2, "batch_size": 0}
    ends = []
    for name, own in (("per_fedavg", {"inner_lr": 0.0, "variant": variant}), ("fedavg", {})):
        simulation = simulate(name, classification(), small_model(), task="multiclass", settings=local | own)
        play(simulation, 3, lambda number: torch.tensor([0, 2, 4]))
        ends.append(simulation.server["w"])
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-14)


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("steps", [1, 3])
def test_personal_models_are_adapted_on_training_data_and_dropped(engine: str, steps: int) -> None:
    problem = Quadratics.drawn(4, 4)
    simulation = of(problem, engine, adapt_steps=steps)
    play(simulation, 2, lambda number: torch.tensor([0, 1]))
    before = {name: rows.clone() for name, rows in simulation.clients.rows.items()}
    expected = np.tile(simulation.server["w"].numpy(), (4, 1))  # clients that never took part, too
    for _ in range(steps):
        expected = expected - A * problem.gradient(expected)
    found = simulation.personal(everyone(simulation), 2)["w"].numpy()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)
    assert all(torch.equal(rows, simulation.clients.rows[name]) for name, rows in before.items())


def test_hf_is_better_after_the_inner_step_than_fedavg() -> None:
    # What it is for. FedAvg minimises the mean loss before the step, Per-FedAvg the one after it.
    problem = Quadratics.drawn(5, 3, unequal=False)
    simulation = of(problem, variant="hf", local_epochs=1, lr=0.8)
    play(simulation, 50)

    def after(w: Array) -> float:
        return float(problem.loss(w - A * problem.gradient(w)).mean())

    assert after(simulation.server["w"].numpy()) < after(problem.optimum()) - 1e-4
