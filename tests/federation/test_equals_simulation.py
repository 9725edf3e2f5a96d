"""A federation of nodes ends with the models of a simulation, bit for bit."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors import safe_open

from coterie.config import from_mapping
from coterie.errors import Interrupted
from coterie.federation.plan import Plan
from coterie.federation.server import serve
from coterie.federation.wire import unpack
from coterie.runs.builder import assemble
from coterie.simulation.simulation import Simulation
from tests.federation.grid import (
    Local,
    combined,
    compare,
    equal,
    make_federation,
    metrics_of,
    node_rows,
    simulated,
    states,
)


@pytest.mark.parametrize(
    ("algorithm", "more"),
    [
        ("fedavg", {}),
        ("fedacs", {}),
        ("flame", {}),  # a state that never leaves the node, and a hybrid model
        ("flame", {"settings": {"alpha": "size"}}),  # a first state that depends on everybody's samples
        ("fedpg", {}),  # two exchanges a round
        ("sfedpg", {}),  # a line search, whose messages change their shape
        ("fedavg_ft", {}),  # personal models that need an exchange of their own
        ("fedfomo", {"participation": 0.67}),
        ("scaffold", {"participation": 0.67, "eval_every": 2}),
        # Clients that were away start anew, on the nodes as in the simulation.
        ("fedacs", {"participation": 0.67, "settings": {"returning": "mixture"}}),
        ("fedamp", {"participation": 0.67, "settings": {"returning": "mixture"}}),
        ("flame", {"participation": 0.67, "settings": {"returning": "consensus"}}),
    ],
)
def test_same_models_and_metrics(tmp_path: Path, algorithm: str, more: dict[str, Any]) -> None:
    local = make_federation(tmp_path)
    serve(local.agreement, local.grid, Plan(algorithm=algorithm, rounds=3, **more), tmp_path / "run")
    compare(local, algorithm, 3, tmp_path / "run", tmp_path / "simulation", **more)


@pytest.mark.parametrize("algorithm", ["fedavg", "fedacs", "flame", "fedsgd", "fedamp", "sfedpg"])
def test_same_where_the_head_stays_on_the_nodes(tmp_path: Path, algorithm: str) -> None:
    local = make_federation(tmp_path, local="head")
    serve(local.agreement, local.grid, Plan(algorithm=algorithm, rounds=3), tmp_path / "run")
    compare(local, algorithm, 3, tmp_path / "run", tmp_path / "simulation")
    heads = torch.cat([node_rows(local, client, local.folder / "run")["local_part"] for client in range(3)])
    assert heads.shape == (3, 8 * 10 + 10) and bool((heads[0] != heads[1]).any())
    # What the server sent has room for the body alone: no tensor of it is as long as body and head.
    sent = [unpack(message, 2**30).tensors for each in local.grid.sent for message in each.values()]
    assert {value.shape[-1] for tensors in sent for value in tensors.values() if value.numel() > 90} == {64 * 8 + 8}


def _with_a_late_node(folder: Path, algorithm: str, settings: dict[str, Any], rounds: int) -> tuple[Local, int]:
    """Play a run in which the third node is not there before the third round; give the federation and the node."""
    folder.mkdir()
    local = make_federation(folder)
    late = list(local.grid.nodes_)[2]
    local.grid.away = lambda done: {late} if done < 3 else set()
    plan = Plan(algorithm=algorithm, settings=settings, rounds=rounds, minimum=2, wait=0)
    serve(local.agreement, local.grid, plan, folder / "run")
    return local, late


@pytest.mark.parametrize("algorithm", ["fedacs", "fedamp"])
def test_a_node_that_joins_late_begins_at_the_mean_of_the_others(tmp_path: Path, algorithm: str) -> None:
    """It misses two rounds of three, and is sent in the third the mean of what the others had after the second."""
    settings = {"returning": "mixture", "freshness": 0.25, "local_epochs": 1}
    known: dict[int, Any] = {}
    for rounds in (2, 3):
        folder = tmp_path / str(rounds)
        local, late = _with_a_late_node(folder, algorithm, settings, rounds)
        known[rounds] = local.grid.sent, states(folder / "run")[0], late
    _, before, _ = known[2]
    assert before["heard"].tolist() == [2, 2, 0]
    sent, after, late = known[3]
    assert after["heard"].tolist() == [3, 3, 3]
    messages = [unpack(each[late], 2**30).tensors for each in sent if late in each]
    models = [value for tensors in messages for name, value in tensors.items() if name.endswith("/w")]
    # The others replied in the same round, so that both are as fresh.
    torch.testing.assert_close(models[0].flatten(), before["w"][:2].double().mean(0).float(), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("fedacs", {}),
        ("fedacs", {"newcomers": "mixture", "returning": "mixture"}),
        ("fedamp", {}),  # two exchanges, of which the second sends something else
        ("flame", {}),
        ("flame", {"newcomers": "global", "returning": "consensus"}),
        ("ditto", {}),
    ],
)
def test_a_node_that_joins_late_is_a_newcomer_of_the_simulation(
    tmp_path: Path, algorithm: str, settings: dict[str, Any]
) -> None:
    """In its first round, the third, it ends where a client does that a simulation held out; the others do not notice.

    In the fourth it is a member like them.
    """
    settings = {"local_epochs": 1, **settings}
    ends: dict[int, Any] = {}
    for rounds in (3, 4):
        folder = tmp_path / str(rounds)
        local, _ = _with_a_late_node(folder, algorithm, settings, rounds)
        ends[rounds] = states(folder / "run")[0], [node_rows(local, client, folder / "run") for client in range(3)]
    config = from_mapping({"algorithm": algorithm, "settings": settings, **combined(local, tmp_path / "simulation")})
    whole = assemble(config).simulation
    simulation = Simulation(whole.algorithm, whole.engine, members=torch.tensor([0, 1]))
    for number in (1, 2):
        simulation.play_round(torch.tensor([0, 1]), number)
    expected = simulation.adapt(torch.tensor([2]), 2, 1)["w"]
    simulation.play_round(torch.tensor([0, 1]), 3)
    _, rows = ends[3]
    name = {"flame": "theta", "ditto": "v"}.get(algorithm, "w")
    assert (expected - whole.engine.problem.start).abs().max() > 0.01
    # A node of FLAME counts the whole roster, in α and in ρ alike: what it does is the same but for rounding.
    near = 1e-6 if algorithm == "flame" else 0.0
    torch.testing.assert_close(rows[2][name], expected, rtol=0, atol=near)
    for client in (0, 1):
        own = simulation.clients.rows[name][client]
        torch.testing.assert_close(rows[client][name][0], own, rtol=0, atol=near)
    server, rows = ends[4]
    assert not torch.equal(rows[2][name], expected)
    if "members" in server:
        assert server["members"].tolist() == [0, 1, 2]
    if algorithm == "flame":
        assert server["counted"].all()
        torch.testing.assert_close(server["sum"], server["u"].double().sum(0), rtol=0, atol=1e-5)


def test_a_run_that_a_node_joined_late_goes_on_after_a_stop(tmp_path: Path) -> None:
    """Stopped after the node's first round, and begun anew with all there: it ends as without the stop."""
    found = []
    for stop in (None, 3):
        folder = tmp_path / str(stop)
        folder.mkdir()
        local = make_federation(folder)
        late = list(local.grid.nodes_)[2]
        local.grid.away = lambda done, late=late: {late} if done < 3 else set()  # type: ignore[misc]
        plan = Plan(algorithm="fedacs", settings={"local_epochs": 1}, rounds=5, minimum=2, wait=0)

        def watch(number: int, score: float | None, stop: int | None = stop) -> None:
            if number == stop:
                raise KeyboardInterrupt

        with contextlib.suppress(Interrupted):
            serve(local.agreement, local.grid, plan, folder / "run", watch=watch)
        if stop is not None:
            serve(local.agreement, local.grid, plan, folder / "run")
        found.append(states(folder / "run")[0])
    equal(*found)
    assert found[0]["members"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("weights", ["balanced", {"0": 5.0, "7": 0.5}])
def test_same_where_classes_have_weights(tmp_path: Path, weights: Any) -> None:
    ends = []
    for given, name in ((weights, "weighted"), (None, "plain")):
        folder = tmp_path / name
        folder.mkdir()
        local = make_federation(folder, class_weights=given)
        serve(local.agreement, local.grid, Plan(algorithm="fedacs", rounds=2), folder / "run")
        own = {"class_weights": given, "scope": "local"}  # a node counts its own samples
        compare(local, "fedacs", 2, folder / "run", folder / "simulation", **own)
        ends.append(states(folder / "run")[0])
    assert any(bool((ends[0][name] != ends[1][name]).any()) for name in ends[0])


@pytest.mark.parametrize("algorithm", ["lp_proj", "admm_lp_proj"])
def test_same_models_up_to_rounding_where_memory_decides_the_kernel(tmp_path: Path, algorithm: str) -> None:
    # A product with a matrix of our own depends in its last bit on where its operands lie in memory, and a row on a
    # node lies elsewhere than a row of a matrix. In float64 that is far below 1e-10 after three rounds.
    local = make_federation(tmp_path, dtype="float64")
    serve(local.agreement, local.grid, Plan(algorithm=algorithm, rounds=3), tmp_path / "run")
    server, clients = states(simulated(local, algorithm, 3, tmp_path / "simulation"))
    ours = states(tmp_path / "run")[0]
    for name, value in server.items():
        torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-10)
    for client in range(3):
        for name, value in node_rows(local, client, local.folder / "run").items():
            torch.testing.assert_close(value[0], clients[name][client], rtol=0, atol=1e-10)


def test_a_node_keeps_its_own_model_and_the_server_none_of_it(tmp_path: Path) -> None:
    local = make_federation(tmp_path)
    serve(local.agreement, local.grid, Plan(algorithm="flame", rounds=2), tmp_path / "run")
    assert states(tmp_path / "run")[1] == {}
    metrics = metrics_of(tmp_path / "run")
    for client in range(3):
        (file,) = (local.node_folder(client) / "models").glob("*/model.safetensors")
        with safe_open(file, framework="pt") as model:
            assert model.metadata()["round"] == "2"
            row = torch.cat([model.get_tensor(name).flatten() for name in _names(local)])
        assert torch.equal(row, node_rows(local, client, local.folder / "run")["theta"][0])
        facts = json.loads((file.parent / "metrics.json").read_text())
        mine = metrics.query(f"client == {client} and round == 2 and split == 'test' and metric == 'accuracy'")
        assert facts["metrics"]["personal"]["test"]["accuracy"] == float(
            mine.query("model == 'personal'")["value"].item()
        )


def _names(local: Any) -> list[str]:
    from coterie.federation.party_data import blank_population, engine_of

    population = blank_population(local.agreement, {split: [1] * 3 for split in ("train", "validation", "test")})
    return list(engine_of(local.agreement.experiment("flame", {}), population).net.layout.names)


def test_evaluation_rides_on_training_exchanges(tmp_path: Path) -> None:
    local = make_federation(tmp_path)
    serve(local.agreement, local.grid, Plan(algorithm="fedavg", rounds=4), tmp_path / "run")
    # One hello, one exchange a round, and one for the evaluation after the last.
    assert local.grid.exchanges == 1 + 4 + 1
    metrics = metrics_of(tmp_path / "run")
    assert sorted(metrics.query("model == 'global' and metric == 'accuracy'")["round"].unique()) == [1, 2, 3, 4]


def test_bytes_on_the_wire_are_hardly_more_than_the_messages(tmp_path: Path) -> None:
    local = make_federation(tmp_path, model="mlp:hidden=4000")  # 64 * 4000 + 4000 + 4000 * 10 + 10 = 300010
    serve(local.agreement, local.grid, Plan(algorithm="fedavg", rounds=3), tmp_path / "run")
    frame = pd.read_parquet(tmp_path / "run" / "metrics.parquet")
    total = {name: float(frame.loc[frame["metric"] == name, "value"].sum()) for name in frame["metric"].unique()}
    assert total["bytes_up"] == total["bytes_down"] == 3 * 3 * 4 * 300010
    assert 1 <= total["wire_up"] / total["bytes_up"] < 1.05
    assert 1 <= total["wire_down"] / total["bytes_down"] < 1.05
