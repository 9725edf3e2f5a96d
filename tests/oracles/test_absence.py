"""Clients that were away: their mixture by freshness (FedACS, FedAMP, HeurFedAMP), and FLAME's consensus."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from coterie.algorithms import registry
from coterie.algorithms.base import Weights
from coterie.errors import ConfigError
from coterie.models.problem import Problem
from coterie.simulation.simulation import Simulation
from tests.oracles.regression import Array, Recorder, gradient, points, quadratics, row, some
from tests.support import ENGINES, classification, everyone, simulate, small_model

LOCAL = {"lr": 0.1, "batch_size": 4, "local_epochs": 2}
OPTIONS = {
    "fedacs": {"returning": "mixture", "p": 0.4},
    "fedamp": {"returning": "mixture"},
    "heurfedamp": {"returning": "mixture", "sigma": 10.0},
    "flame": {"returning": "consensus"},
}
START = np.array([1.0, -0.5, 0.8])
CURVATURES = [1.0, 2.0, 0.5, 1.0, 1.5, 0.7]
SIZES = [6, 7, 9, 10, 12, 8]


def make(name: str, settings: dict[str, Any], engine: str = "loop", **options: Any) -> Simulation:
    """Six clients with quadratic losses and a model that starts at :data:`START`."""
    module = nn.Linear(3, 1, bias=False)
    module.weight.data = torch.from_numpy(START).view(1, 3).clone()
    problem = Problem.of(module, "regression", dtype=torch.float64)
    samples = quadratics(points(6), CURVATURES, SIZES)
    return Simulation(registry.make(name, settings), ENGINES[engine](problem, samples, 3), **options)


def freshness(heard: list[int], factor: float) -> Array:
    """``γ^(k* − k_j)``, and 0 for who never replied while others did."""
    latest = max(heard)
    return np.array([0.0 if latest > 0 and k == 0 else float(factor) ** (latest - k) for k in heard])


def descended(start: Array, batches: Any, lr: float, prox: float = 0.0, centre: Array | None = None) -> Array:
    w = start.copy()
    for batch in batches:
        pull = 0.0 if centre is None else prox * (w - centre)
        w = w - lr * (gradient(w, batch) + pull)
    return w


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_where_everybody_replies_it_is_the_paper_bit_for_bit(name: str, engine: str) -> None:
    ends = []
    for returning in (OPTIONS[name]["returning"], "own"):
        settings = LOCAL | OPTIONS[name] | {"returning": returning}
        simulation = simulate(
            name, classification(), small_model(), task="multiclass", settings=settings, engine=engine
        )
        for number in (1, 2, 3, 4):
            simulation.play_round(everyone(simulation), number)
        ends.append(simulation)
    for key, value in ends[1].clients.rows.items():
        assert torch.equal(ends[0].clients.rows[key], value), key
    for key, value in ends[1].server.items():
        assert torch.equal(ends[0].server[key], value), key
    assert ends[0].server.keys() - ends[1].server.keys() == {"heard"}
    assert ends[0].server["heard"].tolist() == [4] * 5


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_those_who_are_held_out_were_not_away(name: str) -> None:
    """Where all members reply in every round it is the paper bit for bit, though others never have."""
    members, ends = torch.tensor([0, 2, 3, 5]), []
    for returning in (OPTIONS[name]["returning"], "own"):
        more = {"begin": "cloud"} if name in ("fedamp", "heurfedamp") else {}
        simulation = make(name, LOCAL | OPTIONS[name] | more | {"returning": returning}, members=members)
        for number in (1, 2, 3, 4):
            simulation.play_round(members, number)
        ends.append(simulation)
    for key, value in ends[1].clients.rows.items():
        assert torch.equal(ends[0].clients.rows[key], value), key
    newcomers = [simulation.adapt(torch.tensor([1, 4]), 4, 1)["w"] for simulation in ends]
    assert torch.equal(*newcomers)


def cosine_weights(w: Array, pool: list[int], listener: int, p: float, phi: Array, away: bool) -> Array:
    """FedACS's weights of one client over the pool, from the definition."""
    unit = w[pool] / np.linalg.norm(w[pool], axis=1, keepdims=True)
    s, me = unit @ unit.T, pool.index(listener)
    row_of_mine, others = s[me], [at for at in range(len(pool)) if at != me]
    if away:
        heard = [at for at in others if phi[pool[at]] > 0]
        level = np.quantile(row_of_mine[heard], p) if p > 0 and heard else -np.inf
        chosen = [at for at in heard if row_of_mine[at] >= level and row_of_mine[at] > 0]
    else:
        level = np.quantile(s, p) if p > 0 else -np.inf
        chosen = [at for at in others if row_of_mine[at] > level and row_of_mine[at] > 0]
    a: Array = np.zeros(len(pool))
    for at in [me, *chosen]:
        a[at] = (1.0 if at == me else row_of_mine[at]) * phi[pool[at]]
    if not a.any():
        for at in [me, *chosen]:
            a[at] = 1.0 if at == me else row_of_mine[at]
    return a / a.sum()


@pytest.mark.parametrize("newcomers", ["mean", "initial"])
@pytest.mark.parametrize(("p", "factor"), [(0.0, 0.5), (0.41, 0.8), (0.41, 0.0), (0.0, 1.0)])
def test_fedacs_equals_an_independent_implementation(
    p: float, factor: float, newcomers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three of six clients a round, and one that may not answer."""
    recorder, lr = Recorder(monkeypatch), 0.05
    settings = {"lr": lr, "batch_size": 4, "local_epochs": 2, "p": p, "returning": "mixture", "freshness": factor}
    simulation = make("fedacs", settings | {"newcomers": newcomers}, lost=lambda asked, call: asked == call.round % 6)
    w, heard, seen = np.tile(START, (6, 1)), [0] * 6, [0, 0, 0]
    for number in range(1, 9):
        asked = some(6, 3, number).tolist()
        info = simulation.play_round(torch.tensor(asked), number)
        phi, latest = freshness(heard, factor), max(heard)
        pool = sorted({*asked, *(j for j in range(6) if heard[j] > 0 or latest == 0)})
        a: Array = np.zeros((len(asked), len(pool)))
        for at, i in enumerate(asked):
            if heard[i] == 0 and latest > 0 and newcomers == "mean":
                a[at] = phi[pool] / phi.sum()
            else:
                a[at] = cosine_weights(w, pool, i, p, phi, away=heard[i] < latest)
            seen[0] += heard[i] == 0 < latest
            seen[1] += 0 < heard[i] < latest
            seen[2] += 0 < heard[i] == latest
        batches = recorder.take()
        u = a @ w[pool]
        for i, start in zip(asked, u, strict=True):
            if i in batches:
                w[i], heard[i] = descended(start, batches[i], lr), number
        weights = info["weights"]
        assert isinstance(weights, Weights) and weights.columns.tolist() == pool
        np.testing.assert_allclose(row(weights.values), a, rtol=0, atol=1e-12)
        np.testing.assert_allclose(row(simulation.clients.rows["w"]), w, rtol=0, atol=1e-12)
        assert simulation.server["heard"].tolist() == heard
    assert min(seen) > 0  # late ones, returning ones and such as were never away


@pytest.mark.parametrize("newcomers", ["mixture", "initial"])
@pytest.mark.parametrize("factor", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("name", ["fedamp", "heurfedamp"])
def test_message_passing_equals_an_independent_implementation(
    name: str, factor: float, newcomers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was away starts at its mixture and is held to it; who was not starts at its own model."""
    recorder, lr, prox, own = Recorder(monkeypatch), 0.05, 0.7, 0.3
    scale = {"sigma": 2.0, "kappa": 0.15} if name == "fedamp" else {"sigma": 3.0, "self_weight": own}
    settings = {"lr": lr, "batch_size": 4, "local_epochs": 2, "prox": prox, "returning": "mixture", **scale}
    simulation = make(name, settings | {"freshness": factor, "newcomers": newcomers})
    w, heard, kinds = np.tile(START, (6, 1)), [0] * 6, set()
    for number in range(1, 9):
        asked = some(6, 3, number).tolist()
        info = simulation.play_round(torch.tensor(asked), number)
        phi, latest = freshness(heard, factor), max(heard)
        xi: Array = np.zeros((3, 6))
        for at, i in enumerate(asked):
            others = [j for j in range(6) if j != i]
            if name == "fedamp":
                xi[at, others] = [0.15 * np.exp(-(np.sum((w[i] - w[j]) ** 2)) / 2.0) for j in others]
                xi[at, i] = 1 - xi[at].sum()
                assert xi[at, i] > 0  # the guard has nothing to do
            else:
                cosines = [w[i] @ w[j] / np.linalg.norm(w[i]) / np.linalg.norm(w[j]) for j in others]
                attention = np.exp(3.0 * np.array(cosines))
                xi[at, others], xi[at, i] = (1 - own) * attention / attention.sum(), own
            late = heard[i] == 0 and latest > 0 and newcomers != "initial"
            xi[at] = phi if late else xi[at] * phi
            xi[at] /= xi[at].sum()
        u, batches = xi @ w, recorder.take()
        for at, i in enumerate(asked):
            away = heard[i] < latest
            kinds.add(away)
            w[i] = descended(u[at] if away else w[i], batches[i], lr, prox, u[at])
        for i in asked:
            heard[i] = number
        weights = info["weights"]
        assert isinstance(weights, Weights)
        np.testing.assert_allclose(row(weights.values), xi, rtol=0, atol=1e-12)
        np.testing.assert_allclose(row(simulation.clients.rows["w"]), w, rtol=0, atol=1e-12)
    assert kinds == {True, False}


@pytest.mark.parametrize("centre", ["own", "global"])
def test_flame_equals_an_independent_implementation(centre: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was away begins at the consensus with a dual of zero; Lemma 3 holds for it as for all."""
    recorder, lr, lam, rho = Recorder(monkeypatch), 0.05, 0.8, 0.3
    settings = {"lr": lr, "batch_size": 4, "local_epochs": 2, "lam": lam, "rho": rho, "centre": centre}
    simulation = make("flame", settings | {"returning": "consensus"})
    theta, own, u = (np.tile(START, (6, 1)) for _ in range(3))
    pi, heard, kinds = np.zeros((6, 3)), [0] * 6, set()
    for number in range(1, 9):
        asked = some(6, 3, number).tolist()
        simulation.play_round(torch.tensor(asked), number)
        w, latest, batches = u.mean(0), max(heard), recorder.take()
        for i in asked:
            kinds.add(heard[i] < latest)
            if heard[i] < latest:
                theta[i], own[i], pi[i] = w, w, 0.0
            theta[i] = descended(theta[i], batches[i], lr, lam, own[i] if centre == "own" else w)
            own[i] = (lam / 6 * theta[i] + rho * w - pi[i]) / (lam / 6 + rho)
            pi[i] = pi[i] + rho * (own[i] - w)
            u[i] = own[i] + pi[i] / rho
        for i in asked:
            heard[i] = number
        for key, value in (("theta", theta), ("w", own), ("pi", pi)):
            np.testing.assert_allclose(row(simulation.clients.rows[key]), value, rtol=0, atol=1e-12)
        np.testing.assert_allclose(pi, lam / 6 * (theta - own), rtol=0, atol=1e-12)
    assert kinds == {True, False}


@pytest.mark.parametrize("name", ["fedacs", "fedamp", "heurfedamp"])
def test_with_freshness_0_only_those_are_heard_who_replied_last(name: str) -> None:
    settings = {"lr": 0.05, "batch_size": 0, "local_epochs": 1, "returning": "mixture", "freshness": 0.0}
    simulation = make(name, settings | ({"p": 0.0} if name == "fedacs" else {}))
    for number, asked in enumerate(([0, 1, 2], [3, 4], [0, 5]), start=1):
        weights = simulation.play_round(torch.tensor(asked), number)["weights"]
    assert isinstance(weights, Weights)
    heard = weights.columns[(weights.values > 0).any(0)].tolist()
    assert set(heard) <= {3, 4}


def test_a_returning_client_is_never_left_with_its_old_model_alone() -> None:
    """Two clients that agree and one that was away and stands apart: by the quantile of all pairs it would be alone."""
    ends = {}
    for returning in ("own", "mixture"):
        settings = {"lr": 0.0, "batch_size": 0, "local_epochs": 1, "p": 0.6, "pool": "all", "returning": returning}
        simulation = make("fedacs", settings)
        w = np.array([[1.0, 0, 0], [1.0, 0.1, 0], [0.3, 0, 1.0], [1, 0, 0.1], [1, 0.1, 0.1], [1, 0.2, 0]])
        simulation.server["w"] = torch.from_numpy(w)
        if returning == "mixture":
            simulation.server["heard"] = torch.tensor([5, 5, 1, 5, 5, 5])
        weights = simulation.play_round(torch.tensor([0, 2]), 6)["weights"]
        assert isinstance(weights, Weights)
        ends[returning] = row(weights.values)[1]
    np.testing.assert_array_equal(ends["own"], [0, 0, 1, 0, 0, 0])
    cosines = w @ w[2] / np.linalg.norm(w, axis=1) / np.linalg.norm(w[2])
    best = [j for j in (0, 1, 3, 4, 5) if cosines[j] >= np.quantile(cosines[[0, 1, 3, 4, 5]], 0.6)]
    expected = np.zeros(6)
    expected[best], expected[2] = cosines[best], 0.5**4
    np.testing.assert_allclose(ends["mixture"], expected / expected.sum(), rtol=0, atol=1e-14)


def test_what_has_no_effect_or_no_meaning_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"freshness=0\.9 has no effect with returning=own"):
        registry.make("fedacs", {"freshness": 0.9})
    with pytest.raises(ConfigError, match="guard=false has negative weights"):
        registry.make("fedamp", {"guard": False, "returning": "mixture"})
