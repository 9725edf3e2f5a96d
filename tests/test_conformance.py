"""What must hold for every registered algorithm; its row in :mod:`tests.conformance_table` buys it all of this."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from coterie import randomness
from coterie.algorithms import registry
from coterie.algorithms.base import Minibatches, Replies
from coterie.compute.batched import BatchedEngine
from coterie.compute.engine import Call
from coterie.compute.samples import Samples
from coterie.data.partitions import Ragged
from coterie.simulation.exchange import Request
from coterie.simulation.simulation import Simulation
from tests.conformance_table import TABLE, Row
from tests.support import DEVICE, classification, everyone, simulate, small_model

CLIENTS = 5
CASES = [
    pytest.param(name, row.settings | variant, id=name + ("" if not number else f"-{number}"))
    for name, row in TABLE.items()
    for number, variant in enumerate(({}, *row.variants))
]


def make(name: str, settings: dict[str, Any], **options: Any) -> Simulation:
    dtype = options.get("dtype", torch.float64)
    samples = classification(CLIENTS)
    if dtype != torch.float64:
        samples = dataclasses.replace(
            samples, x=samples.x.to(dtype), class_counts=samples.class_counts.to(dtype), dtype=dtype
        )
    return simulate(name, samples, small_model(), task="multiclass", settings=settings, **options)


def cohort_of(round_number: int) -> Tensor:
    """Three of the five clients, different ones each round."""
    drawn = randomness.stream(5, "test cohort", round_number).choice(CLIENTS, size=3, replace=False)
    return torch.tensor(sorted(drawn.tolist()), device=DEVICE)


def copied(simulation: Simulation) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    return (
        {name: value.clone() for name, value in simulation.server.items()},
        {name: value.clone() for name, value in simulation.clients.rows.items()},
    )


def put(simulation: Simulation, state: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    simulation.server = {name: value.clone() for name, value in state[0].items()}
    simulation.clients.rows = {name: value.clone() for name, value in state[1].items()}


def assert_close(one: dict[str, Tensor], two: dict[str, Tensor], tolerance: float, what: str) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        other = two[name]
        if not value.is_floating_point():
            assert torch.equal(value, other), f"{what} {name}"
            continue
        finite = value.isfinite()
        assert torch.equal(finite, other.isfinite()), f"{what} {name}"
        if not finite.any():
            continue
        scale = 1 + float(value[finite].abs().max())
        difference = float((value[finite] - other[finite]).abs().max())
        assert difference <= tolerance * scale, f"{what} {name}: {difference:.3g} of {scale:.3g}"


def assert_same(one: dict[str, Tensor], two: dict[str, Tensor], what: str) -> None:
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert torch.equal(value, two[name]) or torch.equal(value.isnan(), two[name].isnan()), f"{what} {name}"
        assert torch.equal(torch.nan_to_num(value), torch.nan_to_num(two[name])), f"{what} {name}"


def models_of(simulation: Simulation, round_number: int) -> dict[str, Tensor]:
    everybody = everyone(simulation)
    out = {f"personal {key}": value for key, value in simulation.personal(everybody, round_number).items()}
    shared = simulation.algorithm.global_model(simulation.server)
    return out | {f"global {key}": value for key, value in (shared or {}).items()}


def lose_some(clients: Tensor, call: Call) -> Tensor:
    """Lose one random client at each exchange, if more than one was asked."""
    lost = torch.zeros(len(clients), dtype=torch.bool, device=clients.device)
    if len(clients) > 1:
        lost[int(randomness.stream(1, f"lost {call.exchange}", call.round).integers(len(clients)))] = True
    return lost


def test_every_algorithm_has_a_row() -> None:
    assert set(TABLE) == set(registry.names())


@pytest.mark.parametrize(("name", "settings"), CASES)
@pytest.mark.parametrize("lossy", [False, True], ids=["all-reply", "some-lost"])
def test_engines_agree(name: str, settings: dict[str, Any], lossy: bool) -> None:
    lost = lose_some if lossy else None
    loop, batched = (make(name, settings, engine=engine, lost=lost) for engine in ("loop", "batched"))
    for number in (1, 2, 3):
        for simulation in (loop, batched):
            simulation.play_round(cohort_of(number), number)
        assert_close(loop.server, batched.server, 1e-10, "server")
        assert_close(loop.clients.rows, batched.clients.rows, 1e-10, "clients")
        assert_close(models_of(loop, number), models_of(batched, number), 1e-10, "models")
        if TABLE[name].discrete:  # a last-bit difference may turn into another choice: start again from one state
            put(batched, copied(loop))


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_engines_agree_in_float32(name: str, settings: dict[str, Any]) -> None:
    # One round from a common state. A step's rounding error is a few units in the last place of numbers of order one,
    # and steps of these sizes expand it at most mildly: 21 samples in batches of 4, twice, are 12 steps; allow 40 eps
    # each. Server weights are divided by at least 1e-3 here.
    first = make(name, settings, engine="loop", dtype=torch.float32)
    first.play_round(everyone(first), 1)
    state = copied(first)
    ends = []
    for engine in ("loop", "batched"):
        simulation = make(name, settings, engine=engine, dtype=torch.float32)
        put(simulation, state)
        simulation.play_round(cohort_of(2), 2)
        ends.append(simulation)
    tolerance = 12 * 40 * torch.finfo(torch.float32).eps * 10
    assert_close(ends[0].clients.rows, ends[1].clients.rows, tolerance, "clients")


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_deterministic_bit_for_bit(name: str, settings: dict[str, Any]) -> None:
    ends = []
    for _ in range(2):
        simulation = make(name, settings)
        for number in (1, 2):
            simulation.play_round(cohort_of(number), number)
        ends.append((*copied(simulation), models_of(simulation, 2)))
    for one, two in zip(*ends, strict=True):
        assert_same(one, two, "second run")


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_chunks_do_not_matter(name: str, settings: dict[str, Any]) -> None:
    ends = []
    for chunk in (1, 2, CLIENTS):
        simulation = make(name, settings, chunk=chunk)
        simulation.play_round(everyone(simulation), 1)
        ends.append(simulation)
    for other in ends[1:]:
        assert_close(ends[0].server, other.server, 1e-10, "server")
        assert_close(ends[0].clients.rows, other.clients.rows, 1e-10, "clients")


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_absent_clients_are_bit_identical(name: str, settings: dict[str, Any]) -> None:
    simulation = make(name, settings)
    for number in (1, 2, 3):
        _, before = copied(simulation)
        cohort = cohort_of(number)
        simulation.play_round(cohort, number)
        absent = torch.tensor([client for client in range(CLIENTS) if client not in cohort.tolist()], device=DEVICE)
        for key, value in simulation.clients.rows.items():
            assert torch.equal(torch.nan_to_num(value[absent]), torch.nan_to_num(before[key][absent])), key


@pytest.mark.parametrize(("name", "settings"), CASES)
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_inputs_are_not_mutated_and_rows_are_independent(name: str, settings: dict[str, Any], engine: str) -> None:
    """Every task of a round: run again with one client's data changed, no other client's row may change a bit.

    The batched engine may hand tasks copies, the loop hands them views of what it was given.
    """
    simulation = make(name, settings, engine=engine)
    other = make(name, settings, engine=engine)
    victim = 2
    mine = torch.cat([other.engine.samples.splits[split][victim] for split in ("train", "validation")])
    other.engine.samples.x[mine] *= -3.0
    seen: list[str] = []
    run = simulation.engine.run

    def checked(task: Any, clients: Tensor, state: Any, message: Any, call: Call) -> Any:
        before = ({k: v.clone() for k, v in state.items()}, {k: v.clone() for k, v in message.items()})
        changes, reply = run(task, clients, state, message, call)
        assert_same(before[0], state, "state given to a task")
        assert_same(before[1], message, "message given to a task")
        changed = other.engine.run(task, clients, state, message, call)
        rest = clients != victim
        for original, again in zip((changes, reply), changed, strict=True):
            assert_same(
                {k: v[rest] for k, v in original.items()}, {k: v[rest] for k, v in again.items()}, "another row"
            )
        seen.append(type(task).__name__)
        return changes, reply

    simulation.engine.run = checked  # type: ignore[method-assign]
    for number in (1, 2):
        server = {name: value.clone() for name, value in simulation.server.items()}
        given = simulation.server
        simulation.play_round(everyone(simulation), number)
        assert_same(server, given, "server state given to a round")
    simulation.personal(everyone(simulation), 2)
    assert seen


# What a method draws for a client is keyed by the client's number, so that a client of another name draws something
# else. These settings leave nothing to draw: full batches, and no choice by lot.
NOTHING_DRAWN: dict[str, dict[str, Any]] = {
    "fedfomo": {"candidates": CLIENTS - 1, "epsilon": 0.0},
    "fedadmm": {"local_epochs": 1},
    "per_fedavg": {"adapt_batch_size": 0},
}


def relabelled(samples: Samples, order: list[int]) -> Samples:
    """The same clients, the new number ``k`` being the old ``order[k]``."""
    splits: dict[Any, Ragged] = {}
    for split, ragged in samples.splits.items():
        moved = Ragged.of([ragged[client] for client in order])
        splits[split] = Ragged(moved.flat.to(DEVICE), moved.offsets.to(DEVICE))
    return dataclasses.replace(samples, splits=splits, class_counts=samples.class_counts[order])


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_names_of_clients_do_not_matter(name: str, settings: dict[str, Any]) -> None:
    settings = settings | ({"batch_size": 0} if "batch_size" in settings else {}) | NOTHING_DRAWN.get(name, {})
    order = [3, 0, 4, 2, 1]
    one = make(name, settings)
    samples = relabelled(classification(CLIENTS), order)
    two = simulate(name, samples, small_model(), task="multiclass", settings=settings)
    for number in (1, 2, 3):
        online = cohort_of(number).tolist()
        one.play_round(torch.tensor(online, device=DEVICE), number)
        two.play_round(torch.tensor(sorted(order.index(client) for client in online), device=DEVICE), number)
        assert_close({k: v[order] for k, v in one.clients.rows.items()}, two.clients.rows, 1e-10, "clients")
        first, second = models_of(one, number), models_of(two, number)
        first = {key: value[order] if key.startswith("personal") else value for key, value in first.items()}
        assert_close(first, second, 1e-10, "models")


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_recorded_steps_agree_and_recordings_stay_few(name: str, settings: dict[str, Any]) -> None:
    """Ragged clients, other ones each round: what was recorded for one round serves the next."""
    plain, recorded = make(name, settings), make(name, settings, record=True)
    engine = recorded.engine
    assert isinstance(engine, BatchedEngine)
    for number in range(1, 7):
        for simulation in (plain, recorded):
            simulation.play_round(cohort_of(number), number)
        assert_close(plain.server, recorded.server, 1e-10, "server")
        assert_close(plain.clients.rows, recorded.clients.rows, 1e-10, "clients")
        if TABLE[name].discrete:  # as between engines
            put(recorded, copied(plain))
    # One for each fold with minibatches of 4; one more for each width of a fold over whole clients, of which the five
    # sizes 5, 9, 13, 17 and 21 leave three for the largest of three; and those again for another number of trial steps.
    folds = sum(len(task.folds()) for task in recorded.tasks.values())
    whole = any(not isinstance(f.over, Minibatches) for task in recorded.tasks.values() for f in task.folds())
    assert len(engine._recorded) <= folds * (3 if whole else 1) + (1 if name == "sfedpg" else 0)
    for each in engine._recorded.values():
        assert len(each._replays) <= 3  # for 1, 2 and all 3 rows
    assert_close(models_of(plain, 6), models_of(recorded, 6), 1e-10, "models")


@pytest.mark.parametrize("settings", [{"batch_size": 0}, {"batch_size": 8}, {"batch_size": 32}])
def test_recordings_stay_few_whatever_the_sizes(settings: dict[str, Any]) -> None:
    """48 clients of 20 to 67 samples, six of them a round, so that the largest of a round is nearly always another."""
    sizes = [20 + 29 * client % 48 for client in range(48)]
    samples = classification(48, sizes=sizes)
    recorded, plain = (
        simulate(
            "fedavg",
            samples,
            small_model(),
            task="multiclass",
            settings={"lr": 0.1, "local_epochs": 2} | settings,
            record=record,
        )
        for record in (True, False)
    )
    engine, largest = recorded.engine, set()
    assert isinstance(engine, BatchedEngine)
    for number in range(1, 25):
        drawn = randomness.stream(5, "test cohort", number).choice(48, size=6, replace=False)
        cohort = torch.tensor(sorted(drawn.tolist()), device=DEVICE)
        largest.add(max(sizes[client] for client in cohort.tolist()))
        for simulation in (recorded, plain):
            simulation.play_round(cohort, number)
    assert_close(plain.server, recorded.server, 1e-10, "server")
    assert len(largest) > 9
    # Four widths to an octave: of full batches 20, 24, 28, 32, 40, 48, 56, 64 and 80, and else the batch size alone,
    # which no round falls short of unless all its clients do.
    assert len(engine._recorded) <= {0: 9, 8: 1, 32: 4}[settings["batch_size"]]
    for each in engine._recorded.values():
        assert each._replays.keys() <= {1, 2, 4, 6}


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_personalising_leaves_everything_as_it_was(name: str, settings: dict[str, Any]) -> None:
    simulation = make(name, settings)
    simulation.play_round(cohort_of(1), 1)
    before, traffic = copied(simulation), dataclasses.replace(simulation.traffic)
    first = simulation.personal(everyone(simulation), 1)
    second = simulation.personal(everyone(simulation), 1)
    assert_same(first, second, "personal models")
    assert_same(before[0], simulation.server, "server")
    assert_same(before[1], simulation.clients.rows, "clients")
    assert simulation.traffic == traffic


@pytest.mark.parametrize("name", sorted(TABLE))
def test_messages_have_the_bytes_that_the_method_counts(name: str) -> None:
    row: Row = TABLE[name]
    simulation = make(name, row.settings)
    simulation.play_round(everyone(simulation), 1)
    before = dataclasses.replace(simulation.traffic)
    simulation.play_round(everyone(simulation), 2)
    layout = simulation.engine.net.layout
    assert simulation.traffic.down - before.down == CLIENTS * 8 * row.down(layout)
    assert simulation.traffic.up - before.up == CLIENTS * 8 * row.up(layout)


LOCAL = ("*.bias",)  # of the body and of the head, so that the columns that stay are not in one piece


@pytest.mark.parametrize("name", sorted(TABLE))
def test_what_is_local_never_travels(name: str) -> None:
    row: Row = TABLE[name]
    whole, simulation = make(name, row.settings), make(name, row.settings, local=LOCAL)
    assert simulation.part is not None
    first, travelled, stayed = simulation.clients.rows["local_part"].clone(), [], []
    deliver = simulation.exchange.deliver

    def watched(request: Request) -> Replies:
        stayed.append(simulation.clients.rows["local_part"].clone())
        replies = deliver(request)
        stayed.append(simulation.clients.rows["local_part"].clone())
        travelled.extend([*request.message.shared.values(), *request.message.each.values(), *replies.rows.values()])
        return replies

    simulation.exchange.deliver = watched  # type: ignore[method-assign]
    for number in (1, 2):
        whole.play_round(everyone(whole), number)
        simulation.play_round(everyone(simulation), number)
    last = simulation.clients.rows["local_part"]
    assert bool((last != first).all()) and bool((last != last[:1]).any(0).all())  # they train, each client its own
    kept = torch.cat(stayed).unique()
    assert not any(bool(torch.isin(tensor.double(), kept).any()) for tensor in travelled)
    assert not any(bool(torch.isin(value.double(), kept).any()) for value in simulation.server.values())
    # An auxiliary head is no parameter of the model: with its 3 biases it is sent as ever.
    auxiliary = 3 if name == "splitgp" else 0
    layout = simulation.part.layout
    assert layout.size == simulation.engine.net.layout.size - (5 + 3)
    assert simulation.traffic.down - whole.traffic.down == 2 * CLIENTS * 8 * (
        row.down(layout) + auxiliary - row.down(whole.engine.net.layout)
    )
    assert simulation.traffic.up - whole.traffic.up == 2 * CLIENTS * 8 * (
        row.up(layout) + auxiliary - row.up(whole.engine.net.layout)
    )


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_engines_agree_where_parameters_stay(name: str, settings: dict[str, Any]) -> None:
    loop = make(name, settings, engine="loop", local=LOCAL)
    others = [make(name, settings, local=LOCAL, record=record) for record in (False, True)]
    for number in (1, 2):
        for simulation in (loop, *others):
            simulation.play_round(cohort_of(number), number)
        for simulation in others:
            assert_close(loop.server, simulation.server, 1e-10, "server")
            assert_close(loop.clients.rows, simulation.clients.rows, 1e-10, "clients")
            assert_close(models_of(loop, number), models_of(simulation, number), 1e-10, "models")
            if TABLE[name].discrete:
                put(simulation, copied(loop))


@pytest.mark.parametrize("name", sorted(TABLE))
def test_with_everything_shared_nothing_changes(name: str) -> None:
    plain, shared = make(name, TABLE[name].settings), make(name, TABLE[name].settings, local=())
    for number in (1, 2):
        for simulation in (plain, shared):
            simulation.play_round(cohort_of(number), number)
    assert shared.part is None and plain.traffic == shared.traffic
    for one, two in zip(copied(plain), copied(shared), strict=True):
        assert_same(one, two, "nothing local")


@pytest.mark.parametrize(("name", "settings"), CASES)
def test_an_interrupted_round_changes_nothing(name: str, settings: dict[str, Any]) -> None:
    simulation = make(name, settings)
    simulation.play_round(everyone(simulation), 1)
    before = copied(simulation)

    def stop(request: Request) -> Replies:
        deliver(request)
        raise KeyboardInterrupt

    deliver = simulation.exchange.deliver
    simulation.exchange.deliver = stop  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        simulation.play_round(everyone(simulation), 2)
    assert_same(before[0], simulation.server, "server")
    assert_same(before[1], simulation.clients.rows, "clients")


@pytest.mark.parametrize("name", sorted(TABLE))
def test_one_client_alone(name: str) -> None:
    simulation = make(name, TABLE[name].settings)
    simulation.play_round(torch.tensor([3], device=DEVICE), 1)
    for value in (*simulation.server.values(), *simulation.clients.rows.values()):
        assert not value.is_floating_point() or bool(value.isfinite().all()) or name == "fedpg"
