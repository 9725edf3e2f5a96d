"""Clients that come when others have trained: where each method lets them begin, in closed form on quadratics."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from coterie.simulation.simulation import Simulation
from tests.oracles.attention_by_hand import fedamp, heurfedamp, median_distance
from tests.oracles.regression import Array, points, row
from tests.oracles.test_absence import CURVATURES, START, freshness, make
from tests.support import classification, simulate, small_model

MEMBERS, NEWCOMERS = [0, 2, 3, 5], [1, 4]
LR, PROX = 0.2, 0.7
ONE_STEP = {"lr": LR, "batch_size": 0, "local_epochs": 1}
SETTINGS: dict[str, dict[str, Any]] = {
    "fedacs": {"p": 0.0},
    "fedamp": {"prox": PROX},
    "heurfedamp": {"prox": PROX, "sigma": 4.0},
    "flame": {"lam": PROX},
    "ditto": {"lam": PROX},
}
B, BEST = np.array(CURVATURES)[NEWCOMERS, None], points(6)[NEWCOMERS]


def trained(name: str, engine: str = "loop", rounds: int = 3, **settings: Any) -> Simulation:
    """Three rounds of the members."""
    simulation = make(name, ONE_STEP | SETTINGS[name] | settings, engine, members=torch.tensor(MEMBERS))
    for number in range(1, rounds + 1):
        simulation.play_round(torch.tensor(MEMBERS), number)
    return simulation


def adapted(simulation: Simulation, rounds: int = 1) -> Array:
    """The newcomers' models; nothing of it stays."""
    before = {name: value.clone() for name, value in simulation.server.items()}
    models = row(simulation.adapt(torch.tensor(NEWCOMERS), simulation.round, rounds)["w"])
    assert all(torch.equal(value, simulation.server[name]) for name, value in before.items())
    return models


def step(start: Array, centre: Array | float = 0.0, prox: float = 0.0) -> Array:
    """One full-batch step of the newcomers' training."""
    return start - LR * (B * (start - BEST) + prox * (start - centre))


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_as_in_the_paper_they_begin_at_the_initial_model(name: str, engine: str) -> None:
    """Held to the members' models or not, nobody starts from them (FedACS: newcomers have only one another)."""
    simulation = trained(name, engine, newcomers="initial")
    w = row(simulation.server["w"]) if "w" in simulation.server else np.zeros((6, 3))
    start = np.tile(START, (2, 1))
    if name == "fedacs":
        expected = step(start)
    elif name in ("fedamp", "heurfedamp"):
        attend = fedamp(2 / 4, median_distance(w, MEMBERS)) if name == "fedamp" else heurfedamp(4.0, [0.1] * 6)
        expected = step(start, np.array([attend(w, i, MEMBERS) for i in NEWCOMERS]) @ w, PROX)
    elif name == "flame":
        expected = step(start, start, PROX)  # the client's own w_i, which is the initial one too
    else:
        expected = step(start, w, PROX)
    np.testing.assert_allclose(adapted(simulation), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("name", ["fedacs", "fedamp", "heurfedamp"])
def test_they_begin_at_the_mean_of_the_members(name: str, engine: str) -> None:
    simulation = trained(name, engine, newcomers="mean")
    mean = row(simulation.server["w"])[MEMBERS].mean(0)
    assert np.abs(mean - START).max() > 0.05  # the members have gone somewhere
    np.testing.assert_allclose(adapted(simulation), step(np.tile(mean, (2, 1))), rtol=0, atol=1e-13)


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("name", ["flame", "ditto"])
def test_they_begin_at_the_global_model_with_a_dual_of_zero(name: str, engine: str) -> None:
    simulation = trained(name, engine, newcomers="global")
    shared = simulation.algorithm.global_model(simulation.server)
    assert shared is not None
    w = np.tile(row(shared["w"]), (2, 1))
    np.testing.assert_allclose(adapted(simulation), step(w, w, PROX), rtol=0, atol=1e-13)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_flame_takes_the_mean_of_five_rounds_work_from_the_consensus(engine: str) -> None:
    """One step a round, all towards the consensus; a second round goes on from ``w_i`` and ``π_i`` of the mean."""
    simulation = trained("flame", engine, newcomers="averaged")
    w = np.tile(row(simulation.server["sum"]) / 4, (2, 1))
    theta = ends(w, w, PROX)
    np.testing.assert_allclose(adapted(simulation), theta, rtol=0, atol=1e-13)
    own = (theta + w) / 2  # Eq. 12 with λ α = ρ and a dual of zero
    np.testing.assert_allclose(adapted(simulation, 2), step(theta, own, PROX), rtol=0, atol=1e-13)


def test_what_flames_newcomers_look_for_is_their_own_minimum_beside_the_consensus() -> None:
    """``argmin (b/2) |θ − p|² + (λ/2) |θ − w|²`` is ``(b p + λ w) / (b + λ)``; a step leaves 1 − η (b + λ) of the way.

    So the mean of five rounds of 40 steps has a fifth of ``Σ_k (1 − η(b+λ))^(40 k)`` of the distance left.
    """
    simulation = trained("flame", newcomers="averaged", local_epochs=40)
    w = np.tile(row(simulation.server["sum"]) / 4, (2, 1))
    minimum = (B * BEST + PROX * w) / (B + PROX)
    left = np.mean([(1 - LR * (B + PROX)) ** (40 * k) for k in range(1, 6)], axis=0)
    np.testing.assert_allclose(adapted(simulation), minimum + left * (w - minimum), rtol=0, atol=1e-12)
    assert left.max() < 0.1 and np.abs(w - minimum).max() > 0.05


def test_flames_second_round_goes_on_with_the_dual_of_the_first() -> None:
    """``w_i`` and ``π_i`` of a first round that began at the consensus with ``π = 0``; its message joins the mean."""
    simulation = trained("flame", newcomers="global")
    summed = row(simulation.server["sum"])
    w, pull, rho = summed / 4, PROX / 4, PROX / 4
    theta = step(np.tile(w, (2, 1)), w, PROX)
    own = (pull * theta + rho * w) / (pull + rho)
    pi = rho * (own - w)
    second = step(theta, own, PROX)
    np.testing.assert_allclose(adapted(simulation, 2), second, rtol=0, atol=1e-13)
    again = (summed + (own + pi / rho).sum(0)) / 6
    assert np.abs(again - w).max() > 1e-3


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("name", ["fedamp", "heurfedamp"])
def test_their_first_model_says_whom_they_resemble(name: str, engine: str) -> None:
    """After a step from the mean comes a round of the method, in which they hear members and themselves alone."""
    simulation = trained(name, engine, newcomers="mixture")
    w = row(simulation.server["w"]).copy()
    w[NEWCOMERS] = step(np.tile(w[MEMBERS].mean(0), (2, 1)))
    attend = fedamp(2 / 4, median_distance(w, MEMBERS)) if name == "fedamp" else heurfedamp(4.0, [0.1] * 6)
    u = np.array([attend(w, i, MEMBERS) for i in NEWCOMERS]) @ w
    np.testing.assert_allclose(adapted(simulation), step(w[NEWCOMERS], u, PROX), rtol=0, atol=1e-13)


def ends(start: Array, centre: Array | float, prox: float) -> Array:
    """The mean of where five rounds of one step end, each from where the last one did."""
    found = [step(start, centre, prox)]
    while len(found) < 5:
        found.append(step(found[-1], centre, prox))
    return np.mean(found, axis=0)


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("name", ["fedacs", "fedamp", "heurfedamp"])
def test_with_more_work_both_of_their_models_are_means_of_five(name: str, engine: str) -> None:
    simulation = trained(name, engine, newcomers="averaged")
    w = row(simulation.server["w"]).copy()
    mean = np.tile(w[MEMBERS].mean(0), (2, 1))
    w[NEWCOMERS] = ends(mean, mean, 0.0 if name == "fedacs" else PROX)
    if name == "fedacs":
        s = [w @ w[i] / np.linalg.norm(w, axis=1) / np.linalg.norm(w[i]) for i in NEWCOMERS]
        heard = [[i, *(j for j in MEMBERS if each[j] > 0)] for i, each in zip(NEWCOMERS, s, strict=True)]
        u = np.array([each[who] @ w[who] / each[who].sum() for each, who in zip(s, heard, strict=True)])
        expected = ends(u, 0.0, 0.0)
    else:
        attend = fedamp(2 / 4, median_distance(w, MEMBERS)) if name == "fedamp" else heurfedamp(4.0, [0.1] * 6)
        expected = ends(w[NEWCOMERS], np.array([attend(w, i, MEMBERS) for i in NEWCOMERS]) @ w, PROX)
    np.testing.assert_allclose(adapted(simulation), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("rounds", [1, 2])
@pytest.mark.parametrize("p", [0.0, 0.6])
def test_fedacs_selects_by_the_quantile_of_the_newcomers_own_row(p: float, rounds: int) -> None:
    simulation = trained("fedacs", newcomers="mixture", p=p)
    w = row(simulation.server["w"]).copy()
    w[NEWCOMERS] = step(np.tile(w[MEMBERS].mean(0), (2, 1)))
    met: list[int] = []
    for _ in range(rounds):
        u = []
        for i in NEWCOMERS:
            s = w @ w[i] / np.linalg.norm(w, axis=1) / np.linalg.norm(w[i])
            level = np.quantile(s[MEMBERS], p) if p > 0 else -np.inf
            chosen = [j for j in MEMBERS if s[j] >= level and s[j] > 0]
            met.append(len(chosen))
            u.append((w[i] + s[chosen] @ w[chosen]) / (1 + s[chosen].sum()))
        w[NEWCOMERS] = step(np.array(u))
    np.testing.assert_allclose(adapted(simulation, rounds), w[NEWCOMERS], rtol=0, atol=1e-13)
    assert 0 < max(met) < (5 if p == 0 else 4)


def test_where_absence_counts_the_mean_is_by_freshness() -> None:
    """Members heard in rounds 1, 2, 3 and 3."""
    simulation = make(
        "fedacs",
        ONE_STEP | {"p": 0.0, "returning": "mixture", "freshness": 0.3, "newcomers": "mean"},
        members=torch.tensor(MEMBERS),
    )
    for number, asked in enumerate(([0], [2], [3, 5]), start=1):
        simulation.play_round(torch.tensor(asked), number)
    phi = freshness([1, 2, 3, 3], 0.3)
    np.testing.assert_allclose(phi, [0.09, 0.3, 1, 1], rtol=1e-12)
    mean = phi @ row(simulation.server["w"])[MEMBERS] / phi.sum()
    np.testing.assert_allclose(adapted(simulation), step(np.tile(mean, (2, 1))), rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", ["fedacs", "fedamp", "heurfedamp"])
def test_where_absence_counts_their_mixture_is_by_freshness_too(name: str) -> None:
    """Members heard in rounds 1, 2, 3 and 3; a newcomer's own first model is as fresh as the freshest."""
    settings = ONE_STEP | SETTINGS[name] | {"returning": "mixture", "freshness": 0.3, "newcomers": "mixture"}
    simulation = make(name, settings | ({"p": 0.6} if name == "fedacs" else {}), members=torch.tensor(MEMBERS))
    for number, asked in enumerate(([0], [2], [3, 5]), start=1):
        simulation.play_round(torch.tensor(asked), number)
    w, phi = row(simulation.server["w"]).copy(), np.ones(6)
    phi[MEMBERS] = freshness([1, 2, 3, 3], 0.3)
    w[NEWCOMERS] = step(np.tile(phi[MEMBERS] @ w[MEMBERS] / phi[MEMBERS].sum(), (2, 1)))
    a: Array = np.zeros((2, 6))
    for at, i in enumerate(NEWCOMERS):
        if name == "fedacs":
            s = w @ w[i] / np.linalg.norm(w, axis=1) / np.linalg.norm(w[i])
            chosen = [i, *(j for j in MEMBERS if s[j] >= np.quantile(s[MEMBERS], 0.6) and s[j] > 0)]
            a[at, chosen] = s[chosen]
        elif name == "fedamp":
            a[at] = fedamp(2 / 4, median_distance(w, MEMBERS))(w, i, MEMBERS)
        else:
            a[at] = heurfedamp(4.0, [0.1] * 6)(w, i, MEMBERS)
    a = a * phi / (a * phi).sum(1, keepdims=True)
    expected = step(a @ w) if name == "fedacs" else step(w[NEWCOMERS], a @ w, PROX)
    np.testing.assert_allclose(adapted(simulation), expected, rtol=0, atol=1e-13)
    assert a[0, 4] == a[1, 1] == 0  # newcomers do not hear one another


@pytest.mark.parametrize("newcomers", ["mean", "mixture", "averaged"])
def test_a_newcomer_that_does_not_answer_leaves_the_others_as_they_are(newcomers: str) -> None:
    found = []
    for lost in (None, lambda asked, call: (asked == 4) & (call.purpose == "adapt") & (call.exchange == 0)):
        settings = ONE_STEP | SETTINGS["fedamp"] | {"newcomers": newcomers}
        simulation = make("fedamp", settings, members=torch.tensor(MEMBERS), lost=lost)
        for number in (1, 2):
            simulation.play_round(torch.tensor(MEMBERS), number)
        found.append(adapted(simulation))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert np.abs(found[0][1] - found[1][1]).max() > 1e-3


@pytest.mark.parametrize("name", sorted(SETTINGS))
def test_parameters_that_stay_at_home_do_not_stand_in_the_way(name: str) -> None:
    """With nothing shared but one column, that column begins where the method says."""
    way = {"ditto": "global"}.get(name, "averaged")
    simulation = simulate(
        name,
        classification(),
        small_model(),
        task="multiclass",
        settings={"lr": 0.0, "batch_size": 0, "local_epochs": 1, "newcomers": way},
        local=("head.*",),
    )
    simulation.play_round(torch.tensor([0, 1, 2]), 1)
    models = simulation.adapt(torch.tensor([3, 4]), 1, 1)["w"]
    assert models.shape == (2, simulation.engine.net.layout.size)
    torch.testing.assert_close(models[0], simulation.engine.problem.start, rtol=0, atol=1e-14)
