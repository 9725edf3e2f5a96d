"""FedPG: a direction that serves everybody, and drifts that harm nobody."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.algorithms.base import Info, Weights
from coterie.algorithms.server_math.fairness import fairness_coefficients
from coterie.compute.engine import Call
from coterie.errors import ConfigError
from coterie.randomness import stream
from coterie.simulation.simulation import Simulation
from tests.oracles.fedpg_by_hand import ByHand, Played, fairness_gradient, unfairness
from tests.oracles.quadratics import Array, Quadratics
from tests.support import classification, everyone, linear_regression, play, simulate, small_model

CLIENTS, FEATURES, ROUNDS, LR = 7, 14, 6, 0.1


def drawn(seed: int, clients: int = CLIENTS, spread: float = 5.0, features: int = FEATURES) -> Quadratics:
    return Quadratics.drawn(seed, clients, features, spread=spread)


def of(problem: Quadratics, engine: str = "batched", lost: Any = None, **settings: Any) -> Simulation:
    own, features = {"lr": LR} | settings, problem.centres.shape[1]
    return simulate("fedpg", problem.samples(), linear_regression(features), settings=own, engine=engine, lost=lost)


def cohort_of(seed: int, number: int, clients: int = CLIENTS) -> list[int]:
    draw = stream(seed, "cohort", number)
    return sorted(draw.choice(clients, size=int(draw.integers(2, 4)), replace=False).tolist())


def played(seed: int, **settings: Any) -> Iterator[tuple[Simulation, Played, Info]]:
    """Rounds of both, with cohorts of two or three of seven clients; what the hand computed, and what was recorded."""
    problem = drawn(seed)
    simulation = of(problem, **settings)
    names = {"direction": "mean"}
    hand = ByHand(problem, LR, **{names.get(key, key): value for key, value in settings.items()})
    for number in range(1, ROUNDS + 1):
        online = cohort_of(seed, number)
        info = simulation.play_round(torch.tensor(online), number)
        yield simulation, hand.play(number, online), info


def direction_of(simulation: Simulation, by_hand: Played) -> Array:
    return np.asarray((simulation.server["w"].numpy() - by_hand.omega) / by_hand.eta)


# ------------------------------------------------------------------------------------------------------------ equations


@pytest.mark.parametrize("features", [FEATURES, 12])  # inner products are kept where clients are at most half as many
@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize(
    ("settings", "by_hand"),
    [
        pytest.param({}, {}, id="fedpg"),
        pytest.param({"direction": "mean"}, {"mean": True}, id="M1"),
        pytest.param({"fair": False}, {"fair": False}, id="M2"),
        pytest.param({"drift": False}, {"drift": False}, id="M3"),
        pytest.param({"history": False}, {"history": False}, id="M4"),
        pytest.param({"gamma": 0.6, "lr_decay": 0.5}, {"gamma": 0.6, "decay": 0.5}, id="gamma"),
        pytest.param({"gamma_over_history": True}, {"gamma_over_history": True}, id="gamma-over-history"),
    ],
)
def test_rounds_are_those_of_the_equations(
    engine: str, settings: dict[str, Any], by_hand: dict[str, Any], features: int
) -> None:
    problem = drawn(1, features=features)
    simulation, hand = of(problem, engine, **settings), ByHand(problem, LR, **by_hand)
    assert bool(len(simulation.server["products"])) is (features >= 2 * CLIENTS and settings.get("history", True))
    windowed, held = 0, 0
    for number in range(1, ROUNDS + 1):
        online = cohort_of(1, number)
        simulation.play_round(torch.tensor(online), number)
        expected = hand.play(number, online)
        windowed, held = windowed + len(expected.absent), held + int((expected.gamma < 1).sum())
        np.testing.assert_allclose(simulation.server["w"].numpy(), hand.omega, rtol=0, atol=1e-10)
        personal = simulation.personal(everyone(simulation), number)["w"].numpy()
        np.testing.assert_allclose(personal, hand.personal, rtol=0, atol=1e-10)  # the absent ones keep theirs
    assert windowed >= 5 or not settings.get("history", True)
    assert held >= 4  # drift factors below one


@given(seed=st.integers(0, 10_000))
@settings(max_examples=8, deadline=None)
def test_direction_serves_every_online_and_windowed_client_and_f_and_has_the_mean_gradients_length(seed: int) -> None:
    for simulation, hand, info in played(seed):
        if info["stationary"]:
            return
        d = direction_of(simulation, hand)
        assert (hand.gradients @ d < 0).all()
        assert (hand.stale @ d < 0).all()
        if not info["fair_dropped"]:
            assert hand.fair @ d < 0
        assert np.linalg.norm(d) == pytest.approx(np.linalg.norm(hand.gradients.mean(0)), rel=1e-9)


def test_a_small_step_lowers_every_online_loss_and_f() -> None:
    problem = drawn(2)
    simulation = of(problem, lr=1e-4)
    for number in range(1, ROUNDS + 1):
        online = cohort_of(2, number)
        before = problem.loss(simulation.server["w"].numpy())[online]
        simulation.play_round(torch.tensor(online), number)
        after = problem.loss(simulation.server["w"].numpy())[online]
        assert (after < before).all()
        assert unfairness(after) < unfairness(before)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=8, deadline=None)
def test_lambda_is_on_the_simplex_and_satisfies_kkt(seed: int) -> None:
    # Without drift, what is recorded for every client is the common lambda.
    for _, hand, info in played(seed, drift=False):
        weights = info["weights"]
        assert isinstance(weights, Weights)
        assert weights.rows.tolist() == hand.online
        assert weights.columns.tolist() == sorted(hand.online + hand.absent)
        values = weights.values.numpy()
        assert (values == values[0]).all()
        at = dict(zip(weights.columns.tolist(), values[0], strict=True))
        lam = np.array([at[i] for i in hand.online] + [at[j] for j in hand.absent] + [float(info["lambda_fair"])])
        assert (lam >= 0).all()
        assert lam.sum() == pytest.approx(1.0, abs=1e-12)
        np.testing.assert_allclose(info["lambda"].numpy(), lam[: len(hand.online)], rtol=0, atol=0)
        assert float(info["lambda_absent"]) == pytest.approx(lam[len(hand.online) : -1].sum(), abs=1e-15)
        mu = np.linalg.norm(hand.gradients, axis=1).mean()
        columns = np.array([mu * g / np.linalg.norm(g) for g in [*hand.gradients, *hand.stale, hand.fair]])
        if info["fair_dropped"]:
            assert lam[-1] == 0
            columns, lam = columns[:-1], lam[:-1]
        point = lam @ columns
        slack = (columns @ point - point @ point) / mu**2
        assert slack.min() >= -1e-9
        assert np.abs(slack[lam > 0]).max() <= 1e-9


def test_fairness_gradient_is_autograds_on_a_network() -> None:
    # From what clients send: their losses and gradients.
    samples, module = classification(), small_model()
    simulation = simulate("fedpg", samples, module, task="multiclass")
    clients, message = everyone(simulation), {"w": simulation.server["w"].expand(5, -1)}
    _, reply = simulation.engine.run(
        simulation.tasks["gradient"], clients, simulation.clients.gather(clients), message, Call(1)
    )
    found = fairness_coefficients(reply["loss"]) @ reply["g"]
    np.testing.assert_allclose(
        found.numpy(), fairness_gradient(reply["loss"].numpy(), reply["g"].numpy()), rtol=0, atol=1e-12
    )
    w = simulation.server["w"].clone().requires_grad_()
    views = simulation.engine.net.layout.views(w.unsqueeze(0))
    losses = []
    for client in range(5):
        index = samples.splits["train"][client]
        outputs = torch.func.functional_call(
            module.double(), {name: view[0] for name, view in views.items()}, (samples.x[index],)
        )
        losses.append(torch.nn.functional.cross_entropy(outputs, samples.y[index]))
    stacked = torch.stack(losses)
    (expected,) = torch.autograd.grad(-stacked.sum() / (stacked.norm() * 5**0.5), w)
    np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=0, atol=1e-12)


# --------------------------------------------------------------------------------------------------------------- drift


@given(seed=st.integers(0, 10_000), over_history=st.booleans())
@settings(max_examples=8, deadline=None)
def test_drifts_harm_nobody_and_could_not_be_larger(seed: int, over_history: bool) -> None:
    for simulation, hand, info in played(seed, gamma_over_history=over_history):
        if info["stationary"]:
            return
        d, gamma = direction_of(simulation, hand), info["gamma"].numpy()
        assert ((gamma >= 0) & (gamma <= 1)).all()
        personal = simulation.clients.rows["w"].numpy()[hand.online]
        drifted = (personal - hand.omega) / hand.eta
        scale = np.linalg.norm(hand.gradients, axis=1).max() ** 2
        for i, own in enumerate(hand.gradients):
            others = np.delete(hand.gradients, i, axis=0)
            others = np.concatenate([others, hand.stale]) if over_history else others
            assert (others @ drifted[i] <= 1e-9 * scale).all()
            assert own @ drifted[i] < 0
            if gamma[i] < 1:
                further = d + (gamma[i] + 1e-4) * (-own - d)
                assert (others @ further > 0).any()
            else:
                np.testing.assert_allclose(drifted[i], -own, rtol=0, atol=1e-9 * scale)


def test_clients_that_do_not_conflict_take_their_own_gradient() -> None:
    # All optima lie in one narrow cone: no two gradients conflict, so gamma = 1.
    problem = drawn(3, 4, spread=0.05)
    simulation = of(Quadratics(np.tile(np.eye(FEATURES), (4, 1, 1)), problem.centres, problem.offsets, problem.repeats))
    info = simulation.play_round(everyone(simulation), 1)
    assert info["gamma"].tolist() == [1.0] * 4
    personal = simulation.personal(everyone(simulation), 1)["w"].numpy()
    np.testing.assert_allclose(personal, LR * problem.centres, rtol=0, atol=1e-12)


def test_gamma_one_is_a_step_of_the_clients_own_and_leaves_the_global_model() -> None:
    problem = drawn(4)
    own, plain = of(problem, gamma=1.0), of(problem)
    for simulation in (own, plain):
        play(simulation, 3)
    torch.testing.assert_close(own.server["w"], plain.server["w"], rtol=0, atol=0)
    before = of(problem)
    play(before, 2)
    omega = before.server["w"].numpy()
    expected = omega - LR * 0.999**2 * problem.gradient(omega)
    np.testing.assert_allclose(own.personal(everyone(own), 3)["w"].numpy(), expected, rtol=0, atol=1e-12)


def test_without_drift_the_personal_model_is_the_new_global_one() -> None:
    simulation = of(drawn(5), drift=False)
    play(simulation, 2)
    torch.testing.assert_close(
        simulation.clients.rows["w"], simulation.server["w"].expand(CLIENTS, -1), rtol=0, atol=1e-15
    )


# ------------------------------------------------------------------------------------------------------- special cases


def test_one_client_descends_its_own_gradient() -> None:
    problem = drawn(6)
    simulation = of(problem, history=False)
    simulation.play_round(torch.tensor([3]), 1)
    expected = -LR * problem.gradient(np.zeros(FEATURES))[3]
    np.testing.assert_allclose(simulation.server["w"].numpy(), expected, rtol=1e-12)
    np.testing.assert_allclose(simulation.clients.rows["w"][3].numpy(), expected, rtol=1e-12)


def plain(centres: list[list[float]], offsets: list[float] | None = None) -> Quadratics:
    """Curvature one: the gradient at zero is minus the centre."""
    rows = np.array(centres)
    clients, features = rows.shape
    return Quadratics(
        np.tile(np.eye(features), (clients, 1, 1)), rows, np.array(offsets or [0.1] * clients), (1,) * clients
    )


def on(problem: Quadratics, **settings: Any) -> Simulation:
    own = {"lr": LR} | settings
    return simulate("fedpg", problem.samples(), linear_regression(problem.centres.shape[1]), settings=own)


def test_two_orthogonal_gradients_of_equal_length_are_halved() -> None:
    simulation = on(plain([[2.0, 0, 0], [0, 2.0, 0]]))
    info = simulation.play_round(everyone(simulation), 1)
    np.testing.assert_allclose(info["lambda"].numpy(), [0.5, 0.5], rtol=0, atol=1e-12)
    assert info["lambda_fair"] == 0  # equal losses: there is no fairness gradient
    # d is along (1, 1, 0) and as long as the mean gradient (1, 1, 0).
    np.testing.assert_allclose(simulation.server["w"].numpy(), [LR, LR, 0], rtol=0, atol=1e-12)


def test_gamma_in_closed_form() -> None:
    # g = -(1, 0) and -(-1, 2), equal losses: d is along the bisector of (1, 0) and (-1, 2)/sqrt 5 and as long as the
    # mean gradient, (0, 1). Then gamma_i = |a|/(|a| + |c|) with c = -1 and a = g_j.d of the other client.
    simulation = on(plain([[1.0, 0], [-1.0, 2.0]], [2.1, 0.1]))
    info = simulation.play_round(everyone(simulation), 1)
    bisector = np.array([1.0, 0]) + np.array([-1.0, 2.0]) / np.sqrt(5)
    d = bisector / np.linalg.norm(bisector)
    a = np.abs(np.array([[1.0, 0], [-1.0, 2.0]]) @ d)
    expected = [a[1] / (a[1] + 1), a[0] / (a[0] + 1)]
    np.testing.assert_allclose(info["gamma"].numpy(), expected, rtol=1e-12)
    # What a client's direction is made of: gamma of its own gradient, the rest of the common one.
    weights = info["weights"]
    assert isinstance(weights, Weights)
    own = np.array(expected)
    by_hand = (1 - own)[:, None] * 0.5 + np.diag(own)
    np.testing.assert_allclose(weights.values.numpy(), by_hand, rtol=0, atol=1e-12)


def test_opposite_gradients_leave_the_global_model() -> None:
    simulation = on(plain([[1.0, 2.0], [-2.0, -4.0]]))
    info = simulation.play_round(everyone(simulation), 1)
    assert info["stationary"] == 1
    assert not simulation.server["w"].any()
    assert info["gamma"].tolist() == [0.0, 0.0]


def test_fairness_gradient_is_dropped_where_it_alone_makes_the_direction_collapse() -> None:
    # The same gradient g twice, losses 1 and 2: grad F is a negative multiple of g, so the hull contains zero.
    simulation = on(plain([[0.6, -0.8], [0.6, -0.8]], [0.5, 1.5]))
    info = simulation.play_round(everyone(simulation), 1)
    assert info["fair_dropped"] == 1
    np.testing.assert_allclose(simulation.server["w"].numpy(), [0.6 * LR, -0.8 * LR], rtol=1e-12)


def test_a_client_at_its_optimum_is_left_out() -> None:
    simulation = on(plain([[1.0, 0, 0], [0, 1.0, 0], [0, 0, 0]], [0.1, 0.1, 0.6]), fair=False)
    info = simulation.play_round(everyone(simulation), 1)
    assert info["lambda"][2] == 0
    # |d| is the length of the mean of all three online gradients, (1, 1, 0)/3.
    np.testing.assert_allclose(simulation.server["w"].numpy(), [LR / 3, LR / 3, 0], rtol=0, atol=1e-12)


# ------------------------------------------------------------------------------------------------------- absent clients


def test_window_of_absent_clients() -> None:
    # Cohorts of 2 of 6 clients. Round t: M clients recorded before it, tau = floor(M/2), kept if t - r_j <= tau.
    simulation = of(drawn(7, 6))
    cohorts = [[0, 1], [2, 3], [4, 5], [0, 1], [0, 1], [0, 1], [0, 1]]
    expected = [
        [],
        [0, 1],  # M = 2, tau = 1: seen 1 round ago
        [0, 1, 2, 3],  # M = 4, tau = 2: seen 2 and 1 rounds ago
        [2, 3, 4, 5],  # M = 6, tau = 3
        [2, 3, 4, 5],  # seen exactly 3 rounds ago: still counts
        [4, 5],
        [],
    ]
    for number, (online, absent) in enumerate(zip(cohorts, expected, strict=True), start=1):
        info = simulation.play_round(torch.tensor(online), number)
        weights = info["weights"]
        assert isinstance(weights, Weights)
        assert sorted(set(weights.columns.tolist()) - set(online)) == absent


def test_inner_products_are_those_of_the_last_gradients_whoever_was_lost() -> None:
    def lost(clients: Tensor, call: Call) -> Tensor:
        return (clients + call.round) % 3 == 0

    simulation = of(drawn(11), lost=lost)
    for number in range(1, 9):
        simulation.play_round(torch.tensor(cohort_of(11, number)), number)
        g, products = simulation.server["g"], simulation.server["products"]
        torch.testing.assert_close(products, g @ g.T, rtol=1e-13, atol=1e-13)
        assert torch.equal(products, products.T)
    assert int((simulation.server["seen"] > 0).sum()) >= 5


def test_a_client_lost_between_the_exchanges_keeps_its_model_and_counts() -> None:
    def lost(clients: Tensor, call: Call) -> Tensor:
        return (clients == 2) & (call.round == 2) & (call.exchange == 1)

    problem = drawn(8, 4)
    simulation, complete = of(problem, lost=lost), of(problem)
    for one in (simulation, complete):
        play(one, 1)
    before = simulation.clients.rows["w"][2].clone()
    for one in (simulation, complete):
        play(one, 1, first=2)
    assert torch.equal(simulation.clients.rows["w"][2], before)
    assert torch.equal(simulation.server["w"], complete.server["w"])
    rest = torch.tensor([0, 1, 3])
    assert torch.equal(simulation.clients.rows["w"][rest], complete.clients.rows["w"][rest])


def test_a_client_whose_gradient_is_lost_counts_as_absent() -> None:
    def lost(clients: Tensor, call: Call) -> Tensor:
        return (clients == 1) & (call.round == 2)

    problem = drawn(9, 4)
    simulation, fewer = of(problem, lost=lost), of(problem)
    for one in (simulation, fewer):
        play(one, 1)
    info = simulation.play_round(torch.arange(4), 2)
    fewer.play_round(torch.tensor([0, 2, 3]), 2)
    assert torch.equal(simulation.server["w"], fewer.server["w"])
    assert torch.equal(simulation.clients.rows["w"], fewer.clients.rows["w"])
    assert simulation.server["seen"].tolist() == [2, 1, 2, 2]
    assert info["gamma"][1] == 0


def test_fresh_personal_models_are_made_anew_for_everybody_and_dropped() -> None:
    problem = drawn(10)
    stale, fresh = of(problem), of(problem, fresh=True)
    for simulation in (stale, fresh):
        play(simulation, 3, lambda number: torch.tensor(cohort_of(10, number)))
    before = {name: rows.clone() for name, rows in fresh.clients.rows.items()}
    found = fresh.personal(everyone(fresh), 3)["w"].numpy()
    assert all(torch.equal(rows, fresh.clients.rows[name]) for name, rows in before.items())
    assert torch.equal(stale.clients.rows["w"], fresh.clients.rows["w"])
    hand = ByHand(problem, LR)
    hand.omega = fresh.server["w"].numpy()
    hand.play(3, list(range(CLIENTS)))
    np.testing.assert_allclose(found, hand.personal, rtol=0, atol=1e-10)
    assert np.abs(found - stale.personal(everyone(stale), 3)["w"].numpy()).max() > 1e-3


# --------------------------------------------------------------------------------------------------- options and bytes


def test_pseudo_gradients_along_the_mean_are_fedavg() -> None:
    # w - eta mean (w - w_i)/eta = mean w_i, and the batches of the first exchange are FedAvg's; equal sizes.
    samples = classification(sizes=[9] * 5)
    local = {"lr": 0.2, "lr_decay": 0.9, "local_epochs": 2, "batch_size": 4}
    pseudo = local | {"direction": "mean", "grad_mode": "pseudo", "gamma": 1.0}
    ends = []
    for name, own in (("fedpg", pseudo), ("fedavg", local)):
        simulation = simulate(name, samples, small_model(), task="multiclass", settings=own)
        play(simulation, 3)
        ends.append((simulation.server["w"], simulation.personal(everyone(simulation), 3)["w"]))
    for one, two in zip(*ends, strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-13)


def test_pseudo_gradients_come_with_the_loss_at_the_global_model() -> None:
    problem = drawn(11, 3)
    simulation = of(problem, grad_mode="pseudo", local_epochs=2, batch_size=0)
    clients, message = everyone(simulation), {"w": simulation.server["w"].expand(3, -1)}
    _, reply = simulation.engine.run(
        simulation.tasks["gradient"], clients, simulation.clients.gather(clients), message, Call(1)
    )
    np.testing.assert_allclose(reply["loss"].numpy(), problem.loss(np.zeros(FEATURES)), rtol=1e-12)
    own = np.zeros((3, FEATURES))
    for _ in range(2):
        own = own - LR * problem.gradient(own)
    np.testing.assert_allclose(reply["g"].numpy(), -own / LR, rtol=0, atol=1e-12)


@pytest.mark.parametrize("settings", [{"lr": 0.0}, {"gamma": 1.5}, {"gamma_over_history": True, "history": False}])
def test_values_out_of_range_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(settings))):
        of(drawn(1), **settings)
