"""HeurFedAMP: FedAMP with a fixed self weight and attention by a softmax of cosines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from coterie.algorithms import registry
from coterie.algorithms.base import Weights
from coterie.errors import ConfigError
from coterie.models.problem import Problem
from coterie.simulation.simulation import Simulation
from tests.oracles.attention_by_hand import ByHand, heurfedamp
from tests.oracles.regression import Array, Recorder, points, quadratics, regress, row, some
from tests.support import ENGINES, classification, everyone, linear_regression, play, simulate, small_model

LOCAL = {"lr": 0.1, "batch_size": 4, "local_epochs": 2}
SIZES = [6, 7, 9, 10, 12]
CURVATURES = [1.0, 2.0, 0.5, 1.0, 1.5]
OFF = ~torch.eye(5, dtype=torch.bool)
START = points(5, seed=8) + 1.0  # nobody at the origin, where there is no angle


def make(
    settings: dict[str, Any], members: list[int] | None = None, engine: str = "loop", **options: Any
) -> Simulation:
    """Regression clients that start apart, at :data:`START`."""
    problem = Problem.of(linear_regression(3), "regression", dtype=torch.float64)
    return Simulation(
        registry.make("heurfedamp", settings | {"common_start": False}),
        ENGINES[engine](problem, quadratics(points(5), CURVATURES, SIZES), 3),
        fresh=lambda client: torch.from_numpy(START[client].copy()),
        members=None if members is None else torch.tensor(members),
        **options,
    )


def classify(name: str, settings: dict[str, Any], engine: str = "batched") -> Simulation:
    simulation = simulate(name, classification(), small_model(), task="multiclass", settings=settings, engine=engine)
    play(simulation, 3, lambda number: some(5, 3, number))
    return simulation


def first_weights(settings: dict[str, Any], models: Array | None = None) -> torch.Tensor:
    simulation = make(LOCAL | settings, engine="batched")
    if models is not None:
        simulation.server["w"] = torch.from_numpy(models)
    weights = simulation.play_round(everyone(simulation), 1)["weights"]
    assert isinstance(weights, Weights)
    return weights.values


@pytest.mark.parametrize(
    "extra",
    [
        {},
        {"sigma": 3.0, "self_weight": 0.4, "begin": "cloud"},
        {"sigma": 10.0, "self_weight": [0.0, 0.2, 0.4, 0.6, 1.0], "prox": 0.3},
    ],
)
def test_rounds_equal_an_independent_implementation(extra: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of five clients a round, minibatches, and one client that may not answer; absent ones still speak."""
    recorder, lr = Recorder(monkeypatch), 0.05
    settings = {"lr": lr, "batch_size": 4, "local_epochs": 2} | extra
    simulation = make(settings, lost=lambda asked, call: asked == call.round % 5)
    own = extra.get("self_weight", 0.1)
    attend = heurfedamp(extra.get("sigma", 100.0), own if isinstance(own, list) else [own] * 5)
    hand = ByHand(START.copy(), range(5), lr, extra.get("prox", 1.0), extra.get("begin") == "cloud")
    for number in range(1, 6):
        asked = some(5, 4, number)
        info = simulation.play_round(asked, number)
        xi = hand.play(asked.tolist(), recorder.take(), attend)
        weights = info["weights"]
        assert isinstance(weights, Weights)
        assert weights.rows.tolist() == asked.tolist() and weights.columns.tolist() == list(range(5))
        np.testing.assert_allclose(row(weights.values), xi, rtol=0, atol=1e-11)
        np.testing.assert_allclose(row(simulation.clients.rows["w"]), hand.w, rtol=0, atol=1e-11)
        np.testing.assert_allclose(row(simulation.server["w"]), hand.w, rtol=0, atol=1e-11)
        np.testing.assert_allclose(row(simulation.server["u"]), hand.u, rtol=0, atol=1e-11)


@pytest.mark.parametrize("own", [0.1, 0.0, [0.0, 0.2, 0.4, 0.6, 1.0]])
@pytest.mark.parametrize("sigma", [0.0, 5.0, 100.0, 1e5])
def test_rows_sum_to_one_with_the_given_diagonal(own: float | list[float], sigma: float) -> None:
    values = first_weights({"sigma": sigma, "self_weight": own})
    assert torch.equal(values.diagonal(), torch.tensor(own, dtype=torch.float64).expand(5))
    assert bool((values >= 0).all())
    torch.testing.assert_close(values.sum(1), torch.ones(5, dtype=torch.float64), rtol=0, atol=1e-14)


def test_sigma_0_is_uniform() -> None:
    values = first_weights({"sigma": 0.0, "self_weight": 0.2})
    torch.testing.assert_close(values[OFF], torch.full((20,), 0.8 / 4, dtype=torch.float64), rtol=0, atol=1e-15)


def test_sigma_to_infinity_listens_to_the_most_similar_client() -> None:
    unit = START / np.linalg.norm(START, axis=1, keepdims=True)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, -2)
    expected = 0.3 * np.eye(5)
    expected[np.arange(5), cosine.argmax(1)] = 0.7
    values = first_weights({"sigma": 1e7, "self_weight": 0.3})
    np.testing.assert_allclose(row(values), expected, rtol=0, atol=1e-12)


def test_rescaling_a_model_does_not_matter() -> None:
    scaled = START * np.array([[1e-3], [1.0], [7.0], [1e4], [0.3]])
    torch.testing.assert_close(first_weights({}), first_weights({}, scaled), rtol=0, atol=1e-11)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_self_weight_1_is_local_with_proximal_damping(engine: str) -> None:
    """Each pulls back to its own start: on full batches in closed form, and as FedAMP without attention."""
    best, prox, lr, steps = points(5), 2.0, 0.1, 3
    b, w = np.array(CURVATURES)[:, None], START.copy()
    settings = {"prox": prox, "lr": lr, "batch_size": 0, "local_epochs": steps, "self_weight": 1.0}
    simulation = make(settings, engine=engine)
    for number in (1, 2, 3):
        simulation.play_round(everyone(simulation), number)
        target = (b * best + prox * w) / (b + prox)
        w = target + (1 - lr * (b + prox)) ** steps * (w - target)
        np.testing.assert_allclose(row(simulation.clients.rows["w"]), w, rtol=0, atol=1e-13)
    alone = classify("heurfedamp", LOCAL | {"self_weight": 1.0}, engine).clients.rows["w"]
    assert torch.equal(alone, classify("fedamp", LOCAL | {"kappa": 0.0}, engine).clients.rows["w"])


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_the_pull_has_a_gradient_and_without_it_the_method_is_local(engine: str) -> None:
    local = classify("local", LOCAL, engine).clients.rows["w"]
    assert torch.equal(local, classify("heurfedamp", LOCAL | {"prox": 0.0}, engine).clients.rows["w"])
    pulled = classify("heurfedamp", LOCAL, engine).clients.rows["w"]
    trained = torch.unique(torch.cat([some(5, 3, number) for number in (1, 2, 3)]))
    assert float((local - pulled).abs().amax(1)[trained].min()) > 1e-3


@pytest.mark.parametrize("own", [0.1, 0.0])
def test_one_client_has_weight_one(own: float) -> None:
    settings = {"prox": 1.0, "lr": 0.25, "batch_size": 0, "local_epochs": 1, "self_weight": own}
    best = points(1)
    simulation = regress("heurfedamp", quadratics(best, [1.0]), settings)
    w = np.zeros((1, 3))
    for number in (1, 2):
        weights = simulation.play_round(everyone(simulation), number)["weights"]
        assert isinstance(weights, Weights) and weights.values.tolist() == [[1.0]]
        w = w - 0.25 * (w - best)
        np.testing.assert_allclose(row(simulation.clients.rows["w"]), w, rtol=0, atol=1e-14)


def test_many_steps_reach_the_local_solution() -> None:
    b, best, prox = np.array(CURVATURES)[:, None], points(5), 1.5
    settings = {"prox": prox, "lr": 0.2, "batch_size": 0, "local_epochs": 90, "sigma": 5.0}
    simulation, w = make(settings, engine="batched"), START.copy()
    attend = heurfedamp(5.0, [0.1] * 5)
    for number in (1, 2, 3):
        u = np.array([attend(w, i, range(5)) for i in range(5)]) @ w
        w = (b * best + prox * u) / (b + prox)
        simulation.play_round(everyone(simulation), number)
        np.testing.assert_allclose(row(simulation.clients.rows["w"]), w, rtol=0, atol=1e-12)


def test_prox_to_infinity_gives_the_cloud_model() -> None:
    gaps = []
    for prox in (1.0, 1e3, 1e6, 1e9):
        simulation = make({"prox": prox, "lr": 1 / (2 + prox), "batch_size": 0, "local_epochs": 1}, engine="batched")
        play(simulation, 1)
        u, w = row(simulation.server["u"]), START
        # One full-batch step from the client's own model, lr = 1/(2 + prox).
        pull = np.array(CURVATURES)[:, None] * (w - points(5)) + prox * (w - u)
        np.testing.assert_allclose(row(simulation.clients.rows["w"]), w - pull / (2 + prox), rtol=0, atol=1e-13)
        gaps.append(float(np.abs(row(simulation.clients.rows["w"]) - u).max()))
    assert gaps[-1] < 1e-8 * gaps[0]
    with pytest.raises(ConfigError, match=r"lr \* prox is 5"):
        registry.make("heurfedamp", {"lr": 0.1, "prox": 50.0})


def test_bytes_are_one_model_each_way() -> None:
    simulation = classify("heurfedamp", LOCAL)
    n = simulation.engine.net.layout.size
    assert (simulation.traffic.down, simulation.traffic.up) == (3 * 3 * 8 * n,) * 2


@pytest.mark.parametrize("own", [0.1, [0.5, 0.1, 0.2, 0.3, 0.4]])
def test_only_members_speak(own: float | list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients 1 and 4 never train: nobody listens to them."""
    recorder, members = Recorder(monkeypatch), [0, 2, 3]
    simulation = make(LOCAL | {"lr": 0.05, "sigma": 5.0, "self_weight": own}, members)
    hand = ByHand(START.copy(), members, 0.05, 1.0)
    attend = heurfedamp(5.0, own if isinstance(own, list) else [own] * 5)
    for number in range(1, 5):
        asked = members if number % 2 else [0, 3]
        info = simulation.play_round(torch.tensor(asked), number)
        xi = hand.play(asked, recorder.take(), attend)
        weights, values = info["weights"], torch.zeros(len(asked), 5, dtype=torch.float64)
        assert isinstance(weights, Weights)
        values[:, weights.columns] = weights.values
        np.testing.assert_allclose(row(values), xi, rtol=0, atol=1e-12)
        np.testing.assert_allclose(row(simulation.clients.rows["w"]), hand.w, rtol=0, atol=1e-12)


def test_the_server_keeps_only_what_the_next_round_needs() -> None:
    simulation = make(LOCAL)
    assert simulation.server.keys() == {"w", "u", "members"}
    simulation.play_round(torch.arange(5), 1)
    assert simulation.server.keys() == {"w", "u", "members"}


def test_newcomers_listen_to_the_members_and_to_themselves() -> None:
    members, newcomers, prox, lr = [0, 2, 3], [1, 4], 1.0, 0.1
    settings = {"prox": prox, "lr": lr, "batch_size": 0, "local_epochs": 1, "sigma": 5.0}
    simulation = make(settings | {"newcomers": "initial"}, members, engine="batched")
    for number in (1, 2):
        simulation.play_round(torch.tensor(members), number)
    w, before = row(simulation.server["w"]).copy(), simulation.server["w"].clone()
    adapted = simulation.adapt(torch.tensor(newcomers), 2, 2)["w"]
    b, best = np.array(CURVATURES)[newcomers, None], points(5)[newcomers]
    for _ in range(2):
        u = np.array([heurfedamp(5.0, [0.1] * 5)(w, i, members) for i in newcomers]) @ w
        mine = w[newcomers]
        w[newcomers] = mine - lr * (b * (mine - best) + prox * (mine - u))
    np.testing.assert_allclose(row(adapted), w[newcomers], rtol=0, atol=1e-13)
    assert torch.equal(simulation.server["w"], before)


def test_a_sole_member_listens_to_nobody_and_a_newcomer_to_it() -> None:
    simulation = make({"lr": 0.0, "batch_size": 0, "local_epochs": 1, "self_weight": 0.3}, [2], engine="batched")
    for client, expected in ((2, START[2]), (4, 0.3 * START[4] + 0.7 * START[2])):
        simulation.play_round(torch.tensor([client]), 1)
        np.testing.assert_allclose(row(simulation.server["u"][client]), expected, rtol=0, atol=1e-14)
