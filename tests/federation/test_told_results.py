"""What a federation's server can say afterwards: who gained, if silos let it, and the models that it has itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from coterie.algorithms import registry
from coterie.cli.app import app
from coterie.errors import ConfigError
from coterie.federation.party_data import blank_population, make_simulation, own_population
from coterie.federation.plan import Plan
from coterie.federation.resident import Means
from coterie.federation.server import serve
from coterie.federation.wire import pack, unpack
from coterie.results import Result
from coterie.results.export import export, predict
from coterie.runs.storage import events
from coterie.runs.storage.answers import read_answers
from tests.federation.grid import Local, equal, make_agreement, make_federation, node_rows, simulated, states

LIMIT = 2**30


def played(folder: Path, algorithm: str, means: Means | None = None, **more: Any) -> tuple[Local, Path]:
    local = make_federation(folder, means=means, **more)
    return local, serve(local.agreement, local.grid, Plan(algorithm=algorithm, rounds=2, wait=0.0), folder / "run")


def test_answers_are_those_of_a_simulation_where_silos_let_them_be_told(tmp_path: Path) -> None:
    local, run = played(tmp_path, "fedacs", Means(tell_answers=True))
    other = simulated(local, "fedacs", 2, tmp_path / "simulation")
    ours, theirs = read_answers(run), read_answers(other)
    assert ours is not None and theirs is not None and len(ours)
    pd.testing.assert_frame_equal(ours, theirs, check_exact=True)
    held = read_answers(run, "validation"), read_answers(other, "validation")
    pd.testing.assert_frame_equal(*held, check_exact=True)  # type: ignore[arg-type]
    # A count of right answers is what accuracy is: of each model and client.
    metrics = Result(run).metrics
    test = metrics[(metrics["split"] == "test") & (metrics["metric"] == "accuracy") & (metrics["round"] == 2)]
    for model in set(ours["model"]):
        right = (ours[ours["model"] == model].set_index("client")["answer"] > 0).groupby(level=0).mean()
        measured = test[test["model"] == model].set_index("client")["value"]
        np.testing.assert_allclose(right.to_numpy(), measured.sort_index().to_numpy(), rtol=1e-12)


def test_a_silo_tells_no_answers_unless_its_owner_says_so(tmp_path: Path) -> None:
    local = make_federation(tmp_path)
    local.grid.nodes_[100].means = Means(tell_answers=True)  # of client 0 alone
    run = serve(local.agreement, local.grid, Plan(algorithm="fedavg", rounds=2, wait=0.0), tmp_path / "run")
    told = read_answers(run)
    assert told is not None and set(told["client"]) == {0}
    # Before the last round nobody is asked, and who promised privacy tells nothing whatever its owner says.
    _, private = played(tmp_path / "private", "fedavg", Means(tell_answers=True), privacy={"clip": 1.0, "noise": 0.0})
    assert read_answers(private) is None


@pytest.mark.parametrize("how", ["longer", "beyond one", "another model", "not asked for"])
def test_answers_that_cannot_be_are_garbage(tmp_path: Path, how: str) -> None:
    local = make_federation(tmp_path, means=Means(tell_answers=True))

    def spoil(message: bytes, reply: bytes) -> bytes:
        found = unpack(reply, LIMIT)
        tensors = dict(found.tensors)
        asked = (unpack(message, LIMIT).header.get("evaluate") or {}).get("answers")
        if how == "not asked for" and found.header.get("round") == 2 and not asked:
            tensors["answers/test/personal"] = torch.zeros(3)
        elif asked and how != "not asked for":
            mine = tensors["answers/test/personal"]
            bad = {
                "longer": torch.cat([mine, mine[:1]]),
                "beyond one": torch.full_like(mine, 1.5),
                "another model": mine,
            }[how]
            tensors["answers/test/nobody" if how == "another model" else "answers/test/personal"] = bad
        return pack(found.header, tensors)

    local.grid.faults[99] = spoil  # client 1
    run = serve(local.agreement, local.grid, Plan(algorithm="fedavg", rounds=2, wait=0.0), tmp_path / "run")
    wrong = [event for event in events.read(run) if event.client == 1 and "tells answers" in event.reason]
    assert len(wrong) == 1 and wrong[0].told({1: "silo-1"}).startswith("round 2: silo-1 ")
    told = read_answers(run)
    assert told is not None and set(told["client"]) == ({0, 1, 2} if how == "not asked for" else {0, 2})


def test_the_servers_own_models_are_exported_from_its_folder(tmp_path: Path) -> None:
    """A global model, and personal ones that are made of the server's state alone; they predict as at the nodes."""
    local, run = played(tmp_path, "fedavg")
    written = export(run, tmp_path / "model", best="global")
    np.save(tmp_path / "x.npy", local.datasets[0].x.numpy())
    scores = predict(tmp_path / "model", tmp_path / "x.npy")
    w = states(run)[0]["w"]
    x = local.datasets[0].x.double().flatten(1)
    hidden, outputs = 8, 10
    first, bias, second, last = w.double().split([64 * hidden, hidden, hidden * outputs, outputs])
    inside = (x @ first.view(hidden, 64).T + bias).clamp(min=0)
    chances = (inside @ second.view(outputs, hidden).T + last).softmax(1)
    np.testing.assert_allclose(scores.filter(like="probability").to_numpy(), chances.numpy(), atol=1e-5)
    assert written.about["clients"][0]["client"] is None
    # FedACS mixes models at the server: what a client has is a row there.
    _, other = played(tmp_path / "other", "fedacs")
    each = export(other, tmp_path / "each", clients=["silo-1"])
    (entry,) = each.about["clients"]
    assert (entry["name"], entry["kind"]) == ("silo-1", "personal")
    metrics = Result(other).metrics.query("client == 1 and model == 'personal' and split == 'test' and round == 2")
    assert entry["test"]["accuracy"] == metrics.set_index("metric")["value"]["accuracy"]
    mine = own_population(local.datasets[1], 1, local.agreement.experiment("fedacs", {})).shares.test[1]
    np.save(tmp_path / "y.npy", local.datasets[1].x[mine].numpy())
    found = predict(tmp_path / "each", tmp_path / "y.npy", "silo-1").filter(like="probability").to_numpy().argmax(1)
    assert (found == local.datasets[1].y[mine].numpy()).mean() == pytest.approx(entry["test"]["accuracy"])


def test_where_a_server_has_rows_named_like_the_clients_they_are_theirs(tmp_path: Path) -> None:
    """Which is what personal models are exported from; a reply of client 1 is lost in the second of three rounds."""
    found = []
    for name in registry.names():
        agreed = make_agreement(3)
        config = agreed.experiment(name, {})
        blank = blank_population(agreed, {split: [1, 1, 1] for split in ("train", "validation", "test")})
        simulation = make_simulation(config, agreed, blank)
        client, server = simulation.clients.rows, simulation.server
        if client and all(each in server and server[each].shape == rows.shape for each, rows in client.items()):
            found.append(name)
    assert {"fedacs", "fedamp", "heurfedamp", "fedfomo"} <= {*found}
    for name in found:
        local = make_federation(tmp_path / name)
        rounds: list[object] = []

        def lose(message: bytes, reply: bytes, rounds: list[object] = rounds) -> bytes | None:
            rounds.append(unpack(message, LIMIT).header["round"])
            return None if rounds[-1] == 2 else reply

        local.grid.faults[99] = lose
        plan = Plan(algorithm=name, rounds=3, wait=0.0)
        run = serve(local.agreement, local.grid, plan, tmp_path / name / "run")
        assert 2 in rounds
        server = states(run)[0]
        for client_number in range(3):
            own = node_rows(local, client_number, run)
            equal(own, {each: server[each][client_number : client_number + 1] for each in own})


@pytest.mark.parametrize(("algorithm", "also"), [("ditto", ", or use --best global"), ("local", "")])
def test_what_only_nodes_have_is_said_to_be_there(tmp_path: Path, algorithm: str, also: str) -> None:
    local, run = played(tmp_path, algorithm)
    assert node_rows(local, 0, run)  # which the server has none of
    with pytest.raises(
        ConfigError, match=r"are made of what the nodes keep to themselves: take each from its node's"
    ) as said:
        export(run, tmp_path / "model")
    name = next((local.node_folder(0) / "models").iterdir()).name
    assert str(said.value).endswith(f"models/{name}{also}")
    assert not (tmp_path / "model").exists()
    assert registry.title(algorithm) in str(said.value)
    done = CliRunner().invoke(app, ["export", str(run), "--out", str(tmp_path / "model")])
    assert done.exit_code != 0


def test_models_with_a_part_that_stays_at_home_are_not_exported(tmp_path: Path) -> None:
    _, run = played(tmp_path, "fedavg", local="head")
    with pytest.raises(ConfigError, match=r"the global models of FedAvg in .* are made of what the nodes keep"):
        export(run, tmp_path / "model", best="global")
