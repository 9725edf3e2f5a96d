"""S-FedPG: steps that lower every online client's loss, and make losses more equal."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.algorithms.base import Info, Replies
from coterie.compute.engine import Call
from coterie.randomness import stream
from coterie.simulation.exchange import Request
from coterie.simulation.simulation import Simulation
from tests.oracles.fedpg_by_hand import ByHand, Played, fairness_gradient, unfairness
from tests.oracles.quadratics import Quadratics
from tests.support import classification, everyone, linear_regression, play, simulate, small_model

CLIENTS, FEATURES, ROUNDS, LR, S, BETA = 6, 12, 6, 0.4, 1, 1e-4
BOTH = pytest.mark.parametrize("line_search", ["one", "exchanges"])


def drawn(seed: int, clients: int = CLIENTS, spread: float = 4.0) -> Quadratics:
    return Quadratics.drawn(seed, clients, FEATURES, spread=spread)


def of(problem: Quadratics, engine: str = "batched", lost: Any = None, **settings: Any) -> Simulation:
    own = {"lr": LR} | settings
    return simulate("sfedpg", problem.samples(), linear_regression(FEATURES), settings=own, engine=engine, lost=lost)


def cohort_of(seed: int, number: int) -> list[int]:
    draw = stream(seed, "cohort", number)
    return sorted(draw.choice(CLIENTS, size=int(draw.integers(2, 4)), replace=False).tolist())


def rounds(problem: Quadratics, simulation: Simulation, seed: int) -> list[tuple[Played, Info]]:
    hand = ByHand(problem, LR, search=(S, BETA))
    out = []
    for number in range(1, ROUNDS + 1):
        online = cohort_of(seed, number)
        info = simulation.play_round(torch.tensor(online), number)
        out.append((hand.play(number, online), info))
    return out


def passes(problem: Quadratics, hand: Played, step: float, slack: float = 0.0) -> bool:
    """The test of Eq. 9, for all online clients and F; ``slack`` for what rounding may decide."""
    new = problem.loss(hand.omega + step * hand.d)[hand.online]
    promised = BETA * step * hand.gradients @ hand.d
    fair = unfairness(new) - unfairness(hand.losses) <= BETA * step * float(hand.fair @ hand.d) + slack
    return bool((new - hand.losses <= promised + slack).all()) and (fair or len(hand.online) == 1)


@BOTH
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_rounds_are_those_of_the_equations(engine: str, line_search: str) -> None:
    problem = drawn(1)
    simulation = of(problem, engine, line_search=line_search)
    hand = ByHand(problem, LR, search=(S, BETA))
    steps = set()
    for number in range(1, ROUNDS + 1):
        online = cohort_of(1, number)
        info = simulation.play_round(torch.tensor(online), number)
        expected = hand.play(number, online)
        assert float(info["step"]) == pytest.approx(expected.eta, rel=1e-12)
        steps.add(round(math.log2(expected.eta / (LR * 0.999 ** (number - 1)))))
        np.testing.assert_allclose(simulation.server["w"].numpy(), hand.omega, rtol=0, atol=1e-9)
        personal = simulation.personal(everyone(simulation), number)["w"].numpy()
        np.testing.assert_allclose(personal, hand.personal, rtol=0, atol=1e-9)
    assert len(steps) > 1  # the search matters here


@given(seed=st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_accepted_steps_satisfy_armijo_for_all_and_larger_ones_do_not(seed: int) -> None:
    problem = drawn(seed)
    accepted = 0
    for t, (hand, info) in enumerate(rounds(problem, of(problem), seed)):
        if info["stationary"] or info["fair_dropped"]:
            return
        step, tried = float(info["step"]), int(info["trials"])
        sigma = float(np.linalg.norm(hand.d) / np.linalg.norm(hand.raw))
        assert tried <= 2 * S + 1 + max(0, math.ceil(math.log2(sigma)))
        if info["accepted"]:
            accepted += 1
            assert passes(problem, hand, step, 1e-12)
            after = problem.loss(hand.omega + step * hand.d)[hand.online]
            assert (after < hand.losses).all()
            assert len(hand.online) == 1 or unfairness(after) < unfairness(hand.losses)
        for earlier in range(1, tried):
            assert not passes(problem, hand, step * 2**earlier, -1e-12)
        assert step * 2 ** (tried - 1) == pytest.approx(2**S * LR * 0.999**t, rel=1e-12)
    assert accepted


def test_the_first_trial_is_the_learning_rate_doubled_s_times() -> None:
    # A step that is small enough is accepted at once.
    problem = drawn(2)
    simulation = of(problem, lr=1e-4, s=3, lr_decay=0.5)
    for number in (1, 2):
        info = simulation.play_round(everyone(simulation), number)
        assert info["trials"] == 1
        assert info["accepted"] == 1
        assert float(info["step"]) == pytest.approx(8e-4 * 0.5 ** (number - 1), rel=1e-12)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_on_quadratics_the_accepted_step_is_at_least_half_the_smoothness_bound(seed: int) -> None:
    # Without the test of F: eta <= 2 (1 - beta) min |g_i.d|/(Lip_i |d|²) is enough, so half of that is reached.
    problem = drawn(seed)
    simulation = of(problem, fair=False, s=6)
    hand = ByHand(problem, LR, fair=False, search=(6, BETA))
    info = simulation.play_round(everyone(simulation), 1)
    by_hand = hand.play(1, list(range(CLIENTS)))
    if info["stationary"]:
        return
    lipschitz = np.array([np.linalg.eigvalsh(a).max() for a in problem.curvatures])
    slopes = np.abs(by_hand.gradients @ by_hand.d)
    bound = float((2 * (1 - BETA) * slopes / (lipschitz * (by_hand.d @ by_hand.d))).min())
    first = 2.0**6 * LR
    sigma = float(np.linalg.norm(by_hand.d) / np.linalg.norm(by_hand.raw))
    if bound >= 2.0**-6 * LR / sigma * 2:
        assert info["accepted"] == 1
        assert float(info["step"]) >= min(first, bound / 2) * (1 - 1e-9)


@pytest.mark.parametrize("options", [{}, {"direction": "mean"}, {"s": 3}, {"fresh": True}])
def test_both_searches_accept_the_same_step(options: dict[str, Any]) -> None:
    samples, module = classification(), small_model()
    ends = []
    for line_search in ("one", "exchanges"):
        settings = {"lr": 3.0, "line_search": line_search} | options
        simulation = simulate("sfedpg", samples, module, task="multiclass", settings=settings)
        infos = [simulation.play_round(torch.tensor([0, 2, 3]), 1), simulation.play_round(everyone(simulation), 2)]
        ends.append((simulation, infos))
    (one, first), (other, second) = ends
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a["step"], b["step"])  # type: ignore[arg-type]
        assert a["trials"] == b["trials"]
    torch.testing.assert_close(one.server["w"], other.server["w"], rtol=0, atol=1e-14)
    torch.testing.assert_close(one.clients.rows["w"], other.clients.rows["w"], rtol=0, atol=1e-14)
    assert max(float(info["trials"]) for info in first) > 1  # type: ignore[arg-type]
    torch.testing.assert_close(
        one.personal(everyone(one), 2)["w"], other.personal(everyone(other), 2)["w"], rtol=0, atol=1e-14
    )


@BOTH
def test_exchanges_and_bytes(line_search: str) -> None:
    # Down: omega, d, gamma and the accepted step, and 1 a trial. Up: gradient and loss, and 1 a trial.
    problem = drawn(3)
    simulation = of(problem, line_search=line_search, lr=2.0)
    asked: list[str] = []
    deliver = simulation.exchange.deliver

    def spy(request: Request) -> Replies:
        asked.append(request.task)
        return deliver(request)

    simulation.exchange.deliver = spy  # type: ignore[method-assign]
    hand = ByHand(problem, 2.0, search=(S, BETA)).play(1, list(range(CLIENTS)))
    info = simulation.play_round(everyone(simulation), 1)
    sigma = float(np.linalg.norm(hand.d) / np.linalg.norm(hand.raw))
    known = 2 * S + 1 + math.floor(math.log2(sigma))
    tried = int(info["trials"])
    trials = known if line_search == "one" else tried
    assert 1 < tried <= known
    assert asked == ["gradient", *["trial"] * (1 if line_search == "one" else tried), "personal"]
    assert simulation.traffic.down == CLIENTS * 8 * (2 * FEATURES + 2 + trials)
    assert simulation.traffic.up == CLIENTS * 8 * (FEATURES + 1 + trials)


@BOTH
def test_the_last_step_tried_is_taken_if_none_is_accepted(line_search: str) -> None:
    # Along the mean gradient the lonely client loses whatever the step.
    problem = Quadratics(
        np.tile(np.eye(FEATURES), (3, 1, 1)), np.eye(3, FEATURES) * [[4.0], [4.0], [0.0]], np.full(3, 0.1), (1, 1, 1)
    )
    problem.centres[2, :2] = -1.0
    simulation = of(problem, direction="mean", line_search=line_search, lr=0.1)
    start = problem.loss(np.zeros(FEATURES))
    info = simulation.play_round(everyone(simulation), 1)
    assert info["accepted"] == 0
    assert info["trials"] == 3
    assert float(info["step"]) == pytest.approx(0.05)  # 0.2, 0.1, 0.05: nothing was rescaled
    mean = problem.gradient(np.zeros(FEATURES)).mean(0)
    np.testing.assert_allclose(simulation.server["w"].numpy(), -0.05 * mean, rtol=0, atol=1e-14)
    assert problem.loss(simulation.server["w"].numpy())[2] > start[2]


@BOTH
def test_lost_replies_leave_the_test_to_the_others(line_search: str) -> None:
    # The client that a long step carries past its optimum answers no trial: it keeps its model, the others make theirs.
    base = drawn(4, 4, spread=0.5)
    base.centres[1] *= 0.1
    problem = Quadratics(np.tile(np.eye(FEATURES), (4, 1, 1)), base.centres, base.offsets, base.repeats)

    def lost(clients: Tensor, call: Call) -> Tensor:
        return (clients == 1) & (call.exchange == 1)

    partial = of(problem, lost=lost, fair=False, line_search=line_search)
    complete = of(problem, fair=False, line_search=line_search)
    steps = [float(one.play_round(everyone(one), 1)["step"]) for one in (partial, complete)]  # type: ignore[arg-type]
    assert steps[0] > steps[1]
    assert not partial.clients.rows["w"][1].any()
    assert partial.clients.rows["w"][[0, 2, 3]].any(1).all()
    assert float(partial.server["w"].norm()) > float(complete.server["w"].norm())


@BOTH
def test_lost_replies_leave_every_other_client_its_own_drift_and_f_among_them(line_search: str) -> None:
    def lost(clients: Tensor, call: Call) -> Tensor:
        return (clients == 0) & (call.exchange == 1)

    rest, tested = list(range(1, CLIENTS)), set()
    for seed in range(12):
        problem = drawn(seed, spread=6.0)
        simulation = of(problem, lost=lost, line_search=line_search, s=2)
        info = simulation.play_round(everyone(simulation), 1)
        hand = ByHand(problem, LR).play(1, list(range(CLIENTS)))
        step = float(info["step"])  # type: ignore[arg-type]
        drifted = hand.d + hand.gamma[:, None] * (-hand.gradients - hand.d)
        personal = simulation.clients.rows["w"].numpy()
        np.testing.assert_allclose(personal[rest], step * drifted[rest], rtol=0, atol=1e-9)
        assert len(set(hand.gamma.tolist())) > 1

        slope = float(fairness_gradient(hand.losses[rest], hand.gradients[rest]) @ hand.d)
        tested.add(slope < 0)
        trials = int(info["trials"])  # type: ignore[arg-type]
        for earlier in range(trials - 1, -1, -1):
            tried = step * 2**earlier
            new = problem.loss(tried * hand.d)[rest]
            fits = bool((new <= hand.losses[rest] + BETA * tried * hand.gradients[rest] @ hand.d).all())
            if slope < 0:
                fits &= unfairness(new) - unfairness(hand.losses[rest]) <= BETA * tried * slope
            assert fits == (earlier == 0 and bool(info["accepted"]))
    assert tested == {True, False}


def test_losses_fall_for_everybody_on_a_network() -> None:
    samples, module = classification(), small_model()
    simulation = simulate("sfedpg", samples, module, task="multiclass", settings={"lr": 2.0})
    tasks = simulation.tasks["gradient"]

    def losses() -> Tensor:
        clients = everyone(simulation)
        message = {"w": simulation.server["w"].expand(5, -1)}
        return simulation.engine.run(tasks, clients, simulation.clients.gather(clients), message, Call(1))[1]["loss"]

    accepted = 0
    for number in range(1, 8):
        before = losses()
        info = simulation.play_round(everyone(simulation), number)
        after = losses()
        if info["accepted"]:
            accepted += 1
            assert (after < before).all()
    assert accepted >= 4


def test_personal_models_use_the_accepted_step() -> None:
    problem = drawn(5)
    simulation = of(problem, gamma=1.0)
    info = simulation.play_round(everyone(simulation), 1)
    expected = -float(info["step"]) * problem.gradient(np.zeros(FEATURES))  # type: ignore[arg-type]
    np.testing.assert_allclose(simulation.clients.rows["w"].numpy(), expected, rtol=0, atol=1e-12)
    play(simulation, 1, first=2)
