"""FedROD: a balanced generic branch, and personal heads on what it leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from coterie.compute.engine import Call
from coterie.errors import ModelError
from coterie.models import Network
from coterie.randomness import stream, torch_stream
from coterie.simulation.exchange import AttackedExchange
from coterie.simulation.simulation import Simulation
from tests.support import classification, everyone, play, samples_of, simulate, small_model

FEATURES, WIDTH, CLASSES = 4, 3, 3
LABELS = ([0, 0, 1, 0, 0], [2, 1, 2, 2, 0, 1, 2], [1, 1, 1])  # client 0 lacks class 2; client 2 has class 1 alone
FULL = {"batch_size": 0, "lr": 0.2, "local_epochs": 3}


def data(labels: Any = LABELS) -> list[tuple[Tensor, Tensor]]:
    draw = stream(4, "fedrod data")
    return [(torch.from_numpy(draw.normal(size=(len(y), FEATURES))), torch.tensor(y)) for y in labels]


def model(outputs: int = CLASSES) -> Network:
    with torch_stream(8, "fedrod model"):
        return Network(nn.Sequential(nn.Linear(FEATURES, WIDTH)), nn.Linear(WIDTH, outputs), split=1)


def make(
    algorithm: str = "fedrod",
    engine: str = "batched",
    labels: Any = LABELS,
    outputs: int = CLASSES,
    lost: Any = None,
    **settings: Any,
) -> Simulation:
    samples = samples_of(data(labels), task="multiclass", classes=CLASSES)
    settings = FULL | settings
    return simulate(algorithm, samples, model(outputs), task="multiclass", engine=engine, settings=settings, lost=lost)


def softmax(logits: Any) -> Any:
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    return shifted / shifted.sum(1, keepdims=True)


class Reference:
    """The method in NumPy with gradients by hand, for full batches: z = B x + c, ψ(z) = W z + b, φ(z) = V z + v."""

    SHAPES = ((WIDTH, FEATURES), (WIDTH,), (CLASSES, WIDTH), (CLASSES,))

    def __init__(self, row: Tensor) -> None:
        pieces = np.split(row.numpy(), np.cumsum([np.prod(shape) for shape in self.SHAPES])[:-1])
        self.w = [piece.reshape(shape).copy() for piece, shape in zip(pieces, self.SHAPES, strict=True)]
        self.phi = [[np.zeros((CLASSES, WIDTH)), np.zeros(CLASSES)] for _ in LABELS]
        self.data = [(x.numpy(), y.numpy()) for x, y in data()]

    def train(self, i: int, steps: int, lr: float, gamma: float) -> list[Any]:
        x, y = self.data[i]
        hot = np.eye(CLASSES)[y]
        with np.errstate(divide="ignore"):
            prior = gamma * np.log(hot.sum(0))
        b_, c, w, b = (value.copy() for value in self.w)
        v, u = self.phi[i]
        for _ in range(steps):
            z = x @ b_.T + c
            logits = z @ w.T + b
            to_logits = (softmax(logits + prior) - hot) / len(y)
            to_personal = (softmax(logits + z @ v.T + u) - hot) / len(y)
            to_z = to_logits @ w
            v, u = v - lr * to_personal.T @ z, u - lr * to_personal.sum(0)
            w, b = w - lr * to_logits.T @ z, b - lr * to_logits.sum(0)
            b_, c = b_ - lr * to_z.T @ x, c - lr * to_z.sum(0)
        self.phi[i] = [v, u]
        return [b_, c, w, b]

    def round(self, cohort: list[int], steps: int, lr: float, gamma: float) -> None:
        trained = [self.train(i, steps, lr, gamma) for i in cohort]
        sizes = np.array([len(LABELS[i]) for i in cohort], dtype=np.float64)
        share = sizes / sizes.sum()
        self.w = [sum(p * part for p, part in zip(share, parts, strict=True)) for parts in zip(*trained, strict=True)]


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_rounds_equal_an_independent_implementation(engine: str, gamma: float) -> None:
    def lost(clients: Tensor, call: Call) -> Tensor:
        return (clients == 2) & (call.round == 2)

    simulation = make(engine=engine, lost=lost, gamma=gamma)
    reference = Reference(simulation.engine.problem.start)
    for number, (asked, answered) in enumerate([([0, 1, 2],) * 2, ([1, 2], [1]), ([0, 2],) * 2], start=1):
        simulation.play_round(torch.tensor(asked), number)
        reference.round(answered, 3, 0.2, gamma)
        wanted = np.concatenate([value.ravel() for value in reference.w])
        np.testing.assert_allclose(simulation.server["w"].numpy(), wanted, rtol=0, atol=1e-13)
        heads = np.stack([np.append(v.ravel(), u) for v, u in reference.phi])
        np.testing.assert_allclose(simulation.clients.rows["phi"].numpy(), heads, rtol=0, atol=1e-13)


@pytest.mark.parametrize("labels", [([0, 1, 2], [2, 1, 0, 0, 1, 2], [1, 0, 2])])
def test_uniform_class_counts_give_plain_cross_entropy(labels: Any) -> None:
    # log n_c is then the same for all classes, which softmax does not see: the generic branch is FedAvg's.
    both = [make(name, labels=labels, batch_size=2) for name in ("fedrod", "fedavg")]
    for simulation in both:
        play(simulation, 3)
    torch.testing.assert_close(both[0].server["w"], both[1].server["w"], rtol=0, atol=1e-13)


def test_without_balancing_the_generic_branch_is_fedavg() -> None:
    rod, avg = make("fedrod", gamma=0.0, batch_size=2), make("fedavg", batch_size=2)
    unbalanced = make("fedrod", batch_size=2)
    for simulation in (rod, avg, unbalanced):
        play(simulation, 2)
    torch.testing.assert_close(rod.server["w"], avg.server["w"], rtol=0, atol=1e-13)
    assert float((unbalanced.server["w"] - avg.server["w"]).abs().max()) > 1e-3


def predictions(simulation: Simulation, shared: bool) -> Tensor:
    everybody = everyone(simulation)
    rows = simulation.algorithm.global_model(simulation.server) if shared else simulation.personal(everybody, 1)
    assert rows is not None
    return simulation.engine.predict(simulation.algorithm.predict, rows, everybody, "test", shared)


def test_a_personal_head_of_zeros_gives_the_global_model() -> None:
    simulation = make()
    torch.testing.assert_close(predictions(simulation, False), predictions(simulation, True), rtol=0, atol=1e-14)
    play(simulation, 1)
    assert float((predictions(simulation, False) - predictions(simulation, True)).abs().max()) > 1e-3
    simulation.clients.rows["phi"].zero_()
    torch.testing.assert_close(predictions(simulation, False), predictions(simulation, True), rtol=0, atol=1e-14)


def test_the_personal_model_adds_both_heads_on_the_current_body() -> None:
    simulation = make()
    play(simulation, 1)
    heads = simulation.clients.rows["phi"].clone()
    simulation.play_round(torch.tensor([1]), 2)  # 0 and 2 are absent: last head, current body and generic head
    row = simulation.server["w"]
    body, head = row[: WIDTH * (FEATURES + 1)], row[WIDTH * (FEATURES + 1) :]
    wanted = []
    for client, (x, _) in enumerate(data()):
        z = x @ body[: WIDTH * FEATURES].view(WIDTH, FEATURES).T + body[WIDTH * FEATURES :]
        personal = simulation.clients.rows["phi"][client]
        both = head + personal
        wanted.append(z @ both[: CLASSES * WIDTH].view(CLASSES, WIDTH).T + both[CLASSES * WIDTH :])
    torch.testing.assert_close(predictions(simulation, False), torch.cat(wanted), rtol=0, atol=1e-13)
    assert torch.equal(simulation.clients.rows["phi"][[0, 2]], heads[[0, 2]])


def head_rows(simulation: Simulation, outputs: int = CLASSES) -> Tensor:
    head = simulation.server["w"][WIDTH * (FEATURES + 1) :]
    return torch.cat([head[: outputs * WIDTH].view(outputs, WIDTH), head[outputs * WIDTH :].view(outputs, 1)], 1)


@pytest.mark.parametrize(("client", "missing"), [(0, [2]), (2, [0, 2])])
def test_classes_without_samples_are_masked(client: int, missing: list[int]) -> None:
    # Their probability is exactly 0, so their rows of the generic head get exactly no gradient.
    simulation = make()
    before = head_rows(simulation)
    simulation.play_round(torch.tensor([client]), 1)
    after = head_rows(simulation)
    assert torch.equal(after[missing], before[missing])
    plain = make("fedavg")
    plain.play_round(torch.tensor([client]), 1)
    assert bool((head_rows(plain)[missing] != before[missing]).all())


def test_a_client_with_a_single_class_learns_only_personally() -> None:
    # One class alone has probability 1 under the mask: the balanced loss is 0 and so is its gradient.
    simulation = make()
    row = simulation.server["w"].clone()
    simulation.play_round(torch.tensor([2]), 1)
    assert torch.equal(simulation.server["w"], row)
    assert bool((simulation.clients.rows["phi"][2] != 0).all())


def test_a_head_wider_than_the_classes_is_masked_beyond_them() -> None:
    simulation = make(outputs=CLASSES + 2)
    before = head_rows(simulation, CLASSES + 2)
    play(simulation, 2)
    after = head_rows(simulation, CLASSES + 2)
    torch.testing.assert_close(after[CLASSES:], before[CLASSES:], rtol=1e-15, atol=0)
    assert bool((after[:CLASSES] != before[:CLASSES]).all())


def test_personal_heads_do_not_touch_the_generic_branch_and_never_leave() -> None:
    quiet, loud = make(), make()
    loud.clients.rows["phi"] += 7.0
    sent: list[Tensor] = []
    loud.exchange = AttackedExchange(loud.exchange, lambda rows, clients, call: sent.append(rows["w"]) or rows)  # type: ignore[func-returns-value]
    for simulation in (quiet, loud):
        play(simulation, 2)
    assert torch.equal(quiet.server["w"], loud.server["w"])
    assert [tuple(value.shape) for value in sent] == [(3, quiet.engine.net.layout.size)] * 2
    n = quiet.engine.net.layout.size
    assert (loud.traffic.up, loud.traffic.down) == (2 * 3 * n * 8, 2 * 3 * n * 8)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_the_generic_branch_of_a_deep_model_is_fedavg_on_the_balanced_loss(engine: str) -> None:
    # Against FedAvg on a model whose outputs are shifted by the client's own log counts: one client, so it is constant.
    samples = classification(clients=1, sizes=[17])
    rod = simulate("fedrod", samples, small_model(), task="multiclass", engine=engine, settings=FULL)
    counts = samples.class_counts[0]

    class Shifted(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x) + counts.log()
            return out

    avg = simulate("fedavg", samples, Shifted(small_model()), task="multiclass", engine="loop", settings=FULL)
    for simulation in (rod, avg):
        play(simulation, 2)
    torch.testing.assert_close(rod.server["w"], avg.server["w"], rtol=0, atol=1e-12)


def test_a_single_output_is_refused() -> None:
    samples = samples_of(data(), task="multiclass", classes=CLASSES)
    with pytest.raises(ModelError, match="output for each class"):
        simulate("fedrod", samples, model(1), task="binary")
