"""FedFomo: candidates judged on the client's own validation samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coterie.algorithms import registry
from coterie.algorithms.base import Cohort, Weights
from coterie.algorithms.fedfomo import FedFomo
from coterie.compute.engine import Call
from coterie.randomness import stream
from coterie.rows import Layout
from coterie.simulation.exchange import AttackedExchange
from coterie.simulation.simulation import Simulation
from tests.support import everyone, linear_regression, play, samples_of, simulate

FEATURES = 3
SIZES = (4, 7, 5, 6, 9)
VALIDATION = (3, 2, 4, 0, 300)  # client 3 has nothing to judge others by, client 4 more than fits one block
FULL = {"batch_size": 0, "lr": 0.1, "local_epochs": 2}


def data(sizes: Any, purpose: str = "train", group_size: int = 5) -> list[tuple[Tensor, Tensor]]:
    """Linear targets, the same within a group of consecutive clients, with a little noise."""
    draw = stream(9, f"fedfomo {purpose}")
    made = []
    for client, count in enumerate(sizes):
        rule = stream(9, "fedfomo rule", client // group_size).normal(size=FEATURES)
        x = draw.normal(size=(count, FEATURES))
        y = x @ rule + 0.3 * draw.normal(size=count)
        made.append((torch.from_numpy(x), torch.from_numpy(y)))
    return made


def make(
    algorithm: str = "fedfomo",
    engine: str = "batched",
    lost: Any = None,
    sizes: Any = SIZES,
    validation: Any = VALIDATION,
    group_size: int = 5,
    **options: Any,
) -> Simulation:
    samples = samples_of(
        data(sizes, group_size=group_size), validation=data(validation, "validation", group_size=group_size)
    )
    module = linear_regression(FEATURES)
    return simulate(algorithm, samples, module, engine=engine, lost=lost, settings=FULL | options)


class Reference:
    """The method in NumPy for f = (1/2N)|X v − y|², full batches, and all others as candidates."""

    def __init__(self) -> None:
        self.v = np.zeros((len(SIZES), FEATURES))
        self.p = np.zeros((len(SIZES), len(SIZES)))
        self.weights = np.zeros_like(self.p)
        self.train = [(x.numpy(), y.numpy()) for x, y in data(SIZES)]
        self.judge = [(x.numpy(), y.numpy()) for x, y in data(VALIDATION, "validation")]

    def loss(self, client: int, v: Any) -> float:
        x, y = self.judge[client]
        return float(0.5 * np.mean((x @ v - y) ** 2)) if len(y) else 0.0

    def round(self, cohort: list[int], lr: float, steps: int) -> None:
        old = self.v.copy()
        self.weights[:] = 0
        for i in cohort:
            raw = np.zeros(len(SIZES))
            for j in range(len(SIZES)):
                distance = np.linalg.norm(old[j] - old[i])
                if j != i and distance > 0:
                    raw[j] = max(0.0, (self.loss(i, old[i]) - self.loss(i, old[j])) / distance)
            normal = raw / raw.sum() if raw.sum() > 0 else raw
            v = old[i] + normal @ (old - old[i])
            x, y = self.train[i]
            for _ in range(steps):
                v = v - lr * x.T @ (x @ v - y) / len(y)
            self.v[i] = v
            self.p[i] += raw
            self.weights[i] = normal
            self.weights[i, i] = 1 - normal.sum()


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_rounds_equal_an_independent_implementation(engine: str) -> None:
    def lost(clients: Tensor, call: Call) -> Tensor:
        return (clients == 0) & (call.round == 3)

    simulation = make(engine=engine, lost=lost, candidates=len(SIZES) - 1)
    reference = Reference()
    rounds = [([0, 1, 2, 3, 4],) * 2, ([1, 3, 4],) * 2, ([0, 2, 3], [2, 3]), ([0, 1, 2, 3, 4],) * 2]
    moved = 0.0
    for number, (asked, answered) in enumerate(rounds, start=1):
        info = simulation.play_round(torch.tensor(asked), number)
        reference.round(answered, 0.1, 2)
        np.testing.assert_allclose(simulation.clients.rows["w"].numpy(), reference.v, rtol=0, atol=1e-12)
        np.testing.assert_allclose(simulation.server["w"].numpy(), reference.v, rtol=0, atol=1e-12)
        np.testing.assert_allclose(simulation.server["affinity"].numpy(), reference.p, rtol=1e-9, atol=1e-12)
        weights = info["weights"]
        assert isinstance(weights, Weights)
        assert weights.rows.tolist() == answered and weights.columns.tolist() == list(range(len(SIZES)))
        np.testing.assert_allclose(weights.values.numpy(), reference.weights[answered], rtol=1e-9, atol=1e-12)
        moved += float(reference.p.sum())
    assert moved > 0


def test_nothing_better_leaves_the_model_unchanged_before_the_local_step() -> None:
    # Everybody's model is 0 but client 1's, which is far worse on everybody's samples; without local steps all stay.
    simulation = make(lr=0.0, candidates=4)
    for state in (simulation.server, simulation.clients.rows):
        state["w"][1] = 100.0
    before = simulation.clients.rows["w"].clone()
    info = simulation.play_round(torch.tensor([0, 2, 3, 4]), 1)
    assert torch.equal(simulation.clients.rows["w"], before)
    weights = info["weights"]
    assert isinstance(weights, Weights)
    assert torch.equal(weights.values, torch.eye(5, dtype=torch.float64)[[0, 2, 3, 4]])
    assert not simulation.server["affinity"].any()
    # Client 1 itself is helped by any of the others.
    simulation.play_round(torch.tensor([1]), 2)
    torch.testing.assert_close(simulation.clients.rows["w"][1], torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-12)


def test_a_single_better_model_is_taken_whole() -> None:
    # One candidate with positive weight has normalised weight 1: v_i + (v_j − v_i) = v_j.
    simulation = make(lr=0.0, candidates=4, sizes=(40, 40, 40, 40, 40), validation=(30, 30, 30, 30, 30))
    best = torch.from_numpy(stream(9, "fedfomo rule", 0).normal(size=FEATURES))
    simulation.server["w"][2] = simulation.clients.rows["w"][2] = best
    simulation.play_round(torch.tensor([0, 4]), 1)
    torch.testing.assert_close(simulation.clients.rows["w"][[0, 4]], best.expand(2, -1), rtol=0, atol=1e-12)


def test_the_first_round_is_local_training_since_all_start_alike() -> None:
    fomo, local = make(), make("local")
    for simulation in (fomo, local):
        play(simulation, 1)
    torch.testing.assert_close(fomo.clients.rows["w"], local.clients.rows["w"], rtol=0, atol=1e-13)


def test_a_client_without_validation_samples_keeps_its_model_and_trains_it() -> None:
    fomo, local = make(), make("local")
    for simulation in (fomo, local):
        play(simulation, 4)
    torch.testing.assert_close(fomo.clients.rows["w"][3], local.clients.rows["w"][3], rtol=0, atol=1e-13)
    assert not fomo.server["affinity"][3].any()
    others = [0, 1, 2, 4]
    assert float((fomo.clients.rows["w"][others] - local.clients.rows["w"][others]).abs().max()) > 1e-3


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_without_any_validation_samples_it_is_local(engine: str) -> None:
    fomo, local = make(engine=engine, validation=(0,) * 5), make("local", engine)
    for simulation in (fomo, local):
        play(simulation, 3)
    torch.testing.assert_close(fomo.clients.rows["w"], local.clients.rows["w"], rtol=0, atol=1e-13)


def test_recorded_weights_are_convex_and_prefer_ones_own_group() -> None:
    # Two groups with different targets; from round 2 on models differ, and only the group's own lower the loss.
    simulation = make(sizes=(12,) * 6, validation=(8,) * 6, group_size=3, candidates=5, local_epochs=10)
    within = between = 0.0
    for number in (1, 2, 3, 4):
        info = simulation.play_round(everyone(simulation), number)
        weights = info["weights"]
        assert isinstance(weights, Weights)
        assert bool((weights.values >= 0).all())
        torch.testing.assert_close(weights.values.sum(1), torch.ones(6, dtype=torch.float64), rtol=0, atol=1e-12)
        own = torch.eye(6, dtype=torch.bool)
        together = (torch.arange(6) // 3).unsqueeze(0) == (torch.arange(6) // 3).unsqueeze(1)
        within += float(weights.values[together & ~own].sum())
        between += float(weights.values[~together].sum())
    assert within > 20 * between


def test_a_candidate_that_diverged_is_ignored() -> None:
    simulation = make(lr=0.0)
    clients = torch.tensor([0, 1])
    worse, better = torch.full((FEATURES,), 50.0).double(), torch.zeros(FEATURES).double()
    infinite, undefined = torch.full_like(worse, torch.inf), torch.full_like(worse, torch.nan)
    message = {"candidates": torch.stack([infinite, undefined, better]).expand(2, 3, FEATURES)}
    changes, reply = simulation.engine.run(
        simulation.tasks["train"], clients, {"w": worse.expand(2, -1)}, message, Call(1)
    )
    torch.testing.assert_close(changes["w"], better.expand(2, -1), rtol=0, atol=1e-12)
    assert bool((reply["raw"] > 0).eq(torch.tensor([False, False, True])).all())


def knowing(affinity: Tensor) -> dict[str, Tensor]:
    """The server's state when everybody has taken part."""
    seen = torch.ones(len(affinity), dtype=torch.bool)
    return {"affinity": affinity, "seen": seen, "members": torch.arange(len(affinity))}


def cohort_of(clients: list[int], total: int, number: int, seed: int = 1) -> Cohort:
    return Cohort(torch.tensor(clients), number, torch.ones(total), seed, Layout(("w",), ((1,),), (0, 1)))


@given(seed=st.integers(0, 2**31), total=st.integers(2, 9), count=st.integers(1, 9), number=st.integers(1, 12))
@settings(max_examples=60, deadline=None)
def test_candidates_are_others_and_without_exploration_the_best(seed: int, total: int, count: int, number: int) -> None:
    affinity = torch.from_numpy(stream(seed, "affinity").uniform(size=(total, total)))
    method = FedFomo(candidates=count, epsilon=0.0)
    chosen = method.choose(knowing(affinity), cohort_of(list(range(total)), total, number, seed))
    assert chosen.shape == (total, min(count, total - 1))
    for client, mine in enumerate(chosen.tolist()):
        others = [j for j in range(total) if j != client]
        ranked = sorted(others, key=lambda j: -float(affinity[client, j]))
        assert mine == sorted(ranked[:count])
    alone = method.choose(knowing(affinity), cohort_of([total - 1], total, number, seed))
    assert torch.equal(alone[0], chosen[-1])


def explored(number: int, trials: int = 2000) -> float:
    """The fraction of clients that were not sent their two best, over many seeds."""
    method, total = registry.make("fedfomo", {"candidates": 2}), 20
    assert isinstance(method, FedFomo)
    affinity = torch.arange(total, dtype=torch.float64).expand(total, -1).clone()
    clients = list(range(10))  # for all of these the best two are 18 and 19
    found = 0
    for seed in range(trials // len(clients)):
        chosen = method.choose(knowing(affinity), cohort_of(clients, total, number, seed))
        found += int((chosen != torch.tensor([18, 19])).any(1).sum())
    return found / trials


@pytest.mark.parametrize(("number", "epsilon"), [(1, 0.3), (4, 0.15), (7, 0.0), (40, 0.0)])
def test_exploration_has_probability_epsilon_which_decays_to_none(number: int, epsilon: float) -> None:
    # An exploring client is sent the best two of 19 by chance 1 / C(19, 2). Five standard deviations of a mean of 2000.
    p = epsilon * (1 - 1 / 171)
    assert abs(explored(number) - p) <= 5 * (p * (1 - p) / 2000) ** 0.5


def test_equal_affinities_are_taken_in_random_order() -> None:
    # 4000 draws of 2 out of 9 others, each therefore drawn with probability 2/9: five standard deviations.
    method = FedFomo(candidates=2, epsilon=0.0)
    counts = torch.zeros(10)
    for seed in range(400):
        chosen = method.choose(knowing(torch.zeros(10, 10).double()), cohort_of(list(range(10)), 10, 1, seed))
        counts += torch.bincount(chosen.flatten(), minlength=10)
    expected = 400 * 9 * 2 / 9
    assert float((counts - expected).abs().max()) <= 5 * (3600 * 2 / 9 * 7 / 9) ** 0.5


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_clients_that_never_took_part_come_last(epsilon: float) -> None:
    simulation = make(candidates=2, epsilon=epsilon, epsilon_decay=0.0)
    simulation.play_round(torch.tensor([1, 3, 4]), 1)
    method = simulation.algorithm
    assert isinstance(method, FedFomo)
    for seed in range(20):
        chosen = method.choose(simulation.server, cohort_of([0, 1, 3], 5, 2, seed)).tolist()
        assert set(chosen[0]) < {1, 3, 4} and chosen[1:] == [[3, 4], [1, 4]]


def test_clients_held_out_are_sent_to_nobody_and_hear_the_members() -> None:
    members, newcomers = [0, 2, 4], [1, 3]
    samples = samples_of(data(SIZES), validation=data((3,) * 5, "validation"))
    algorithm = registry.make("fedfomo", FULL | {"candidates": 4, "epsilon": 1.0, "epsilon_decay": 0.0})
    whole = simulate(algorithm, samples, linear_regression(FEATURES))
    simulation = Simulation(algorithm, whole.engine, members=torch.tensor(members))
    assert isinstance(algorithm, FedFomo)
    for number in (1, 2):
        info = simulation.play_round(torch.tensor(members), number)
        chosen = algorithm.choose(simulation.server, cohort_of(members, 5, number)).tolist()
        assert chosen == [[2, 4], [0, 4], [0, 2]]  # and not four, two of which would be nobody's
        weights = info["weights"]
        assert isinstance(weights, Weights) and not weights.values[:, newcomers].any()
    assert simulation.traffic.down == 2 * 3 * 2 * 8 * FEATURES
    heard = algorithm.choose(simulation.server, cohort_of(newcomers, 5, 3)).tolist()
    assert heard == [members, members]
    before = simulation.server["w"].clone()
    adapted = simulation.adapt(torch.tensor(newcomers), 2, 2)["w"]
    assert adapted.shape == (2, FEATURES) and torch.equal(simulation.server["w"], before)


def test_only_those_who_replied_change_what_the_server_knows() -> None:
    simulation = make(lost=lambda clients, call: (clients == 2) & (call.round == 3), candidates=2)
    play(simulation, 2)
    before = {name: value.clone() for name, value in simulation.server.items()}
    info = simulation.play_round(torch.tensor([0, 2, 4]), 3)
    for name, value in simulation.server.items():
        assert torch.equal(value[[1, 2, 3]], before[name][[1, 2, 3]])
    weights = info["weights"]
    assert isinstance(weights, Weights)
    assert weights.rows.tolist() == [0, 4] and weights.values.shape == (2, 5)
    grown = simulation.server["affinity"] - before["affinity"]
    assert bool((grown >= 0).all()) and int((grown > 0).sum(1).max()) <= 2


def test_claims_that_are_no_weights_count_as_none() -> None:
    simulation = make(candidates=2)
    simulation.exchange = AttackedExchange(
        simulation.exchange,
        lambda rows, clients, call: rows | {"raw": torch.tensor([[-1.0, torch.nan]]).double().expand(5, -1)},
    )
    info = simulation.play_round(everyone(simulation), 1)
    weights = info["weights"]
    assert isinstance(weights, Weights)
    assert torch.equal(weights.values, torch.eye(5, dtype=torch.float64))
    assert not simulation.server["affinity"].any()


def test_messages_carry_m_models_down_and_one_with_m_weights_up() -> None:
    simulation = make(candidates=2)
    play(simulation, 1)
    assert simulation.traffic.down == 8 * 5 * 2 * FEATURES
    assert simulation.traffic.up == 8 * 5 * (FEATURES + 2)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_federation_of_one_is_local(engine: str) -> None:
    fomo, local = (make(name, engine, sizes=(4,), validation=(3,)) for name in ("fedfomo", "local"))
    for simulation in (fomo, local):
        play(simulation, 2)
    torch.testing.assert_close(fomo.clients.rows["w"], local.clients.rows["w"], rtol=0, atol=1e-13)


def test_the_global_model_is_the_mean_of_all_who_took_part_and_derived() -> None:
    simulation = make()
    assert simulation.algorithm.derived_global
    start = simulation.algorithm.global_model(simulation.server)
    assert start is not None and torch.equal(start["w"], torch.zeros(FEATURES).double())
    for number, (cohort, part) in enumerate(
        [([1, 4], [1, 4]), ([0, 1], [0, 1, 4]), ([2, 3], [0, 1, 2, 3, 4])], start=1
    ):
        simulation.play_round(torch.tensor(cohort), number)
        rows = simulation.algorithm.global_model(simulation.server)
        assert rows is not None
        wanted = simulation.personal(everyone(simulation), number)["w"][part].numpy().mean(0)
        np.testing.assert_allclose(rows["w"].numpy(), wanted, rtol=0, atol=1e-14)
