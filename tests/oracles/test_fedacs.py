"""FedACS: each client averages with those whose models point its way, then trains."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from coterie.algorithms import registry
from coterie.algorithms.base import Weights
from coterie.compute.samples import Samples
from coterie.models.problem import Problem
from coterie.simulation.simulation import Simulation
from tests.oracles.regression import Array, Recorder, gradient, points, quadratics, row, some
from tests.support import ENGINES, classification, everyone, play, samples_of, simulate, small_model

LOCAL = {"lr": 0.1, "batch_size": 4, "local_epochs": 2}
STILL = {"lr": 0.0, "batch_size": 0, "local_epochs": 1}
SIZES = [6, 7, 9, 10, 12, 8]
CURVATURES = [1.0, 2.0, 0.5, 1.0, 1.5, 0.7]
START = np.array([1.0, -0.5, 0.8])
MODELS = points(6, seed=8) + START


def module() -> nn.Module:
    """A linear model that starts at :data:`START`: at the origin there is no angle."""
    made = nn.Linear(3, 1, bias=False)
    made.weight.data = torch.from_numpy(START).view(1, 3).clone()
    return made


def make(
    settings: dict[str, Any], samples: Samples | None = None, engine: str = "batched", **options: Any
) -> Simulation:
    data = quadratics(points(6), CURVATURES, SIZES) if samples is None else samples
    problem = Problem.of(module(), "regression", dtype=torch.float64)
    return Simulation(registry.make("fedacs", settings), ENGINES[engine](problem, data, 3), **options)


def spread(simulation: Simulation, models: Array = MODELS) -> Simulation:
    """Let the clients, and the server's copies of them, stand at given models."""
    simulation.server["w"] = torch.from_numpy(models.copy())
    simulation.clients.rows["w"] = torch.from_numpy(models.copy())
    return simulation


def attention(w: Array, p: float, offdiag: bool = False) -> Array:
    """Steps 2 to 5: cosines, threshold, mask, weights."""
    m = len(w)
    s = np.array([[wi @ wj / (np.linalg.norm(wi) * np.linalg.norm(wj)) for wj in w] for wi in w])
    s = (s + s.T) / 2
    np.fill_diagonal(s, 1.0)
    pairs = s[~np.eye(m, dtype=bool)] if offdiag else s.ravel()
    delta = np.quantile(pairs, p) if p > 0 and len(pairs) else -np.inf
    a: Array = np.zeros((m, m))
    for i in range(m):
        for j in range(m):
            if i == j or (s[i, j] > delta and s[i, j] > 0):
                a[i, j] = s[i, j]
        a[i] /= a[i].sum()
    return a


def weights_of(info: dict[str, Any]) -> Weights:
    weights = info["weights"]
    assert isinstance(weights, Weights)
    return weights


def classify(name: str, settings: dict[str, Any], engine: str = "batched", count: int = 3) -> Simulation:
    simulation = simulate(name, classification(), small_model(), task="multiclass", settings=settings, engine=engine)
    play(simulation, 3, lambda number: some(5, count, number))
    return simulation


@pytest.mark.parametrize("pool", ["cohort", "all"])
@pytest.mark.parametrize(("p", "offdiag"), [(0.0, False), (0.5, False), (0.43, True), (0.72, False)])
def test_rounds_equal_an_independent_implementation(
    p: float, offdiag: bool, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four of six clients a round, minibatches, and one client that may not answer."""
    recorder, lr = Recorder(monkeypatch), 0.05
    simulation = spread(
        make(
            {"lr": lr, "batch_size": 4, "local_epochs": 2, "p": p, "offdiag": offdiag, "pool": pool},
            engine="loop",
            lost=lambda asked, call: asked == call.round % 6,
        )
    )
    w, silent = MODELS.copy(), 0
    for number in range(1, 7):
        asked = some(6, 4, number).tolist()
        info = simulation.play_round(torch.tensor(asked), number)
        heard = asked if pool == "cohort" else list(range(6))
        a = attention(w[heard], p, offdiag)[[heard.index(i) for i in asked]]
        u = a @ w[heard]
        batches = recorder.take()
        silent += len(asked) - len(batches)
        for i, start in zip(asked, u, strict=True):
            if i in batches:
                w[i] = start
                for batch in batches[i]:
                    w[i] = w[i] - lr * gradient(w[i], batch)
        weights = weights_of(info)
        assert weights.rows.tolist() == asked and weights.columns.tolist() == heard
        np.testing.assert_allclose(row(weights.values), a, rtol=0, atol=1e-12)
        np.testing.assert_allclose(row(simulation.clients.rows["w"]), w, rtol=0, atol=1e-12)
        np.testing.assert_allclose(row(simulation.server["w"]), w, rtol=0, atol=1e-12)
        personal = simulation.personal(everyone(simulation), number)["w"]
        np.testing.assert_allclose(row(personal), w, rtol=0, atol=1e-12)
    assert silent > 0


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize("p", [0.95, 0.999999])
@pytest.mark.parametrize("count", [3, 5])
def test_p_towards_1_is_local_bit_for_bit(engine: str, p: float, count: int) -> None:
    alone = classify("fedacs", LOCAL | {"p": p}, engine, count)
    assert torch.equal(alone.clients.rows["w"], classify("local", LOCAL, engine, count).clients.rows["w"])
    assert torch.equal(alone.clients.rows["w"], alone.server["w"])


def test_p_0_weighs_by_cosine_where_all_are_positive() -> None:
    models = np.abs(MODELS)
    unit = models / np.linalg.norm(models, axis=1, keepdims=True)
    cosine = unit @ unit.T
    simulation = spread(make(LOCAL | {"p": 0.0}), models)
    values = weights_of(simulation.play_round(everyone(simulation), 1)).values
    np.testing.assert_allclose(row(values), cosine / cosine.sum(1, keepdims=True), rtol=0, atol=1e-14)


def test_p_0_leaves_out_those_that_point_away() -> None:
    models = points(6, seed=8)
    unit = models / np.linalg.norm(models, axis=1, keepdims=True)
    cosine = unit @ unit.T
    assert (cosine < 0).any() and (cosine > 0).sum() > 6
    simulation = spread(make(LOCAL | {"p": 0.0}), models)
    values = row(weights_of(simulation.play_round(everyone(simulation), 1)).values)
    assert np.array_equal(values > 0, cosine > 0)


@pytest.mark.parametrize("p", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_equal_models_are_left_as_they_are(p: float, engine: str) -> None:
    simulation = make(STILL | {"p": p}, engine=engine)
    for number in (1, 2, 3):
        simulation.play_round(everyone(simulation), number)
    expected = torch.from_numpy(START).expand(6, -1)
    torch.testing.assert_close(simulation.clients.rows["w"], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("pool", ["cohort", "all"])
@pytest.mark.parametrize("offdiag", [False, True])
def test_the_recorded_weights_are_those_used(pool: str, offdiag: bool) -> None:
    """Without learning a client's new model is its mixture."""
    simulation = spread(make(STILL | {"p": 0.3, "pool": pool, "offdiag": offdiag}))
    for number in (1, 2, 3):
        before = simulation.server["w"].clone()
        online = some(6, 4, number)
        weights = weights_of(simulation.play_round(online, number))
        expected = before.clone()
        expected[weights.rows] = weights.values @ before[weights.columns]
        torch.testing.assert_close(simulation.clients.rows["w"], expected, rtol=0, atol=1e-14)
        assert torch.equal(weights.rows, online)
        assert torch.equal(weights.columns, online if pool == "cohort" else everyone(simulation))
        torch.testing.assert_close(weights.values.sum(1), torch.ones(4).double(), rtol=0, atol=1e-14)
        assert bool((weights.values >= 0).all())
        itself = weights.rows.unsqueeze(1) == weights.columns
        assert bool((weights.values[itself] > 0).all()) and int(itself.sum()) == 4


def test_raising_p_never_enlarges_a_rows_support() -> None:
    supports = []
    for p in (0.0, 0.25, 0.5, 0.75, 0.9):
        simulation = spread(make(LOCAL | {"p": p}))
        supports.append(weights_of(simulation.play_round(everyone(simulation), 1)).values > 0)
    assert all(bool((loose | ~tight).all()) for loose, tight in pairwise(supports))
    assert int(supports[0].sum()) > int(supports[2].sum()) > 6 == int(supports[-1].sum())


def test_the_quantile_counts_the_diagonal_unless_told_otherwise() -> None:
    """Five models at 0, 10, 30, 62 and 101 degrees, all in one plane, and p = 1/2.

    Their ten differences are 10 20 30 32 39 52 62 71 91 101 degrees, two cosines to each. The median of these twenty
    lies between the tenth and the eleventh from above, 39 and 52 degrees apart. With the five ones of the diagonal
    there are 25, whose median is the thirteenth from above, the eighth of the others: 32 degrees itself, which is not
    strictly above it.
    """
    degrees = np.array([0.0, 10.0, 30.0, 62.0, 101.0])
    angle = np.deg2rad(degrees)
    models = np.stack([np.cos(angle), np.sin(angle), 0 * angle], 1)
    apart = np.abs(degrees[:, None] - degrees[None])
    samples = quadratics(points(5), [1.0] * 5)
    for offdiag, widest in ((True, 45.0), (False, 31.0)):
        simulation = spread(make(LOCAL | {"p": 0.5, "offdiag": offdiag}, samples), models)
        values = row(weights_of(simulation.play_round(everyone(simulation), 1)).values)
        assert np.array_equal(values > 0, apart < widest)


@pytest.mark.parametrize("p", [0.0, 0.5, 0.8])
def test_rescaling_a_model_does_not_change_the_weights(p: float) -> None:
    ends = []
    for scale in (1.0, np.array([[1.0], [1e-3], [50.0], [1.0], [7.0], [0.2]])):
        simulation = spread(make(LOCAL | {"p": p}), MODELS * scale)
        ends.append(weights_of(simulation.play_round(everyone(simulation), 1)).values)
    torch.testing.assert_close(*ends, rtol=0, atol=1e-13)


@pytest.mark.parametrize("pool", ["cohort", "all"])
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_permuting_the_clients_permutes_everything(pool: str, engine: str) -> None:
    order = [3, 0, 5, 1, 4, 2]  # the new client k is the old client order[k]
    settings = {"lr": 0.1, "batch_size": 0, "local_epochs": 3, "p": 0.5, "pool": pool}
    samples = quadratics(points(6), CURVATURES, SIZES)
    parts = [samples.splits["train"][i] for i in order]
    renamed = samples_of([(samples.x[part], samples.y[part]) for part in parts])
    one, two = make(settings, samples, engine), make(settings, renamed, engine)
    for number in range(1, 5):
        online = some(6, 4, number).tolist()
        first = weights_of(one.play_round(torch.tensor(online), number))
        second = weights_of(two.play_round(torch.tensor(sorted(order.index(i) for i in online)), number))
        whole = torch.zeros(2, 6, 6, dtype=torch.float64)
        whole[0][first.rows.unsqueeze(1), first.columns] = first.values
        whole[1][second.rows.unsqueeze(1), second.columns] = second.values
        torch.testing.assert_close(whole[1], whole[0][order][:, order], rtol=0, atol=1e-12)
        torch.testing.assert_close(two.clients.rows["w"], one.clients.rows["w"][order], rtol=0, atol=1e-12)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_one_participant_takes_a_local_step(engine: str) -> None:
    ends = []
    for name in ("fedacs", "local"):
        simulation = simulate(name, classification(), small_model(), task="multiclass", settings=LOCAL, engine=engine)
        for number, client in enumerate([2, 4, 2, 0], start=1):
            simulation.play_round(torch.tensor([client]), number)
        ends.append(simulation.clients.rows["w"])
    assert torch.equal(*ends)


def test_a_single_full_batch_step_is_equation_5() -> None:
    """``w_i <- u_i - beta grad F_i(u_i)``: the gradient is taken at the mixture."""
    simulation = spread(make({"lr": 0.3, "batch_size": 0, "local_epochs": 1, "p": 0.3}))
    simulation.play_round(everyone(simulation), 1)
    u = attention(MODELS, 0.3) @ MODELS
    expected = u - 0.3 * np.array(CURVATURES)[:, None] * (u - points(6))
    np.testing.assert_allclose(row(simulation.clients.rows["w"]), expected, rtol=0, atol=1e-13)


def test_without_learning_models_contract_to_consensus() -> None:
    simulation = spread(make(STILL | {"p": 0.0}), np.abs(MODELS))
    diameter = []
    for number in range(1, 41):
        diameter.append(float(torch.pdist(simulation.server["w"]).max()))
        simulation.play_round(everyone(simulation), number)
    assert all(after <= before + 1e-14 for before, after in pairwise(diameter))
    assert diameter[0] > 0.1 and diameter[-1] < 1e-12


def test_groups_that_do_not_hear_each_other_contract_each_to_its_own() -> None:
    """Two opposite directions: no cosine between them is positive."""
    models = np.abs(MODELS) * np.array([[1], [1], [1], [-1], [-1], [-1]])
    simulation = spread(make(STILL | {"p": 0.0}), models)
    play(simulation, 40)
    w = row(simulation.server["w"])
    np.testing.assert_allclose(w, w[[0, 0, 0, 3, 3, 3]], rtol=0, atol=1e-12)
    assert (w[0] > 0).all() and (w[3] < 0).all()


def test_with_pool_all_absent_clients_speak_and_with_pool_cohort_they_do_not() -> None:
    for pool, hears in (("all", True), ("cohort", False)):
        ends = []
        for shift in (0.0, 0.3):
            simulation = spread(make(STILL | {"p": 0.0, "pool": pool}), np.abs(MODELS))
            simulation.server["w"][5] += shift
            simulation.play_round(torch.tensor([0, 1, 2]), 1)
            ends.append(simulation.clients.rows["w"][:3])
        assert (float((ends[0] - ends[1]).abs().amax(1).min()) > 1e-3) == hears
        assert torch.equal(*ends) != hears


def test_the_derived_global_model_is_the_mean_of_the_personal_ones() -> None:
    simulation = spread(make(LOCAL | {"p": 0.5}))
    play(simulation, 3, lambda number: some(6, 4, number))
    shared = simulation.algorithm.global_model(simulation.server)
    assert shared is not None and simulation.algorithm.derived_global
    torch.testing.assert_close(shared["w"], simulation.clients.rows["w"].mean(0), rtol=0, atol=1e-14)


@pytest.mark.parametrize("pool", ["cohort", "all"])
def test_bytes_are_one_model_each_way(pool: str) -> None:
    simulation = classify("fedacs", LOCAL | {"pool": pool})
    n = simulation.engine.net.layout.size
    assert (simulation.traffic.down, simulation.traffic.up) == (3 * 3 * 8 * n,) * 2


@pytest.mark.parametrize("p", [0.0, 0.6])
def test_held_out_clients_do_not_speak_and_are_not_averaged(p: float) -> None:
    """With pool="all" too; the derived global model is the members' mean. Newcomers are in the pool as they join."""
    members, w = [0, 2, 3, 5], np.abs(MODELS)
    settings = STILL | {"p": p, "pool": "all", "newcomers": "initial"}
    simulation = spread(make(settings, members=torch.tensor(members)), w)
    weights = weights_of(simulation.play_round(torch.tensor([0, 3]), 1))
    a = attention(w[members], p)[[0, 2]]
    assert weights.columns.tolist() == members
    np.testing.assert_allclose(row(weights.values), a, rtol=0, atol=1e-14)
    w[[0, 3]] = a @ w[members]
    shared = simulation.algorithm.global_model(simulation.server)
    assert shared is not None
    np.testing.assert_allclose(row(shared["w"]), w[members].mean(0), rtol=0, atol=1e-14)
    adapted = row(simulation.adapt(torch.tensor([1, 4]), 1, 1)["w"])
    np.testing.assert_allclose(adapted, attention(w, p)[[1, 4]] @ w, rtol=0, atol=1e-14)
